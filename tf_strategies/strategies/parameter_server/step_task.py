"""Steps as tasks of the worker pool, and reading their reports."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.strategies.parameter_server import (
  batch_message,
  slots,
  splits,
  traced_step,
  worker_pool,
)

# Reading a report costs a call, and callbacks ask after every batch.
_FRESH_SECONDS = 0.1


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
  """A step that workers run: takes a batch in replica context; only traced."""

  run: Callable[[Any], Any]
  trains: bool = False
  optimizers: tuple[Any, ...] = ()  # Those that it applies.
  # Variables of metrics, from which `results` are computed; None for a loop's step.
  counters: Callable[[], Sequence[Any]] | None = None
  # Results of the step, computed from variables alone. None if only the step
  # can compute them.
  results: Callable[[], Any] | None = None


class Sent:
  """A batch that is sent to whichever worker is free."""

  def __init__(self, batch: batch_message.Batch, index: int = 0):
    self.index = index
    self.layout = batch.layout
    self._batch = batch

  def has_work_for(self, worker: int) -> bool:
    """Returns whether a worker may compute it: any."""
    del worker
    return True

  def read(self, worker: int, compute: Callable[[Any], Any]) -> bool:
    """Calls `compute` with the message; returns that there was something to read."""
    del worker
    compute(self._batch.message())
    return True

  def mark_applied(self) -> None:
    """Frees the batch, which was computed and applied."""
    self._batch = None


class Next:
  """The next batch of any split that the worker has."""

  def __init__(self, engine, source: splits.Source):
    self.layout = source.dataset.layout
    self._engine, self._source = engine, source
    self._split: splits.DataSplit | None = None

  def has_work_for(self, worker: int) -> bool:
    """Returns whether there is anything for a worker to read."""
    return self._source.has_work_for(worker)

  def read(self, worker: int, compute: Callable[[Any], Any]) -> bool:
    """Calls `compute` with the iterator; returns False at the end of the data.

    Raises:
      NotHereError: other workers have the rest of the data.
    """
    life = self._engine.lives[worker]
    while True:
      others = self._engine.others(worker)
      split = self._source.split_for(worker, others, life)
      if split is None:
        if self._source.is_exhausted:
          return False
        raise worker_pool.NotHereError
      self._split = split
      if self._source.read(split, split.done, worker, life, compute):
        return True

  def mark_applied(self) -> None:
    """Counts the batch, which was computed and applied."""
    self._split.done += 1


class OfRound:
  """The element of one split in a round of all splits. The worker chooses the split."""

  def __init__(self, engine, turn: splits.Round, shares: bool):
    self.layout = turn.source.dataset.layout
    self._engine, self._round = engine, turn
    # A step without shares does not wait for late workers: others read their splits.
    self._also_late = shares
    self._split: splits.DataSplit | None = None

  @property
  def index(self) -> int:
    """Returns the number of the split."""
    return self._split.index

  def _others(self, worker: int) -> list[int]:
    return self._engine.others(worker, self._also_late)

  def has_work_for(self, worker: int) -> bool:
    """Returns whether a worker can read any part of the round that is left."""
    return self._round.has_work_for(worker, self._others(worker))

  def read(self, worker: int, compute: Callable[[Any], Any]) -> bool:
    """Calls `compute` with an iterator; returns whether its split had anything."""
    life = self._engine.lives[worker]
    self._split = self._round.take(worker, self._others(worker), life)
    return bool(self._round.read(self._split, worker, life, compute))

  def mark_applied(self) -> None:
    """Does nothing: the round counts all of its parts together."""


class StepTask(worker_pool.Task):
  """One step, or a share of it, on some data.

  If a worker is lost while it computes the step, another one computes it again, into
  other slots. This is safe: the first slots are never applied.

  Args:
    engine: the engine.
    step: the step.
    data: `Sent`, `Next` or `OfRound`.
    is_result_wanted: whether somebody will ask for its `result`.
  """

  def __init__(self, engine, step: Step, data, is_result_wanted: bool = False):
    self.step, self.data = step, data
    self.steps = 1  # Afterwards 0 if there was no data.
    self.reported = None
    self.outputs = None  # The results, unless they are read later.
    self.slots: slots.Slots | None = None
    self.is_finished = False
    self._engine, self._is_result_wanted = engine, is_result_wanted
    # In the caller's thread, which has the user's scopes.
    self.function = engine.function(step, data.layout)
    self.apply_function = engine.apply_function_of(self)

  @property
  def specs(self) -> traced_step.Outputs:
    """Returns what the step returns."""
    return self.function.traced.outputs

  def may_begin(self, worker: int) -> bool:
    """Returns whether the mode lets a worker begin it now."""
    return self._engine.may_begin(worker)

  def has_work_for(self, worker: int) -> bool:
    """Returns whether a worker can read its data."""
    return self.data.has_work_for(worker)

  def run(self, worker: int) -> None:
    """Computes it on a worker, and applies it."""
    self._engine.started(self.step, worker)
    self.steps = int(self.data.read(worker, lambda a: self.compute(worker, a)))
    if self.steps:
      self.apply()

  def compute(self, worker: int, argument: Any) -> bool:
    """Computes it on a worker, into slots."""
    # New ones each time: a worker that was lost may still be writing the old ones.
    self.slots = self._engine.take_slots(self.function.layout)
    self.reported = self.function(worker, argument, self.slots)
    return True

  def apply(self) -> None:
    """Applies the results in the slots."""
    specs = self.specs
    if not specs.are_numbers:
      # They are on the worker, which may die. Until they are here, the step can be
      # repeated.
      self.outputs = specs.unreport(self.reported)
    if self.apply_function is not None:
      self.may_repeat = False
      numbers = self._engine.apply(self.apply_function, [self])
      if specs.are_numbers:
        self.reported = numbers
    if self._is_result_wanted and specs.are_numbers:
      self.outputs = specs.unreport(self.reported)
    self.data.mark_applied()

  def lose(self, worker: int) -> None:
    """Gives a worker up that failed with it: its splits go to others."""
    self._engine.lose(worker)

  def finish(self, worker: int) -> None:
    """Counts it."""
    self.is_finished = True
    self._engine.finished(self, worker)

  def result(self) -> Any:
    """Waits for the step, and returns its results as NumPy arrays."""
    self._engine.wait(lambda: self.is_finished)
    if self.outputs is not None:
      return self.outputs
    return self.specs.unreport(self.reported)


class Reports:
  """What steps report, read when somebody asks, from a step that is done."""

  def __init__(self, pool: worker_pool.WorkerPool, with_recovery: Callable):
    self._pool = pool
    self._with_recovery = with_recovery
    # By step: its newest task that is done; the numbers that were read last,
    # when, and of which task.
    self._newest: dict[Step, Any] = {}
    self._numbers: dict[Step, tuple[np.ndarray, float, Any]] = {}

  def add(self, task) -> None:
    """Called under the pool's lock: a task is done."""
    if task.reported is not None:
      self._newest[task.step] = task

  def forget(self, keeps_numbers: bool = False) -> None:
    """Forgets the newest tasks, since variables change or servers were restored.

    The results of a custom step do not change with variables. Their numbers are kept,
    since Keras reads the logs of an epoch after it has evaluated.
    """
    if not keeps_numbers:
      for step, task in list(self._newest.items()):
        if step.results is None and task.specs.are_numbers:
          self.numbers(step)
      self._numbers = {
        step: read
        for step, read in self._numbers.items()
        if step.results is None
      }
    self._newest.clear()

  def of(self, task) -> Any:
    """Returns the results of a step as `LatestNumber`s; waits for other tensors.

    It also waits for arrays of a custom step: Keras stores them in its history, where
    they must not change.
    """
    specs = task.specs
    if not specs.are_numbers:
      return task.result()
    if task.step.results is None and set(specs.sizes) - {1}:
      return task.result()
    return tf.nest.map_structure(
      lambda place: LatestNumber(self, task.step, place), specs.places
    )

  def numbers(self, step: Step) -> np.ndarray | None:
    """The numbers of the newest task that is done, float64 [count].

    Waits for one if none is done since the coordinator last wrote a variable,
    which is how Keras begins an epoch.
    """
    if step not in self._newest:
      self._with_recovery(
        lambda: self._pool.wait(
          lambda: step in self._newest or not self._pool.is_busy()
        )
      )
    nothing = None, -math.inf, None
    numbers, read_at, read_from = self._numbers.get(step, nothing)
    task = self._newest.get(step)
    now = time.monotonic()
    is_fresh = now - read_at < _FRESH_SECONDS and self._pool.is_busy()
    # No task: its worker was lost before anybody read its report.
    if task is None or task is read_from or is_fresh:
      return numbers
    try:
      read = task.reported.numpy()
    except tf.errors.OpError:  # The worker that has it was lost.
      _tf_internal.clear_errors()
      return numbers
    self._numbers[step] = read, now, task
    return read


class LatestNumber(np.lib.mixins.NDArrayOperatorsMixin):
  """A number, or an array, of the newest step that is done, read when used."""

  def __init__(self, reports: Reports, step: Step, places: np.ndarray):
    self._reports = reports
    self._step = step
    self._places = places  # Of its numbers among all that the step reports.

  def numpy(self) -> np.ndarray:
    """Returns the newest value as a NumPy array."""
    numbers = self._reports.numbers(self._step)
    if numbers is None:
      return np.full(self._places.shape, math.nan)
    return numbers[self._places]

  def __float__(self) -> float:
    return float(self.numpy())

  def __int__(self) -> int:
    return int(self.numpy())

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    del copy
    return np.asarray(self.numpy(), dtype)

  def __array_ufunc__(self, ufunc, method, *inputs, **options):
    values = [
      np.asarray(i) if isinstance(i, LatestNumber) else i for i in inputs
    ]
    return getattr(ufunc, method)(*values, **options)

  def __repr__(self) -> str:
    return repr(self.numpy())
