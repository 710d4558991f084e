"""What each worker keeps of its own between two units: its inner optimizer's state.

It stays on the worker, as tensors that a unit takes and other ones that it returns: a
unit that fails has changed nothing. A place is a worker in `sync`, whoever does its
work, and the worker itself elsewhere.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_strategies.strategies.parameter_server import (
  partitioned,
  worker_function,
  worker_pool,
)


@dataclasses.dataclass
class _State:
  """The values of variables, by id, and who has them; nobody: arrays are here."""

  values: dict[int, Any]
  worker: int | None = None
  life: int = 0  # Of the worker: how often it had died.


class WorkerStates:
  """The state of each place."""

  def __init__(self, pool: worker_pool.WorkerPool):
    self.lost = 0  # How many were lost with their worker.
    self._pool = pool
    self._lock = threading.RLock()
    self._places: dict[int, _State] = {}

  def life_of(self, worker: int) -> int:
    """What `keep` is to be told, asked before the worker begins."""
    return self._pool.deaths[worker]

  def keep(
    self,
    place: int,
    worker: int,
    life: int,
    variables: Sequence[Any],
    values: Sequence[tf.Tensor],
  ) -> None:
    """Notes what a place has from now on; the worker holds it."""
    values = dict(zip(map(id, variables), values, strict=True))
    with self._lock:
      self._places[place] = _State(values, worker, life)

  def take(
    self, place: int, worker: int, variables: Sequence[Any]
  ) -> list[Any]:
    """What a place has of variables, for a worker; None where the server has it.

    What was lost with its worker is the mean of what the others have.
    """
    with self._lock:
      state = self._places.get(place)
    if state is None:
      return [None] * len(variables)
    if state.worker is None:
      return [self._constant(state.values.get(id(v))) for v in variables]
    if state.worker == worker and self._is_alive(state):
      return [state.values.get(id(v)) for v in variables]
    arrays = self._arrays(state, variables)
    if arrays is None:
      arrays = self._replacement(place, state, variables)
    return [self._constant(a) for a in arrays]

  def read(self, variable) -> np.ndarray:
    """What places have of a variable, stacked; what the server has if none has it."""
    found = self._parts(variable)
    parts = [p for p in found if p is not None]
    if not parts:
      return np.asarray(variable.numpy())[None]
    mean = _mean(np.stack(parts))
    return np.stack([mean if p is None else p for p in found])

  def write(self, variable, array: np.ndarray) -> None:
    """Gives places what a checkpoint has; the mean to others than it had."""
    mean = _mean(array)
    variable.assign(mean)
    with self._lock:
      count = len(self._pool.workers)
      for place in range(count):
        # What a worker has is of the time after the checkpoint.
        state = self._places.get(place)
        if state is None or state.worker is not None:
          state = self._places[place] = _State({})
        state.values[id(variable)] = (
          array[place] if len(array) == count else mean
        )

  def mean(self, variable) -> np.ndarray | None:
    """The mean of what places have of a variable; None if none has it."""
    parts = [p for p in self._parts(variable) if p is not None]
    return _mean(np.stack(parts)) if parts else None

  def forget(self, variable) -> None:
    """The coordinator has written a variable: places have what the server has."""
    with self._lock:
      for state in self._places.values():
        state.values.pop(id(variable), None)

  def _parts(self, variable) -> list[np.ndarray | None]:
    with self._lock:
      states = [self._places[place] for place in sorted(self._places)]
    found = [self._arrays(state, [variable]) for state in states]
    return [arrays[0] if arrays else None for arrays in found]

  def _is_alive(self, state: _State) -> bool:
    return state.life == self._pool.deaths[state.worker]

  def _arrays(self, state, variables) -> list[np.ndarray | None] | None:
    """What a place has, in this process; None if it was lost."""
    values = [state.values.get(id(v)) for v in variables]
    if state.worker is None:
      return values
    if not self._is_alive(state):
      return None
    try:
      return [None if v is None else v.numpy() for v in values]
    except tf.errors.OpError:  # It died, and nobody knows yet.
      return None

  def _replacement(self, place, lost, variables) -> list[np.ndarray | None]:
    with self._lock:
      states = [s for p, s in sorted(self._places.items()) if p != place]
    found = [self._arrays(state, variables) for state in states]
    found = [arrays for arrays in found if arrays is not None]
    self.lost += 1
    logging.warning(
      'worker %d was lost with the state of its inner optimizer, of which there is '
      'one a worker: its place goes on from %s.',
      lost.worker,
      'the mean of the others' if found else 'a new one',
    )
    arrays = []
    for parts in zip(*found, strict=True) if found else [()] * len(variables):
      parts = [p for p in parts if p is not None]
      arrays.append(_mean(np.stack(parts)) if parts else None)
    # So that a second attempt finds it, on whichever worker.
    values = dict(zip(map(id, variables), arrays, strict=True))
    with self._lock:
      if self._places.get(place) is lost:
        self._places[place] = _State(
          {k: v for k, v in values.items() if v is not None}
        )
    return arrays

  def _constant(self, array):
    if array is None:
      return None
    with tf.device(worker_function.COORDINATOR):
      return tf.constant(array)


def _parts_of(variable) -> list[Any]:
  """The variables on servers that it is, if workers have states of it."""
  return [
    part
    for part in partitioned.parts_of(variable)
    if getattr(part, 'states', None) is not None
  ]


def read(variable: Any) -> np.ndarray | None:
  """What workers have of a variable, stacked; None if they have nothing of it."""
  arrays = [part.states.read(part) for part in _parts_of(variable)]
  return np.concatenate(arrays, 1) if len(arrays) > 1 else (arrays or [None])[0]


def write(variable: Any, array: np.ndarray) -> bool:
  """Gives workers what `read` has returned; False if they have nothing of it."""
  parts, first = _parts_of(variable), 0
  for part in parts:
    rows = int(part.shape[0]) if len(parts) > 1 else 0
    part.states.write(part, array[:, first : first + rows] if rows else array)
    first += rows
  return bool(parts)


def _mean(parts: np.ndarray) -> np.ndarray:
  if not np.issubdtype(parts.dtype, np.number):
    return parts[0]
  return parts.mean(0).astype(parts.dtype)
