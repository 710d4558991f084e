"""Runs the steps of `fit` and of custom loops on the workers.

Each mode is an engine. All of them take batches one by one, run them on some
worker, and report what the steps returned; they differ in when a step's
gradient reaches the variables.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_strategies.strategies.parameter_server import (
  batch_message,
  slots,
  splits,
  step_task,
  traced_step,
  worker_pool,
)

Step = step_task.Step
# What a step is done on: a batch, or the next element of what workers read.
Work = batch_message.Batch | splits.Source


class Staleness:
  """Counts the steps that were applied while each step was computed.

  Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel
  Parameter Server". Zero for a single worker.
  """

  def __init__(self):
    self._applied = 0
    self._started: dict[object, int] = {}
    self._histogram = collections.Counter()

  @property
  def histogram(self) -> dict[int, int]:
    """Number of steps by staleness."""
    return dict(sorted(self._histogram.items()))

  def start(self, worker: object) -> None:
    """A worker begins a step."""
    self._started[worker] = self._applied

  def end(self, worker: object, steps: int = 1) -> None:
    """A worker's step, or several in one task, have been applied."""
    began = self._started.pop(worker, self._applied)
    if steps:
      self._histogram[self._applied - began] += steps
    self._applied += steps


class Engine:
  """Runs steps; each is applied as soon as a worker has computed it.

  Args:
    pool: of the workers.
    recovery: of the strategy.
    in_replica: makes a function run in the strategy's replica context.
  """

  def __init__(
    self,
    pool: worker_pool.WorkerPool,
    recovery,
    in_replica: Callable[[Callable], Callable],
  ):
    self.staleness = Staleness()
    self.reports = step_task.Reports(pool, recovery.with_recovery)
    # How often each worker was given up: then it has lost its iterators.
    self.lives = collections.Counter()
    self._pool, self._in_replica = pool, in_replica
    self._steps_done = 0
    self._dropped = 0
    self._lock = threading.RLock()
    self._functions: dict[Any, Any] = {}  # Traced functions.
    # For workers' threads. A thread that traces holds the other lock, and may wait for
    # theirs.
    self._slots_lock = threading.Lock()
    self._free_slots: dict[str, list[slots.Slots]] = {}
    self._sources = weakref.WeakSet()  # The data that workers read.
    recovery.on_restored = self.forget

  def begin(self, step: Step, work: Work) -> Any:
    """Begins a step, or waits while too many run; returns the newest report."""
    return (self.train if step.trains else self.run)(step, work)

  def train(self, step: Step, work: Work) -> Any:
    """Begins a step of training, as the mode does."""
    return self.run(step, work)

  def run(self, step: Step, work: Work) -> Any:
    """Begins a step, on the first worker that is free."""
    if isinstance(work, splits.Source):
      self.note_source(work)
      data = step_task.Next(self, work)
    else:
      data = step_task.Sent(work)
    return self.reports.of(self._submit(step_task.StepTask(self, step, data)))

  def read_round(
    self,
    step: Step,
    source: splits.Source,
    is_result_wanted: bool = False,
    one_by_one: bool = False,
  ) -> list[step_task.StepTask]:
    """Runs a step on an element of each split that has one; waits for all of them."""
    self.note_source(source)
    turn = splits.Round(source)
    tasks = [
      step_task.StepTask(
        self, step, step_task.OfRound(self, turn, False), is_result_wanted
      )
      for _ in turn.elements
    ]
    for task in tasks:
      self._submit(task)
      if one_by_one:
        self.wait(lambda each=task: each.is_finished)
    self.wait(lambda: all(task.is_finished for task in tasks))
    turn.count()
    found = [task for task in tasks if task.steps]
    return sorted(found, key=lambda task: task.data.index)

  def note_source(self, source: splits.Source) -> None:
    """Workers read it, and may lose their splits of it."""
    with self._slots_lock:
      self._sources.add(source)

  def call(self, step: Step, batch: batch_message.Batch) -> step_task.StepTask:
    """Begins one step whose result is wanted (prediction)."""
    return self._submit(
      step_task.StepTask(self, step, step_task.Sent(batch), True)
    )

  def _submit(self, task):
    self._pool.submit(task)
    return task

  def drain(self) -> None:
    """Waits until all steps are done, or raises what one failed with.

    It does not wait for the shares of late workers that a step is done without.
    """
    self._pool.wait()

  def wait(self, until: Callable[[], bool]) -> None:
    """Waits until a condition holds that the end of a task may change."""
    self._pool.wait(until)

  def forget(self) -> None:
    """Servers were restored: variables have new handles, workers lost splits."""
    with self._lock:
      self._functions.clear()
    with self._slots_lock:
      self._free_slots.clear()
    self.reports.forget(keeps_numbers=True)
    for worker in self._pool.workers:
      self.lose(worker)

  def report(self) -> dict[str, Any]:
    """Counters of this engine."""
    return {
      'steps': self._steps_done,
      'staleness': self.staleness.histogram,
      'dropped': self._dropped,
    }

  # What tasks call.

  def may_begin(self, worker: int) -> bool:
    """Returns whether a worker may begin a task now; under the pool's lock."""
    del worker
    return True

  def started(self, step: Step, worker: int) -> None:
    """A worker begins a task."""
    if step.trains:
      self.staleness.start(worker)

  def finished(self, task: Any, worker: int) -> None:
    """Called under the pool's lock when a worker's task is done."""
    if task.step.trains:
      self.staleness.end(worker, task.steps)
      self._steps_done += task.steps
    self.reports.add(task)

  def others(self, worker: int, also_late: bool = True) -> list[int]:
    """The other workers that are alive; or of them, those that are not late."""
    away = {worker, *self._pool.lost}
    if not also_late:
      away |= self._pool.late()
    return [w for w in self._pool.workers if w not in away]

  def lose(self, worker: int) -> None:
    """Gives a worker up: the splits that it was reading go to others."""
    self.lives[worker] += 1
    with self._slots_lock:
      sources = list(self._sources)
    for source in sources:
      source.lose(worker)

  def look(self, step: Step, layout: batch_message.BatchLayout) -> None:
    """Traces a step on such batches, which may make variables."""
    self.function(step, layout)

  def function(
    self, step: Step, layout: batch_message.BatchLayout
  ) -> slots.WorkerFunction:
    """Returns the function that computes a step on such batches."""
    return self._cached(
      (step, 'function', layout.key), lambda: self._function(step, layout)
    )

  def _function(self, step, layout, shares_rows=False):
    structure = layout.structure
    if shares_rows:
      # As when it was decided that workers may share them.
      structure = tf.nest.map_structure(batch_message.with_any_rows, structure)
    traced = traced_step.TracedStep(step.run, step.optimizers, structure)
    return slots.WorkerFunction(traced, layout, shares_rows)

  def apply_function_of(
    self, task: step_task.StepTask
  ) -> slots.ApplyFunction | None:
    """Returns what applies a task by itself."""
    return self.apply_function(task.step, task.function)

  def apply_function(
    self,
    step: Step,
    function: slots.WorkerFunction,
    count: int = 1,
    powers=None,
  ) -> slots.ApplyFunction | None:
    """Returns what applies the slots of some tasks of a step; None without slots."""
    if function.layout.is_empty:
      return None
    return self._cached(
      (step, 'apply', function.layout.key, count),
      lambda: slots.ApplyFunction(
        step, function.traced, function.layout, count, powers, self._in_replica
      ),
    )

  def apply(
    self, function: slots.ApplyFunction, tasks: Sequence[step_task.StepTask]
  ) -> Any:
    """Applies what tasks have computed; returns the numbers of the step.

    Raises:
      ParameterServerUnavailableError: it is not known whether all was applied.
    """
    try:
      numbers = function([task.slots for task in tasks])
    except tf.errors.OpError as e:
      self._pool.check_update(e)
      raise
    for task in tasks:
      self.release(task)
    return numbers

  def take_slots(self, layout: slots.SlotLayout) -> slots.Slots | None:
    """Returns slots that nobody writes into; None if there is nothing to write."""
    if layout.is_empty:
      return None
    with self._slots_lock:
      free = self._free_slots.get(layout.key)
      if free:
        return free.pop()
    return slots.Slots(layout.specs)

  def release(self, task: step_task.StepTask) -> None:
    """The slots of a task can be used again, if its servers have them still."""
    with self._slots_lock:
      if task.attempt == self._pool.attempt:
        key = task.function.layout.key
        self._free_slots.setdefault(key, []).append(task.slots)

  def _cached(self, key: Any, make: Callable[[], Any]) -> Any:
    """Returns the cached value of a key, or makes it. A restore empties the cache."""
    with self._lock:
      if key not in self._functions:
        self._functions[key] = make()
      return self._functions[key]


class BoundedEngine(Engine):
  """As `Engine`, but no worker is far ahead of the slowest (SSP, Ho et al. 2013).

  A worker may be `max_staleness` steps ahead; 0 makes all begin each step
  together. One that was lost does not count, nor one that has read all of its
  data.
  """

  def __init__(self, *args, max_staleness: int, **options):
    super().__init__(*args, **options)
    self._max_staleness = max_staleness
    self._clocks = dict.fromkeys(self._pool.workers, 0)

  def may_begin(self, worker: int) -> bool:
    """Returns whether a worker is not too far ahead."""
    in_use = self._pool.in_use()
    slowest = min(self._clocks[w] for w in in_use)
    for other in self._pool.workers:
      # One that is away will join where the slowest is.
      if other not in in_use:
        self._clocks[other] = max(self._clocks[other], slowest)
    return self._clocks[worker] - slowest <= self._max_staleness

  def finished(self, task, worker) -> None:
    """Counts the steps of each worker too."""
    super().finished(task, worker)
    self._clocks[worker] += task.steps
