"""Runs the steps of `fit` and of custom loops on the workers.

Each mode is an engine. All of them take batches one by one, run them on some
worker, and report what the steps returned; they differ in when a step's
gradient reaches the variables.
"""

from __future__ import annotations

import collections
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tf_strategies import errors
from tf_strategies.strategies.parameter_server import (
  batch_message,
  input,
  splits,
  step_task,
  worker_function,
  worker_pool,
)
from tf_strategies.strategies.parameter_server import journal as journal_lib

Step = step_task.Step
Work = Sequence[batch_message.Batch] | input.Elements


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
    self._histogram[self._applied - began] += steps
    self._applied += steps


class Engine:
  """Runs steps; each worker applies its gradient as soon as it has it."""

  def __init__(
    self,
    pool: worker_pool.WorkerPool,
    journal: journal_lib.Journal,
    recovery,
  ):
    self.journal = journal
    self.staleness = Staleness()
    self.reports = step_task.Reports(pool, recovery.with_recovery)
    self._pool = pool
    self._steps_done = 0
    self._dropped = 0
    self._numbers = itertools.count(1)
    # The traced functions of steps, and the data that workers read.
    self._lock = threading.RLock()
    self._functions: dict[Any, Any] = {}
    self._sources = weakref.WeakSet()
    recovery.on_restored = self.forget
    recovery.steps_done = lambda: self._steps_done

  def begin(self, step: Step, work: Work) -> Any:
    """Begins steps, or waits while too many run; returns the newest report."""
    return (self.train if step.trains else self.run)(step, work)

  def train(self, step: Step, work: Work) -> Any:
    """Begins steps of training, as the mode does."""
    return self.run(step, work)

  def run(self, step: Step, work: Work) -> Any:
    """Begins steps, each on the first worker that is free."""
    if isinstance(work, input.Elements):
      self.note_source(work.source)
      task = step_task.InputTask(self, step, work)
      self._pool.submit(task)
    else:
      for batches in batch_message.alike(work):
        task = self._submit(step, batches)
    return self.reports.of(task)

  def read_round(
    self,
    step: Step,
    source: splits.Source,
    is_result_wanted: bool = False,
    one_by_one: bool = False,
  ) -> list[step_task.RoundTask]:
    """Runs a step on an element of each split that has one; waits for all of them."""
    self.note_source(source)
    turn = splits.Round(source)
    tasks = [
      step_task.RoundTask(self, step, turn, is_result_wanted)
      for _ in turn.elements
    ]
    for task in tasks:
      self._pool.submit(task)
      if one_by_one:
        self.wait(lambda each=task: each.is_finished)
    self.wait(lambda: all(task.is_finished for task in tasks))
    turn.count()
    found = [task for task in tasks if task.steps]
    return sorted(found, key=lambda task: task.split.index)

  def note_source(self, source: splits.Source) -> None:
    """Workers read it, and may lose their splits of it."""
    with self._lock:
      self._sources.add(source)

  def call(self, step: Step, batch: batch_message.Batch) -> step_task.StepTask:
    """Begins one step whose result is wanted (prediction)."""
    return self._submit(step, [batch], is_result_wanted=True)

  def _submit(self, step, batches, is_result_wanted=False):
    task = step_task.StepTask(
      self, next(self._numbers), step, batches, is_result_wanted
    )
    self._pool.submit(task)
    return task

  def drain(self) -> None:
    """Waits until all steps are done, or raises what one failed with.

    Not for what a step is done without: that of late workers.
    """
    self._pool.wait()

  def wait(self, until: Callable[[], bool]) -> None:
    """Waits until a condition holds that the end of a task may change."""
    self._pool.wait(until)

  def forget(self) -> None:
    """Servers were restored: variables have new handles, workers lost splits."""
    with self._lock:
      self._functions.clear()
    self.reports.forget(keeps_numbers=True)
    for worker in self._pool.workers:
      self.lose_splits(worker)

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

  def lose_splits(self, worker: int) -> None:
    """The splits that a worker was reading go to others."""
    with self._lock:
      sources = list(self._sources)
    for source in sources:
      source.lose(worker)

  def discover(self, step: Step, structure: Any) -> worker_function.Discovery:
    """Finds the variables and results of a step on such batches."""
    key = step, batch_message.Layout(structure, 1).key
    discovery = self.cached(key, lambda: self._discover(step, structure))
    if discovery.python is not None:
      raise errors.UnsupportedOptionError(
        f'tf.numpy_function or tf.py_function ({discovery.python!r}) in a step '
        'on workers',
        "TensorFlow's operations, since the function is in this process",
        'call it in the tf.data pipeline, or write it with tf or keras.ops',
      )
    return discovery

  def function(self, step: Step, layout: batch_message.Layout):
    """The function for batches of such messages or data, and its discovery."""

    def make():
      discovery = self.discover(step, layout.structure)
      return worker_function.WorkerFunction(
        step.run, layout, discovery, self.journal
      ), discovery

    return self.cached((step, 'function', layout.key), make)

  def cached(self, key: Any, make: Callable[[], Any]) -> Any:
    """Returns the cached value of a key, or makes it. A restore empties the cache."""
    with self._lock:
      if key not in self._functions:
        self._functions[key] = make()
      return self._functions[key]

  def _discover(self, step, structure):
    return worker_function.discover(step.run, structure)


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
