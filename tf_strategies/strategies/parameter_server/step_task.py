"""Steps as tasks of the worker pool, and reading what they report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.strategies.parameter_server import (
  batch_message,
  input,
  worker_function,
  worker_pool,
)

# Reading a report costs a call, and callbacks ask after every batch.
_FRESH_SECONDS = 0.1


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


class _CountedTask(worker_pool.Task):
  """A task that its engine counts, and that begins when the mode allows it.

  Attributes:
    step: what it runs.
    steps: how many, and in the end how many were done.
    result: what they reported.
    is_finished: whether they are done.
  """

  def __init__(self, engine, step: Step, steps: int):
    self.step = step
    self.steps = steps
    self.result = None
    self.is_finished = False
    self._engine = engine

  def may_begin(self, worker: int) -> bool:
    """Whether the mode lets the worker begin."""
    return self._engine.may_begin(worker)

  def finish(self, worker: int) -> None:
    """Counts what was done."""
    self.is_finished = True
    self._engine.finished(self, worker)


class StepTask(_CountedTask):
  """One or more steps on one worker, on batches of one layout.

  Args:
    engine: that counts it.
    number: of the task.
    step: what to run.
    batches: that are sent to the worker.
    is_result_wanted: whether it must be done again if its result is lost.
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
    self._first = 0
    self._batches = batches
    self._layout = batches[0].layout(len(batches))
    # In the caller's thread, which has the user's scopes.
    self._function, self.discovery = engine.function(step, self._layout)

  def run(self, worker: int) -> None:
    """Does the steps that are still to do."""
    self._engine.started(self.step, worker)
    message = self._layout.encode(
      self._number, self._first, [b.arrays for b in self._batches]
    )
    self.result = self._function(worker, message)

  def survive(self, worker: int) -> bool:
    """Notes how far it had come; the worker's splits go to others."""
    self._engine.lose_readers(worker)
    if self._is_result_wanted:
      return False
    kind = worker_function.CompletionMarkers.TASKS
    self._first = self._engine.markers.done(kind, self._number)
    return self._first == self.steps

  def finish(self, worker: int) -> None:
    """Counts what was done, and lets go of the batches."""
    super().finish(worker)
    self._batches = ()


class InputTask(_CountedTask):
  """One or more steps on data of a source, which the worker reads itself."""

  def __init__(self, engine, step: Step, source: input.Source, steps: int):
    super().__init__(engine, step, steps)
    self._source = source
    self._done = 0
    self._reader = None
    spec = source.dataset.element_spec
    self._one, self.discovery = engine.input_function(step, spec, 1)
    self._all, _ = engine.input_function(step, spec, steps)

  def has_work_for(self, worker: int) -> bool:
    """Whether there is anything for this worker to read."""
    return self._source.has_work_for(worker)

  def run(self, worker: int) -> None:
    """Does the steps that are still to do."""
    self._engine.started(self.step, worker)
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


class PendingCall:
  """A step that has begun, and its result."""

  def __init__(self, pool: worker_pool.WorkerPool, task: StepTask):
    self._pool = pool
    self._task = task

  def result(self) -> Any:
    """What the step returned, as NumPy arrays; waits for it."""
    self._pool.wait(lambda: self._task.is_finished)
    return worker_function.unreport(self._task.result, self._task.discovery)


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
    if task.result is not None:
      self._newest[task.step] = task

  def forget(self, keeps_numbers: bool = False) -> None:
    """Forgets what is done: variables change; or what it read from is gone."""
    self._newest.clear()
    if not keeps_numbers:
      self._numbers.clear()

  def of(self, task) -> Any:
    """What a step returned, in its structure.

    Numbers are `LatestNumber`s. A step that returns other tensors is waited
    for.
    """
    outputs = task.discovery.outputs
    if not task.discovery.are_numbers:
      self._pool.wait(lambda: task.is_finished)
      return worker_function.unreport(task.result, task.discovery)
    count = len(tf.nest.flatten(outputs))
    return tf.nest.pack_sequence_as(
      outputs, [LatestNumber(self, task.step, count, i) for i in range(count)]
    )

  def numbers(self, step: Step, count: int) -> np.ndarray:
    """The numbers of the newest task that is done, float64 [count].

    Waits for one if none is done since the coordinator last wrote a variable,
    which is how Keras begins an epoch. Asked again within a tenth of a second,
    it answers the same.
    """
    if step not in self._newest:
      self._with_recovery(
        lambda: self._pool.wait(
          lambda: step in self._newest or not self._pool.is_busy
        )
      )
    missing = np.full([count], np.nan), 0.0, None
    numbers, read_at, read_from = self._numbers.get(step, missing)
    task = self._newest.get(step)
    if task is None:  # A worker did it that was lost before it told.
      return numbers
    now = time.monotonic()
    is_fresh = now - read_at < _FRESH_SECONDS and self._pool.is_busy
    if read_from is task or (is_fresh and read_from is not None):
      return numbers
    try:
      read = task.result.numpy()
    except tf.errors.OpError:  # The worker that has it was lost.
      _tf_internal.clear_errors()
      return numbers
    self._numbers[step] = read, now, task
    return read


class LatestNumber:
  """One number of the newest step that is done, to be read as a float."""

  def __init__(self, reports: Reports, step: Step, count: int, index: int):
    self._reports = reports
    self._step = step
    self._count = count
    self._index = index

  def __float__(self) -> float:
    return float(self._reports.numbers(self._step, self._count)[self._index])

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
