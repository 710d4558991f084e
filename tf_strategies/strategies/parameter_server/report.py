"""What steps report: read when somebody asks, from a step that is done."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.strategies.parameter_server import worker_function

# Reading costs a call, and callbacks ask after every batch.
_FRESH_SECONDS = 0.1


def of_task(engine, task) -> Any:
  """What a training step returned, in its structure.

  Numbers are `LatestNumber`s. A step that returns other tensors is waited for.
  """
  if not task.discovery.are_numbers:
    engine.pool.wait(lambda: task.is_finished)
    return worker_function.unreport(task.result, task.discovery)
  latest = Latest(engine, task.step)
  count = len(tf.nest.flatten(task.discovery.outputs))
  return tf.nest.pack_sequence_as(
    task.discovery.outputs, [LatestNumber(latest, i) for i in range(count)]
  )


def of_numbers(discovery, numbers: tf.Tensor) -> Any:
  """What a step returned, from numbers that are here."""
  return worker_function.unreport(numbers, discovery)


class Latest:
  """The numbers of the newest step that is done.

  Waits for one if none is done since the coordinator last wrote a variable,
  which is how Keras begins an epoch. Asked again within a tenth of a second, it
  answers the same.
  """

  def __init__(self, engine, step):
    self._engine = engine
    self._step = step

  def numbers(self) -> np.ndarray:
    """All numbers, float64 [count]."""
    engine = self._engine
    if engine.newest(self._step) is None:
      engine.guard(
        lambda: engine.pool.wait(
          lambda: engine.newest(self._step) or not engine.pool.is_busy
        )
      )
    task = engine.newest(self._step)
    if task is None:  # It was done by a worker that was lost before it told.
      return engine.last_numbers(self._step)
    now = time.monotonic()
    numbers, read_at, read_from = engine.numbers.get(
      self._step, (None, 0.0, None)
    )
    is_fresh = now - read_at < _FRESH_SECONDS and engine.pool.is_busy
    if read_from is task or (is_fresh and read_from is not None):
      return numbers
    try:
      numbers = task.result.numpy()
    except tf.errors.OpError:  # The worker that has it was lost.
      _tf_internal.clear_errors()
      return engine.last_numbers(self._step)
    engine.numbers[self._step] = numbers, now, task
    return numbers


class LatestNumber:
  """One number of `Latest`, to be read as a float."""

  def __init__(self, latest: Latest, index: int):
    self._latest = latest
    self._index = index

  def __float__(self) -> float:
    return float(self._latest.numbers()[self._index])

  def __int__(self) -> int:
    return int(float(self))

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    del copy
    return np.asarray(float(self), dtype)

  def numpy(self) -> np.ndarray:
    """As a NumPy scalar."""
    return np.asarray(float(self))

  def __repr__(self) -> str:
    return repr(float(self))
