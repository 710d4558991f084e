"""Writes the table of programs in docs/programs.md.

  python -m tests.programs.table
  python -m tests.programs.table --columns=ring_mirrored --programs=vae,unet

Runs every program under each of our strategies and TensorFlow's. Each column
runs in its own processes with a deadline. Cells that were not requested are not
changed. It takes an hour on two cores.
"""

import os
import tempfile

from absl import app, flags

from tests.programs import common, runner

_PAGE = os.path.join(
  os.path.dirname(__file__), '..', '..', 'docs', 'programs.md'
)
# Time limit for one program. The first in a process takes longest.
_SECONDS = 200
_AT_ONCE = 6  # Programs in one process.

# Cases by the name of their column.
COLUMNS = {
  'MirroredStrategy': 'MirroredStrategy',
  'ring_mirrored': 'ring_mirrored',
  'central_storage': 'central_storage',
  'multi_worker_ring': 'ring_2x1',
  'multi_worker_collective': 'collective_2x1',
  'parameter_server': 'servers_sync_2',
}

_COLUMNS = flags.DEFINE_list('columns', list(COLUMNS), 'Columns to run.')
_PROGRAMS = flags.DEFINE_list(
  'programs', [], 'Programs to run. All by default.'
)

# The result of a program whose process did not finish.
_HANGS = runner.Failure('never ends', '', False)
_DIES = runner.Failure('the process dies', '', False)


def _run(case, names) -> dict:
  """Returns the results of each program on each rank, in a case or on one device."""
  results, left = {}, list(names)
  while left:
    now, directory = left[:_AT_ONCE], tempfile.mkdtemp()
    rows = [(case, name) for name in now]
    ended = runner.start(rows, directory, 60 + _SECONDS * len(now))
    hangs = any(outcome.exitcode is None for outcome in ended)
    for name in now:
      found = runner.read(directory, case, name)
      results[name] = [
        (_HANGS if hangs else _DIES) if f is None else f for f in found
      ]
      left.remove(name)
      if any(f is None or isinstance(f, runner.Failure) for f in found):
        break  # Later programs may have waited for this one.
  return results


def _cell(name, want, found) -> str:
  """Returns the text of a cell, given the results of all ranks."""
  failures = [f for f in found if isinstance(f, runner.Failure)]
  for failure in failures[:1]:
    how = 'refused:' if failure.is_typed else '**raises**'
    return f'{how} `{failure.type}`'
  far = max(runner.difference(want, f) for f in found)
  if far <= runner.limit_of(name):
    return f'exact ({far:.0e})'
  return f'**differs** ({far:.0e})'


def _read() -> dict[tuple[str, str], str]:
  """Returns the cells of the page by program and column."""
  if not os.path.exists(_PAGE):
    return {}
  with open(_PAGE) as f:
    head, *rows = common.table_rows(f.read())
  return {
    (row[0].strip('`'), column.strip('`')): cell
    for row in rows
    for column, cell in zip(head[1:], row[1:], strict=True)
  }


def _write(cells) -> None:
  head = ' | '.join(f'`{c}`' for c in COLUMNS)
  lines = [f'| Program | {head} |', '|---' * (len(COLUMNS) + 1) + '|']
  for name in runner.PAGE:
    row = ' | '.join(cells.get((name, c), 'not run') for c in COLUMNS)
    lines.append(f'| `{name}` | {row} |')
  with open(_PAGE) as f:
    text = f.read().partition('| Program')[0]
  with open(_PAGE, 'w') as f:
    f.write(text + '\n'.join(lines) + '\n')


def main(_):
  """Runs the requested programs, and writes the page after every column."""
  names = _PROGRAMS.value or list(runner.PAGE)
  want = {n: f[0] for n, f in _run(None, names).items()}
  for column in _COLUMNS.value:
    found = _run(COLUMNS[column], names)
    cells = _read()
    for name in names:
      cells[name, column] = _cell(name, want[name], found[name])
      print(column, name, cells[name, column], flush=True)
      for result in found[name]:
        if isinstance(result, runner.Failure):
          print(result.text, flush=True)
    _write(cells)


if __name__ == '__main__':
  app.run(main)
