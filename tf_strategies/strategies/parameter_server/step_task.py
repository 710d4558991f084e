"""Steps as tasks of the pool: on batches that are sent, or that workers read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_strategies.strategies.parameter_server import batch as batch_lib
from tf_strategies.strategies.parameter_server import (
  worker_function,
  worker_input,
  worker_pool,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
  """A step that workers run.

  Attributes:
    run: takes a batch in replica context; traced, never called eagerly.
    optimizers: those that it applies, where the mode must know them.
    capture: makes `apply` of the optimizers record its arguments, as a context
      manager that yields the list of calls.
    results: what the step reports, computed from variables alone (metrics);
      None if only the step knows.
  """

  run: Callable[[Any], Any]
  optimizers: tuple[Any, ...] = ()
  capture: Callable[[Sequence[Any]], Any] | None = None
  results: Callable[[], Any] | None = None


class StepTask(worker_pool.Task):
  """One or more steps on one worker.

  Args:
    engine: that runs it.
    number: of the task.
    step: what to run.
    batches: all of one layout.
    is_result_wanted: whether it must be done again if its result is lost.
  """

  def __init__(
    self,
    engine,
    number: int,
    step: Step,
    batches: Sequence[batch_lib.Batch],
    is_result_wanted: bool = False,
  ):
    self.step = step
    self.steps = len(batches)
    self.result = None
    self.is_finished = False
    self.is_result_wanted = is_result_wanted
    self._engine = engine
    self._number = number
    self._first = 0
    self._batches = batches
    self._layout = batches[0].layout(len(batches))
    # In the caller's thread, which has the user's scopes.
    self.function, self.discovery = engine.function(step, self._layout)

  def run(self, worker: int) -> None:
    """Does the steps that are still to do."""
    if self.step.optimizers:
      self._engine.staleness.start(worker)
    parcel = self._layout.encode(
      self._number, self._first, [b.arrays for b in self._batches]
    )
    with tf.device('/job:chief/replica:0/task:0/device:CPU:0'):
      parcel = tf.constant(parcel)
    self.result = self.function(worker, parcel)

  def survive(self, worker: int) -> bool:
    """Notes how far it had come; the worker's splits go to others."""
    self._engine.lose_readers(worker)
    if self.is_result_wanted:
      return False
    kind = worker_function.CompletionMarkers.TASKS
    self._first = self._engine.markers.done(kind, self._number)
    return self._first == self.steps

  def finish(self, worker: int) -> None:
    """Counts what was done."""
    self.is_finished = True
    self._batches = ()
    self._engine.count(self, worker, self.steps)
    self._engine.finished(self, worker)


class InputTask(worker_pool.Task):
  """One or more steps on data that the worker reads itself.

  Args:
    engine: that runs it.
    step: what to run.
    source: where the data come from.
    steps: how many.
  """

  def __init__(
    self, engine, step: Step, source: worker_input.Source, steps: int
  ):
    self.step = step
    self.steps = steps
    self.result = None
    self.is_finished = False
    self._engine = engine
    self._source = source
    self._done = 0
    self._reader = None
    spec = source.dataset.element_spec
    self._one, self.discovery = engine.input_function(step, spec, 1)
    self._all, _ = engine.input_function(step, spec, steps)

  def may_run(self, worker: int) -> bool:
    """Whether there is anything for this worker to read."""
    return self._source.has_work_for(worker)

  def run(self, worker: int) -> None:
    """Does the steps that are still to do."""
    if self.step.optimizers:
      self._engine.staleness.start(worker)
    while self._done < self.steps:
      others = self._engine.others(worker)
      reader = self._reader = self._source.reader(worker, others)
      if reader is None and not self._source.is_exhausted:
        raise worker_pool.NotHereError
      if reader is None:
        break
      steps = self.steps if self._done == 0 else 1
      function = self._one if steps == 1 else self._all
      try:
        self.result = function(worker, reader.handle)
      except tf.errors.OutOfRangeError:
        self._note_marked()
        self._source.close(worker, reader)
      else:
        reader.split.done += steps
        self._done += steps
    # What was not done, since the data ended, is not a step.
    self.steps = self._done

  def _note_marked(self) -> None:
    """Counts what was done of a call that did not come to its end."""
    split = self._reader.split
    kind = worker_function.CompletionMarkers.SPLITS
    marked = self._engine.markers.done(kind, split.key)
    if marked > split.done:
      self._done += marked - split.done
      split.done = marked

  def survive(self, worker: int) -> bool:
    """Notes how far it had come; the worker's splits go to others."""
    if self._reader is not None:
      self._note_marked()
    self._engine.lose_readers(worker)
    return self._done >= self.steps

  def finish(self, worker: int) -> None:
    """Counts what was done."""
    self.is_finished = True
    self._engine.count(self, worker, self._done)
    self._engine.finished(self, worker)


class PendingCall:
  """A step that has begun, and its result."""

  def __init__(self, pool: worker_pool.Pool, task: StepTask):
    self._pool = pool
    self._task = task

  def result(self) -> Any:
    """What the step returned, as NumPy arrays; waits for it."""
    self._pool.wait(lambda: self._task.is_finished)
    return worker_function.unreport(self._task.result, self._task.discovery)
