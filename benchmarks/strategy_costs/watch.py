"""Time, traffic and test loss of a `fit`, without what is not training."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import keras
import psutil

# Of Linux, of macOS.
_LOOPBACKS = ('lo', 'lo0')


@dataclasses.dataclass(frozen=True)
class Reading:
  """What a clock has counted while it ran.

  Attributes:
    seconds: of the wall clock.
    loopback_bytes: that this machine sent to itself, whoever sent them; None
      where the system does not count them.
  """

  seconds: float
  loopback_bytes: int | None


class Clock:
  """Counts seconds and bytes over loopback, with pauses.

  Example:

    >>> clock = Clock()
    >>> clock.go_on()
    >>> clock.pause().seconds > 0
    True
  """

  def __init__(self):
    self._seconds = 0.0
    self._bytes = 0
    self._started = (0.0, None)

  def go_on(self) -> None:
    """Begins to count, or goes on after a pause."""
    sent = loopback_bytes()
    self._started = (time.perf_counter(), sent)

  def pause(self) -> Reading:
    """Stops to count; returns what was counted since the clock was made."""
    seconds, sent = self._started
    self._seconds += time.perf_counter() - seconds
    now = loopback_bytes()
    if sent is None or now is None:
      return Reading(self._seconds, None)
    self._bytes += now - sent
    return Reading(self._seconds, self._bytes)


def loopback_bytes() -> int | None:
  """Bytes that this machine has sent to itself; None if it does not count."""
  counters = psutil.net_io_counters(pernic=True)
  for name in _LOOPBACKS:
    if name in counters:
      return counters[name].bytes_sent
  return None


class Watch(keras.callbacks.Callback):
  """Counts what the steps of each epoch took, and notes the test loss.

  The clock runs from the beginning of an epoch to the end of its last step. No
  step is on the way when it starts, pauses and stops.

  Args:
    steps_per_epoch: of training.
    rows_in_step: returns the rows in a step of an epoch, from 0.
    join: waits for steps that still run.
    evaluate: returns the test loss; None notes none.
    evaluate_every: steps between two test losses. There is one before the
      first step and after each epoch besides.

  Attributes:
    epochs: what was counted in each, and its `rows`.
    curve: pairs of seconds of training and test loss.
  """

  def __init__(
    self,
    steps_per_epoch: int,
    rows_in_step: Callable[[int], int],
    join: Callable[[], None],
    evaluate: Callable[[], float] | None = None,
    evaluate_every: int = 0,
  ):
    super().__init__()
    self.epochs: list[dict[str, float]] = []
    self.curve: list[tuple[float, float]] = []
    self._steps_per_epoch = steps_per_epoch
    self._rows_in_step = rows_in_step
    self._join = join
    self._evaluate = evaluate
    self._evaluate_every = evaluate_every
    self._seconds = 0.0  # Of the epochs before.
    self._steps = 0

  @property
  def examples_per_second(self) -> float | None:
    """The median of the epochs; None if there was none."""
    rates = [epoch['rows'] / epoch['seconds'] for epoch in self.epochs]
    return statistics.median(rates) if rates else None

  def on_train_begin(self, logs=None):
    """Notes the loss of the initial weights."""
    self._note(0.0)

  def on_epoch_begin(self, epoch, logs=None):
    """Starts the clock."""
    self._join()
    self._clock = Clock()
    self._rows = 0
    self._clock.go_on()

  def on_train_batch_end(self, batch, logs=None):
    """Stops the clock after the last step, pauses it for a test loss."""
    self._steps += 1
    self._rows += self._rows_in_step(batch)
    if batch + 1 == self._steps_per_epoch:
      self._end_epoch()
    elif self._is_due():
      self._join()
      self._note(self._clock.pause().seconds)
      self._clock.go_on()

  def _is_due(self) -> bool:
    every = self._evaluate_every
    return bool(self._evaluate and every and self._steps % every == 0)

  def _end_epoch(self) -> None:
    self._join()
    reading = self._clock.pause()
    self.epochs.append({**dataclasses.asdict(reading), 'rows': self._rows})
    self._note(reading.seconds)
    self._seconds += reading.seconds

  def _note(self, seconds: float) -> None:
    if self._evaluate is not None:
      self.curve.append((self._seconds + seconds, self._evaluate()))
