"""Writes the table of programs in docs/programs.md.

  python -m tests.programs.table
  python -m tests.programs.table --columns=ring_mirrored --programs=vae,unet

Runs every program under every strategy, and under TensorFlow's own, each column
in processes of its own that end at a deadline; cells that are not asked for stay
as they are. It takes an hour on two cores.
"""

import os
import tempfile

from absl import app, flags

from tests import parameter_servers, processes
from tests.programs import runner

_PAGE = os.path.join(
  os.path.dirname(__file__), '..', '..', 'docs', 'programs.md'
)
_SECONDS = 200  # For one program; the first of a process takes longest.
_AT_ONCE = 6  # Programs in one process.

# By name: how many processes.
COLUMNS = {
  'ring_mirrored': 1,
  'central_storage': 1,
  'multi_worker_ring': 2,
  'multi_worker_collective': 2,
  'parameter_server': 1,
  'MirroredStrategy': 1,
}

_COLUMNS = flags.DEFINE_list('columns', list(COLUMNS), 'Which to run.')
_PROGRAMS = flags.DEFINE_list('programs', [], 'Which to run; all by default.')

# What is left of a program whose process did not get to its end.
_HANGS = runner.Failure('never ends', '', False)
_DIES = runner.Failure('the process dies', '', False)


def _work(rank, column, names, directory):
  """Runs programs in one process of a column, or on one device."""
  import tensorflow as tf

  import tf_strategies as tfs
  from tests import virtual_devices

  virtual_devices.configure()

  def strategy():
    if column == 'MirroredStrategy':
      return tf.distribute.MirroredStrategy(virtual_devices.names(4))
    if column in ('ring_mirrored', 'central_storage'):
      return tfs.create_strategy(column, devices=virtual_devices.names(4))
    if column == 'parameter_server':
      return tfs.create_strategy(column, mode='sync')
    return None

  for name in names:
    made = strategy()
    found = runner.outcome(name, made)
    runner.write(directory, rank, name, found)
    if column == 'parameter_server':
      made.close()


def _start(column, names, directory, deadline):
  """Runs programs in the processes of a column; whether the deadline ended them."""
  if column == 'parameter_server':
    with parameter_servers.Job(2, 2, deadline) as job:
      job.start_chief(_work, (0, column, names, directory))
      outcomes = [job.wait()]
  elif column.startswith('multi_worker'):
    case = next(c for c in runner.WORKERS if c.strategy == column)
    args = (case, names, directory)
    with processes.Workers(runner.work, 2, args, deadline=deadline) as workers:
      outcomes = workers.wait()
  else:
    with processes.ProcessGroup(deadline) as group:
      group.start_function(0, _work, (0, column, names, directory))
      outcomes = group.wait_for([0])
  return any(o.exitcode is None for o in outcomes)


def _run(column, names) -> dict:
  """What each rank found of each program."""
  results, left = {}, list(names)
  while left:
    now, directory = left[:_AT_ONCE], tempfile.mkdtemp()
    hangs = _start(column, now, directory, 60 + _SECONDS * len(now))
    for name in now:
      ranks = range(COLUMNS.get(column, 1))
      found = [runner.read(directory, rank, name) for rank in ranks]
      results[name] = [
        (_HANGS if hangs else _DIES) if f is None else f for f in found
      ]
      left.remove(name)
      if any(f is None or isinstance(f, runner.Failure) for f in found):
        break  # What comes after it may have waited for it.
  return results


def _cell(name, want, found) -> str:
  """What the table says of the results of all ranks."""
  failures = [f for f in found if isinstance(f, runner.Failure)]
  for failure in failures[:1]:
    how = 'refused:' if failure.is_typed else '**raises**'
    return f'{how} `{failure.type}`'
  far = max(runner.difference(want, f) for f in found)
  if far <= runner.limit_of(name):
    return f'exact ({far:.0e})'
  return f'**differs** ({far:.0e})'


def _read() -> dict[tuple[str, str], str]:
  """The cells of the page, by program and column."""
  cells, columns = {}, []
  if os.path.exists(_PAGE):
    with open(_PAGE) as f:
      for line in f:
        row = [cell.strip() for cell in line.strip('|\n').split('|')]
        if line.startswith('| Program'):
          columns = [cell.strip('`') for cell in row[1:]]
        elif line.startswith('| `'):
          name = row[0].strip('`')
          cells.update(
            {(name, c): cell for c, cell in zip(columns, row[1:], strict=True)}
          )
  return cells


def _write(cells) -> None:
  head = ' | '.join(f'`{c}`' for c in COLUMNS)
  lines = [f'| Program | {head} |', '|---' * (len(COLUMNS) + 1) + '|']
  for name in runner.PROGRAMS:
    row = ' | '.join(cells.get((name, c), 'not run') for c in COLUMNS)
    lines.append(f'| `{name}` | {row} |')
  with open(_PAGE) as f:
    text = f.read().partition('| Program')[0]
  with open(_PAGE, 'w') as f:
    f.write(text + '\n'.join(lines) + '\n')


def main(_):
  """Runs what was asked for, and writes the page after every column."""
  names = _PROGRAMS.value or list(runner.PROGRAMS)
  want = {n: f[0] for n, f in _run('one_device', names).items()}
  for column in _COLUMNS.value:
    found = _run(column, names)
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
