"""Runs every exhibit on TensorFlow's strategies and ours, and writes the page.

  PYTHONPATH=. python -m tests.museum.run
  PYTHONPATH=. python -m tests.museum.run --only=keras#20585,keras#20582

The table of `docs/museum.md` gets two columns for the installed versions of
TensorFlow and Keras. The columns for other versions do not change.
"""

import os
from collections.abc import Mapping

# TensorFlow reads it during import.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import keras
import tensorflow as tf
from absl import app, flags

from tests.museum import exhibits, running
from tests.programs import common

_PAGE = flags.DEFINE_string('page', 'docs/museum.md', 'The page to write.')
_ONLY = flags.DEFINE_list('only', [], 'Reports to run, as keras#20585; or all.')
_DEADLINE = flags.DEFINE_float(
  'deadline', 120.0, 'Seconds after which the processes of a run are ended.'
)

# Cells of the table, by report and column title.
Cells = dict[str, dict[str, str]]

_REPOSITORIES = {
  'horovod': 'horovod/horovod',
  'keras': 'keras-team/keras',
  'ray': 'ray-project/ray',
  'tensorflow': 'tensorflow/tensorflow',
}
_TITLES = ['Report', 'Reported symptom']
_HEAD = """# Public bug reports of TensorFlow's strategies

Each row is a bug report about TensorFlow's strategies. A program in
[`tests/museum`](../tests/museum/programs.py) reproduces it on CPUs, with little data. If the
report's own program could not be read, only the symptom is the same. Each program runs under
TensorFlow's strategy and under *ours*, the one of this package that replaces it:
`RingMirroredStrategy` for `MirroredStrategy`, `MultiWorkerRingStrategy` for
`MultiWorkerMirroredStrategy`, and `ParameterServerStrategy` for TensorFlow's. *right* means
that the result equals one device's within 1e-5 (2e-3 with 16 bits), or is the one that the
row expects. If TensorFlow's result is *right*, the bug has been fixed since, or needs GPUs,
several hosts or other data. On CPUs the error may differ from the reported one.

```bash
PYTHONPATH=. python -m tests.museum.run  # Two columns, for this TensorFlow.
```

"""
_FOOT = """
These reports are not in the table, because their text was not available: {}.
"""


def titles(tensorflow: str, keras_version: str) -> dict[str, str]:
  """Returns the column titles for one version of TensorFlow, by side."""
  where = f'TensorFlow {tensorflow}, Keras {keras_version}'
  return {running.STOCK: where, running.OURS: f'ours with {tensorflow}'}


def read(page: str) -> Cells:
  """Returns the cells of a page's table."""
  head, *rows = common.table_rows(page)
  return {
    row[0].partition(']')[0].strip('['): dict(
      zip(head[2:], row[2:], strict=True)
    )
    for row in rows
  }


def write(cells: Mapping[str, Mapping[str, str]]) -> str:
  """Returns the page with a table of these cells."""
  columns = list(dict.fromkeys(c for row in cells.values() for c in row))
  rows = [[*_TITLES, *columns]]
  for exhibit in exhibits.EXHIBITS:
    row = cells.get(exhibit.report, {})
    found = [row.get(column, 'not run') for column in columns]
    rows.append([_link(exhibit.report), exhibit.symptom, *found])
  lines = [f'| {" | ".join(row)} |' for row in rows]
  lines.insert(1, '|---' * len(rows[0]) + '|')
  missing = ', '.join(map(_link, exhibits.NOT_FOUND))
  return _HEAD + '\n'.join(lines) + '\n' + _FOOT.format(missing)


def _link(report):
  project, _, number = report.partition('#')
  repository = _REPOSITORIES[project]
  return f'[{report}](https://github.com/{repository}/issues/{number})'


def main(argv: list[str]) -> None:
  """Runs exhibits and writes the page after each one."""
  if len(argv) > 1:
    raise app.UsageError(f'Expected flags only, got {argv[1:]}.')
  cells = {}
  if os.path.exists(_PAGE.value):
    with open(_PAGE.value, encoding='utf-8') as f:
      cells = read(f.read())
  columns = titles(tf.__version__, keras.__version__)
  names = _ONLY.value or [exhibit.report for exhibit in exhibits.EXHIBITS]
  for exhibit in map(running.by_report, names):
    for side, column in columns.items():
      finding = running.find(exhibit, side, _DEADLINE.value)
      cells.setdefault(exhibit.report, {})[column] = finding.text
      print(f'{exhibit.report}, {side}: {finding.text}', flush=True)
    with open(_PAGE.value, 'w', encoding='utf-8') as f:
      f.write(write(cells))


if __name__ == '__main__':
  app.run(main)
