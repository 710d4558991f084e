"""Measures the first step of `fit` on CPUs, by strategy and number of replicas.

  python -m benchmarks.start_up
  python -m benchmarks.start_up --models=transformer --layers=2

Each row runs in its own process. It calls `fit` for one step with 32 rows, then for one
with 24 rows, which a strategy may have to trace again. The table has the CPU seconds and
the seconds of each call, and the resident memory of the process after it. Ratios compare
the first step with the row without a strategy.
"""

import itertools
import time
from collections.abc import Sequence

import psutil
from absl import app, flags

from benchmarks import gpu_parts, measure, report

_MODELS = flags.DEFINE_list('models', ['mobilenet', 'transformer'], 'Models.')
_LAYERS = flags.DEFINE_integer('layers', 6, 'Layers of the transformer.')
_REPORT_JSON = flags.DEFINE_string(
  'report_json', None, 'JSON file for the results.'
)
_ROWS = [('none', 1), *itertools.product(['ring_mirrored', 'mirrored'], [2, 4])]


def measure_row(name, layers, strategy, count) -> dict[str, float]:
  """Measures the first steps of a model in this process."""
  devices = measure.split_device('cpu', count)
  import keras
  import numpy as np

  with gpu_parts.strategy_named(strategy, devices).scope():
    if name == 'mobilenet':
      shape = [64, 64, 3]
      model = keras.applications.MobileNetV2(shape, weights=None, classes=10)
    else:
      shape = [16]
      model = gpu_parts.transformer(16, 64, layers, 10)
    model.compile('adam', 'sparse_categorical_crossentropy')
  found = {}
  for what, rows in (('first', 32), ('retrace', 24)):
    x = np.ones([rows, *shape])
    y = x if name == 'transformer' else x[:, 0, 0, 0]
    wall, cpu = time.perf_counter(), time.process_time()
    model.fit(x, y, batch_size=rows, verbose=0)
    found[f'{what} CPU s'] = time.process_time() - cpu
    found[f'{what} wall s'] = time.perf_counter() - wall
    found[f'{what} MB'] = psutil.Process().memory_info().rss / 1e6
  return found


def main(argv: Sequence[str]) -> None:
  """Measures all rows and prints them."""
  del argv
  report.check_target('report_json', _REPORT_JSON.value)
  rows = []
  for model in _MODELS.value:
    one = None
    for strategy, count in _ROWS:
      row = {'model': model, 'strategy': strategy, 'devices': count}
      row |= measure.in_a_process(
        measure_row, model, _LAYERS.value, strategy, count
      )
      rows.append(row)
      one = one or row
      row['CPU ratio'] = row['first CPU s'] / one['first CPU s']
      row['MB ratio'] = row['first MB'] / one['first MB']
  print(report.markdown(list(rows[0]), [list(row.values()) for row in rows]))
  if _REPORT_JSON.value:
    content = {'benchmark': 'start_up', **report.environment(), 'rows': rows}
    report.write_json(_REPORT_JSON.value, content)


if __name__ == '__main__':
  app.run(main)
