"""The program of each task of a job of `strategies`: an example with a clock.

  python -m benchmarks.strategy_costs.task '{"options": ..., ...}'

The argument is a `Spec` as JSON. Each task that trains writes the report of the
example and the measurements to `<rank>.json`.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import psutil
from absl import flags

import tf_strategies as tfs
from benchmarks import report
from examples import common, mnist_keras_fit


@dataclasses.dataclass(frozen=True)
class Spec:
  """The training and the measurements of a task.

  Attributes:
    options: values of the example's flags, by name. None is the default.
    num_virtual_devices: number of logical devices. 0 does not change the devices.
    untimed_steps: number of steps that are trained and undone before the clock
      starts. They trace and build the functions of each worker.
    output_dir: directory of the reports.
  """

  options: Mapping[str, Any]
  num_virtual_devices: int
  untimed_steps: int
  output_dir: str

  def flags(self) -> list[str]:
    """Returns the command line of the example."""
    options = {**self.options, 'num_virtual_devices': self.num_virtual_devices}
    return [
      f'--{name}={str(value).lower() if isinstance(value, bool) else value}'
      for name, value in options.items()
      if value is not None
    ]


def train(spec: Spec) -> dict[str, Any]:
  """Trains as an example does, and returns its report with the measurements.

  Raises:
    UnsupportedOptionError: if the options cannot give a right result.
    DataError: if data are missing or damaged.
  """
  flags.FLAGS(['task', *spec.flags()])
  common.set_defaults()
  strategy = common.create_strategy()
  data = common.load_data()
  model = mnist_keras_fit.build_model(strategy, data.num_classes)
  steps = flags.FLAGS.steps_per_epoch
  untimed = min(spec.untimed_steps, steps)
  # With parameter servers, steps may still be running.
  join = getattr(strategy, 'join', lambda: None)
  _train_untimed(strategy, data, model, untimed)
  # The last batch of a pass over the data has fewer rows.
  batch, n = flags.FLAGS.global_batch_size, data.train.num_examples
  passes, rest = divmod(steps, math.ceil(n / batch))
  watch = Watch(steps, passes * n + rest * batch, join)
  history = model.fit(
    common.train_batches(strategy, data),
    epochs=flags.FLAGS.epochs,
    steps_per_epoch=steps,
    validation_data=common.test_batches(data),
    callbacks=[watch],
    verbose=0,
  )
  logs = {name: values[-1] for name, values in history.history.items()}
  found = common.report(data, model, model.metrics, logs, (0, 0))
  found |= {
    'examples_per_second': watch.examples_per_second,
    'bytes_per_step': bytes_per_step(found, found['steps_this_run'] + untimed),
    'rank': getattr(strategy, 'rank', 0),
    'timed_epochs': watch.epochs,
  }
  if found['parameter_server']:
    strategy.close()
  return found


def bytes_per_step(
  found: Mapping[str, Any], steps: int
) -> tuple[float | None, float | None]:
  """Returns the bytes of a step into the busiest device and into all, on average.

  They are None if they were not counted.

  Args:
    found: report of an example.
    steps: number of steps that it counted.
  """
  counted = found['all_reduce'] or {}
  is_alone = found['replicas'] == 1 and not found['parameter_server']
  if 'link' in counted or not (counted or is_alone):
    return None, None
  into = collections.Counter()
  for kind, by_device in counted.items():
    if kind.endswith('_bytes_in'):
      into.update(by_device)
  return max(into.values(), default=0) / steps, into.total() / steps


class Watch(keras.callbacks.Callback):
  """Measures the time and traffic of the steps of each epoch.

  The clock runs from the beginning of an epoch to the end of its last step. No
  step is in progress when it starts and stops. Validation is not measured.

  Args:
    steps_per_epoch: number of training steps per epoch.
    rows: number of rows per epoch.
    join: waits for running steps.

  Attributes:
    epochs: `seconds`, `rows` and `loopback_bytes` of each epoch. The latter are all
      bytes that this machine sent over loopback meanwhile, or None if the system
      does not count them.
  """

  def __init__(
    self,
    steps_per_epoch: int,
    rows: int,
    join: Callable[[], None],
  ):
    super().__init__()
    self.epochs: list[dict[str, float | None]] = []
    self._steps_per_epoch = steps_per_epoch
    self._rows = rows
    self._join = join

  @property
  def examples_per_second(self) -> float:
    """Returns the median rate of the epochs."""
    rates = [epoch['rows'] / epoch['seconds'] for epoch in self.epochs]
    return statistics.median(rates)

  def on_epoch_begin(self, epoch, logs=None):
    """Starts the clock."""
    self._join()
    self._sent = loopback_bytes()
    self._start = time.perf_counter()

  def on_train_batch_end(self, batch, logs=None):
    """Stops the clock after the last step."""
    if batch + 1 < self._steps_per_epoch:
      return
    self._join()
    seconds, sent = time.perf_counter() - self._start, loopback_bytes()
    if sent is not None:
      sent -= self._sent
    self.epochs.append(
      {'seconds': seconds, 'rows': self._rows, 'loopback_bytes': sent}
    )


def loopback_bytes() -> int | None:
  """Returns the bytes that this machine sent over loopback, or None if not counted."""
  counters = psutil.net_io_counters(pernic=True)
  for name in ('lo', 'lo0'):  # On Linux and on macOS.
    if name in counters:
      return counters[name].bytes_sent
  return None


def _train_untimed(strategy, data, model: keras.Model, steps: int) -> None:
  """Trains some steps and undoes them."""
  with strategy.scope():
    model.optimizer.build(model.trainable_variables)
  variables = [*model.weights, *model.optimizer.variables]
  values = [v.numpy() for v in variables]
  model.fit(
    common.train_batches(strategy, data),
    steps_per_epoch=steps,
    verbose=0,
  )
  for variable, value in zip(variables, values, strict=True):
    variable.assign(value)


def main(argv: Sequence[str]) -> int:
  """Runs this task of the job, and returns the exit status."""
  spec = Spec(**json.loads(argv[1]))
  try:
    found = tfs.cluster.run_task(lambda: train(spec))
  except tfs.errors.Error as e:
    print(f'{type(e).__name__}: {e}', file=sys.stderr)
    return 1
  path = os.path.join(spec.output_dir, f'{found["rank"]}.json')
  report.write_json(path, found)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv))
