"""Steps as tasks of the worker pool, and reading their reports."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import _keras_internal, _tf_internal
from tf_strategies.strategies.parameter_server import (
  batch_message,
  input,
  splits,
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


class _StepsTask(worker_pool.Task):
  """Steps that an engine counts, and that begin when the mode allows it."""

  def __init__(self, engine, step: Step, steps: int):
    self.step = step
    self.steps = steps  # In the end, how many were done.
    self.reported = None  # By the last one.
    self.is_finished = False
    self._engine = engine
    self._done = 0

  @property
  def steps_done(self) -> int:
    """Returns how many are known to be done."""
    return self._done

  @property
  def done_so_far(self) -> int:
    """Returns how many were done when it was interrupted."""
    return self._done if self.step.trains else 0

  def may_begin(self, worker: int) -> bool:
    return self._engine.may_begin(worker)

  def give_up(self, worker: int) -> None:
    """Makes servers refuse further writes of the worker."""
    self._engine.journal.revoke([worker])

  def finish(self, worker: int) -> None:
    self.is_finished = True
    self._engine.finished(self, worker)

  def result(self) -> Any:
    """Waits for the step, and returns its results as NumPy arrays."""
    self._engine.wait(lambda: self.is_finished)
    return self.discovery.unreport(self.reported)


class StepTask(_StepsTask):
  """Steps on batches of one layout, which are sent to the worker.

  One whose result is wanted is done again if the worker is lost with it.
  """

  def __init__(
    self,
    engine,
    number: int,
    step: Step,
    batches: Sequence[batch_message.Batch],
    is_result_wanted: bool = False,
  ):
    super().__init__(engine, step, len(batches))
    self._is_result_wanted = is_result_wanted
    self._number = number
    self._batches = batches
    self._layout = batches[0].layout(len(batches))
    # In the caller's thread, which has the user's scopes.
    self._function, self.discovery = engine.function(step, self._layout)

  def run(self, worker: int) -> None:
    """Does the steps that are still to do."""
    self._engine.started(self.step, worker)
    message = self._layout.encode(
      self._number,
      self._done,
      [b.arrays for b in self._batches],
      self._engine.journal.token(worker),
    )
    self.reported = self._function(worker, message)

  def survive(self, worker: int) -> bool:
    """Notes how far it had come; the worker's splits go to others."""
    self._engine.lose_splits(worker)
    if self._is_result_wanted:
      return False
    self._done = self._engine.journal.done(batch_message.TASKS, self._number)
    return self._done == self.steps

  def renew(self) -> bool:
    """Whoever wants its result begins another one."""
    if not self._is_result_wanted:
      self._function, self.discovery = self._engine.function(
        self.step, self._layout
      )
    return not self._is_result_wanted

  def finish(self, worker: int) -> None:
    """Counts the steps that were done, and frees the batches."""
    super().finish(worker)
    self._batches = ()


class InputTask(_StepsTask):
  """Steps on data of a source, which the worker reads itself."""

  def __init__(self, engine, step: Step, work: input.Elements):
    super().__init__(engine, step, len(work))
    self._source = work.source
    self._split: splits.DataSplit | None = None
    self._asked = self.steps
    self.renew()

  def renew(self) -> bool:
    """Traces its functions."""
    layout, function = self._source.dataset.layout, self._engine.function
    self._one, self.discovery = function(self.step, layout(1))
    self._all, _ = function(self.step, layout(self._asked))
    return True

  def has_work_for(self, worker: int) -> bool:
    """Returns whether there is anything for this worker to read."""
    return self._source.has_work_for(worker)

  def run(self, worker: int) -> None:
    """Does the steps that are still to do."""
    self._engine.started(self.step, worker)
    while self._done < self.steps:
      others = self._engine.others(worker)
      token = self._engine.journal.token(worker)
      split = self._split = self._source.split_for(worker, others, token)
      if split is None:
        if self._source.is_exhausted:
          break
        raise worker_pool.NotHereError
      steps = self.steps if self._done == 0 else 1
      function = self._one if steps == 1 else self._all
      try:
        self.reported = function(worker, split.handle)
      except tf.errors.OutOfRangeError as e:
        if not _keras_internal.is_end_of_sequence(e):
          raise
        self._note_marked()
        self._source.close(worker, split)
      else:
        split.done += steps
        self._done += steps
    # Steps that did not run because the data ended do not count.
    self.steps = self._done

  def _note_marked(self) -> None:
    """Counts the steps that an interrupted call has done."""
    split = self._split
    marked = self._engine.journal.done(batch_message.SPLITS, split.key)
    if marked > split.done:
      self._done += marked - split.done
      split.done = marked

  def survive(self, worker: int) -> bool:
    """Notes how far it had come; the worker's splits go to others."""
    if self._split is not None:
      self._note_marked()
    self._engine.lose_splits(worker)
    return self._done >= self.steps


class RoundTask(InputTask):
  """One step on what a split has for a round; maybe for its result."""

  def __init__(
    self,
    engine,
    step: Step,
    turn: splits.Round,
    is_result_wanted: bool = False,
  ):
    super().__init__(engine, step, input.Elements(turn.source, 1))
    self.outputs = None  # The result, if it is wanted.
    self._round = turn
    self._is_result_wanted = is_result_wanted

  @property
  def split(self) -> splits.DataSplit | None:
    """Returns the split that it reads."""
    return self._split

  def _others(self, worker: int) -> list[int]:
    """Returns the other workers that are not late, since a late one reads nothing."""
    return self._engine.others(worker, also_late=False)

  def has_work_for(self, worker: int) -> bool:
    """Returns whether this worker can read a remaining element of the round."""
    return self._round.has_work_for(worker, self._others(worker))

  def run(self, worker: int) -> None:
    """Does the step; it is none where the split is at its end."""
    self._engine.started(self.step, worker)
    token = self._engine.journal.token(worker)
    self._split = None
    self._split = self._round.take(worker, self._others(worker), token)

    def step(handle):
      self.reported = self._one(worker, handle)
      if self._is_result_wanted:
        self.outputs = self.discovery.unreport(self.reported)
      return 1

    self.steps = self._round.read(self._split, worker, token, step) or 0

  def survive(self, worker: int) -> bool:
    """Notes the progress as `InputTask.survive`; a lost result is computed again."""
    if not self._is_result_wanted:
      return super().survive(worker)
    self._engine.lose_splits(worker)
    return False


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
        if step.results is None and task.discovery.are_numbers:
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
    discovery = task.discovery
    is_wanted = task.step.results is None and set(discovery.sizes) - {1}
    if not discovery.are_numbers or is_wanted:
      return task.result()
    return tf.nest.map_structure(
      lambda place: LatestNumber(self, task.step, place), discovery.places
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
    # Without a task, a worker did it that was lost before it told.
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
