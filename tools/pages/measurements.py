"""Writes the results of benchmarks into the documents.

  python -m tools.pages.measurements

A benchmark writes its report with --report_json=benchmarks/results/NAME.json. The table
of a report is in a document between two lines,

  <!-- measured: NAME -->
  <!-- /measured -->

together with command, machine, versions and date. If a report is missing, its block does
not change. Then sentences that repeat figures are compared with the reports (`claims`).
Wrong sentences are printed, and the status is 1. MkDocs also fills the blocks.
"""

from __future__ import annotations

import json
import pathlib
import re
import shlex
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from tf_strategies import errors
from tools.pages import claims, measured_tables

_ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = _ROOT / 'benchmarks/results'
_DOCUMENTS = ('benchmarks/README.md', 'docs/*.md')
_BLOCK = re.compile(
  r'^<!-- measured: (\S+) -->\n(.*?)^<!-- /measured -->$',
  re.MULTILINE | re.DOTALL,
)
_MARK = re.compile(r'^<!-- /?measured\b', re.MULTILINE)
_LINE = 88
# What a table raises whose report is another program's, or cut off.
_UNEXPECTED = (
  *(LookupError, TypeError, ValueError),
  *(AttributeError, ArithmeticError),
)
# Versions that are shown with a table, where the report has them.
_VERSIONS = ('TensorFlow', 'NumPy', 'torch', 'mpi4py')


def read(directory: pathlib.Path) -> dict[str, dict[str, Any]]:
  """The reports in a directory by their names.

  Raises:
    DataError: a file is no report of a benchmark that has a table.
  """
  found = {}
  for path in sorted(directory.glob('*.json')):
    try:
      content = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError, RecursionError) as e:
      raise _malformed(path.name, f'it is no JSON: {e}') from e
    if not isinstance(content, dict):
      raise _malformed(path.name, f'it holds a {type(content).__name__}')
    if content.get('benchmark') not in [*measured_tables.TABLES]:
      raise _malformed(
        path.name,
        f'its benchmark is {content.get("benchmark")!r}, of which '
        'tools/pages/measured_tables.py has no table',
      )
    found[path.stem] = content
  return found


def blocks(reports: Mapping[str, dict[str, Any]]) -> dict[str, str]:
  """Returns the text between the marks, by the name in the first mark.

  Args:
    reports: as `read` returns them.

  Raises:
    DataError: a report lacks what its table needs.
  """
  made = {}
  for name, content in reports.items():
    try:
      part, table = measured_tables.TABLES[content['benchmark']]
      if part not in content:
        raise KeyError(part)
      made[name] = f'\n{_about(content)}\n\n{table(content)}\n\n'
    except _UNEXPECTED as e:
      reason = f'its table needs {e}' if isinstance(e, KeyError) else str(e)
      raise _malformed(f'{name}.json', reason) from e
  return made


def filled(text: str, made: Mapping[str, str]) -> str:
  """Returns a document with its blocks rewritten.

  Example:

    >>> old = '<!-- measured: a -->\\n1\\n<!-- /measured -->'
    >>> print(filled(old, {'a': '2\\n'}))
    <!-- measured: a -->
    2
    <!-- /measured -->

  Args:
    text: Markdown.
    made: as `blocks` returns them.

  Raises:
    DataError: a block has no end, or an end no beginning.
  """
  if len(_MARK.findall(text)) != 2 * len(_BLOCK.findall(text)):
    raise errors.DataError(
      'Expected a line `<!-- /measured -->` after each `<!-- measured: NAME '
      '-->`. Fix: write both, each in a line of its own.'
    )

  def written(match: re.Match[str]) -> str:
    name, old = match.groups()
    new = made.get(name, old)
    return f'<!-- measured: {name} -->\n{new}<!-- /measured -->'

  return _BLOCK.sub(written, text)


def names(text: str) -> list[str]:
  """The names of a document's blocks, in order."""
  return [match[1] for match in _BLOCK.finditer(text)]


def documents() -> dict[pathlib.Path, str]:
  """The text of every document that may have blocks."""
  paths = [path for where in _DOCUMENTS for path in sorted(_ROOT.glob(where))]
  return {path: path.read_text(encoding='utf-8') for path in paths}


def _about(content: Mapping[str, Any]) -> str:
  """Returns the command, the machine and the versions."""
  hardware, versions = content['hardware'], dict(content['versions'])
  for link in content.get('links', ()):  # Peers that are not in this process.
    for loaded in link['versions'].values():
      versions |= {k: v for k, v in loaded.items() if k != 'python'}
  known = {name.lower(): name for name in _VERSIONS}
  parts = [
    f'{hardware["cpu_count"]} x {hardware["cpu_model"]}',
    *(hardware['gpus'] or ()),
    f'{hardware["memory_bytes"] / 2**30:.0f} GiB'
    if hardware['memory_bytes']
    else '',
    f'Python {versions["python"]}',
    *(f'{n} {versions[k]}' for k, n in known.items() if k in versions),
    content['date'][:10],
    f'load average before {content["load_average"][0]:.1f}',
  ]
  sentence = ', '.join(filter(None, parts)) + '.'
  for name, reason in content.get('skipped', {}).items():
    sentence += f' Without `{name}`: {reason}'
  return f'```bash\n{_wrapped(content["command"])}\n```\n\n' + '\n'.join(
    textwrap.wrap(sentence, _LINE + 8, break_on_hyphens=False)
  )


def _wrapped(command: str) -> str:
  """A command in lines that are not long, as a shell reads them."""
  lines = ['']
  for word in map(shlex.quote, shlex.split(command)):
    if lines[-1] and len(lines[-1]) + len(word) > _LINE:
      lines.append(' ')
    lines[-1] += f' {word}' if lines[-1] else word
  return ' \\\n'.join(lines)


def _malformed(name: str, reason: str) -> errors.DataError:
  return errors.DataError(
    f'Expected benchmarks/results/{name} to be what a benchmark writes with '
    f'--report_json, but {reason}. Fix: run the benchmark again.'
  )


def main() -> int:
  """Writes the documents. Returns 1 if sentences must be rewritten."""
  reports = read(RESULTS)
  made = blocks(reports)
  found = documents()
  shown = set()
  for path, text in found.items():
    shown |= {*names(text)}
    written = filled(text, made)
    if written != text:
      path.write_text(written, encoding='utf-8')
      print(f'wrote: {path.relative_to(_ROOT)}')
  problems = [f'no document has a block for {n}' for n in {*made} - shown]
  problems += claims.problems(found[_ROOT / claims.DOCUMENT], reports)
  print('\n'.join(problems) or 'All figures are those of the reports.')
  return 1 if problems else 0


if __name__ == '__main__':
  sys.exit(main())
