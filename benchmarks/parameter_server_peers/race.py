"""How fast the loss falls, seen from inside of a `fit`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras

_ROWS = 'rows'


class Rows(keras.metrics.Metric):
  """Counts the rows that were trained on since the epoch began."""

  def __init__(self):
    super().__init__(name=_ROWS)
    self._total = self.add_variable((), initializer='zeros', name='total')

  def update_state(self, y_true, y_pred, sample_weight=None):
    """Adds those of a batch."""
    del y_true, sample_weight
    rows = keras.ops.shape(y_pred)[0]
    self._total.assign(self._total + keras.ops.cast(rows, 'float32'))

  def result(self):
    """Returns how many there were."""
    return self._total


class LossWatch(keras.callbacks.Callback):
  """Notes how the loss falls while an epoch goes on.

  What `fit` reports is the mean since the epoch began, of a step that was done
  lately. Together with the rows until then, two such means say what the loss
  was in between.

  Args:
    window_rows: rows of training over which a loss is a mean, at least.

  Attributes:
    curve: pairs of seconds since the epoch began and loss.
    seconds: of the epoch, until its last step was done.
  """

  def __init__(self, window_rows: int):
    super().__init__()
    self.curve: list[tuple[float, float]] = []
    self.seconds = 0.0
    self._window_rows = window_rows
    self._rows = self._sum = 0.0

  def on_epoch_begin(self, epoch, logs=None):
    """Starts the clock, with no step on the way."""
    self.model.optimizer.iterations.numpy()
    self._start = time.perf_counter()

  def on_train_batch_end(self, batch, logs=None):
    """Notes a mean if enough rows were trained on since the last one."""
    self.note(time.perf_counter() - self._start, logs[_ROWS], logs['loss'])

  def on_epoch_end(self, epoch, logs=None):
    """Stops the clock when all steps are done."""
    self.model.optimizer.iterations.numpy()
    self.seconds = time.perf_counter() - self._start
    self.note(self.seconds, logs[_ROWS], logs['loss'])

  def note(self, seconds: float, rows: float, mean: float) -> None:
    """Notes what has been reported.

    Example:

      >>> watch = LossWatch(window_rows=100)
      >>> watch.note(0.1, 100, 3.0)
      >>> watch.note(0.2, 150, 2.5)
      >>> watch.note(0.3, 200, 2.0)
      >>> watch.curve
      [(0.1, 3.0), (0.3, 1.0)]

    Args:
      seconds: since the epoch began.
      rows: that were trained on in it.
      mean: loss of these rows.
    """
    new = rows - self._rows
    if new < self._window_rows:
      return
    total = mean * rows
    self.curve.append((seconds, (total - self._sum) / new))
    self._rows, self._sum = rows, total


def seconds_to(
  curve: Sequence[tuple[float, float]], target: float
) -> float | None:
  """Returns when a loss was reached first; None if it never was.

  Example:

    >>> seconds_to([(0.1, 3.0), (0.3, 1.0), (0.5, 0.5)], 1.0)
    0.3

  Args:
    curve: as `LossWatch` has it.
    target: the loss.
  """
  return next((seconds for seconds, loss in curve if loss <= target), None)


def counted_between(
  before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns what a strategy's report counted between two calls.

  Example:

    >>> counted_between({'dropped': 1, 'staleness': {0: 4}},
    ...                 {'dropped': 3, 'staleness': {0: 5, 2: 7}})
    {'dropped': 2, 'staleness': {'0': 1, '2': 7}}

  Args:
    before: `strategy.report()`.
    after: the same, later.
  """
  staleness = {
    str(age): count - before['staleness'].get(age, 0)
    for age, count in after['staleness'].items()
  }
  return {
    'dropped': after['dropped'] - before['dropped'],
    'staleness': {age: count for age, count in staleness.items() if count},
  }
