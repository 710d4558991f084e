"""Runs the steps of `fit` and of custom loops on the workers.

Each mode is an engine. All of them take batches one by one, run them on some
worker, and report what the steps returned; they differ in when a step's
gradient reaches the variables.
"""

from __future__ import annotations

import abc
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies.strategies.parameter_server import batch as batch_lib
from tf_strategies.strategies.parameter_server import (
  batch_message,
  step_task,
  worker_function,
  worker_input,
  worker_pool,
)
from tf_strategies.strategies.parameter_server import liveness as liveness_lib
from tf_strategies.strategies.parameter_server import report as report_lib
from tf_strategies.strategies.parameter_server import staleness as staleness_lib

Step = step_task.Step
Batch = batch_lib.Batch


class Engine(abc.ABC):
  """Runs steps in one mode.

  Args:
    workers: their indices.
    liveness: who is alive.
    markers: where done tasks are marked.
    step_timeout: seconds without progress after which waiting fails.
  """

  def __init__(
    self,
    workers: Sequence[int],
    liveness: liveness_lib.Liveness,
    markers: worker_function.CompletionMarkers,
    step_timeout: float = 600.0,
    max_waiting: int | None = None,
  ):
    self.markers = markers
    # Does something, and does it again when a server has died and is back.
    self.guard: Callable[[Callable[[], Any]], Any] = lambda action: action()
    self.staleness = staleness_lib.Staleness()
    self.steps_done = 0
    self.dropped = 0
    self._workers = tuple(workers)
    self._numbers = itertools.count(1)
    self._lock = threading.Lock()
    self._functions: dict[Any, Any] = {}
    self._newest: dict[Step, step_task.StepTask] = {}
    # The numbers that were read last, when, and of which task.
    self.numbers: dict[Step, Any] = {}
    self._sources = weakref.WeakSet()
    self.pool = worker_pool.Pool(
      workers,
      liveness,
      self._may_take,
      max_waiting,
      timeout_seconds=step_timeout,
    )

  def _may_take(self, worker: int) -> bool:
    """Whether a worker may begin a task now; under the pool's lock."""
    del worker
    return True

  @abc.abstractmethod
  def train(self, step: Step, batches: Sequence[Batch]) -> Any:
    """Begins the steps of these batches; waits while too many are on the way.

    Returns:
      The report of the newest step that is done, when it is read.
    """

  def run(self, step: Step, batches: Sequence[Batch]) -> Any:
    """Runs steps without an optimizer (evaluation), as `train` does."""
    for group in batch_lib.alike(batches):
      task = self._submit(step, group)
    return report_lib.of_task(self, task)

  def draw(self, step: Step, source: worker_input.Source, steps: int) -> Any:
    """Begins steps on data that the workers read themselves."""
    with self._lock:
      self._sources.add(source)
    task = step_task.InputTask(self, step, source, steps)
    self.pool.submit(task)
    return report_lib.of_task(self, task)

  def call(self, step: Step, batch: Batch) -> step_task.PendingCall:
    """Begins one step whose result is wanted (prediction)."""
    task = self._submit(step, [batch], is_result_wanted=True)
    return step_task.PendingCall(self.pool, task)

  def drain(self) -> None:
    """Waits until all steps are done.

    Raises:
      ParameterServerUnavailableError: a server died.
      WorkerUnavailableError: nothing happened for `step_timeout`.
    """
    if not self.pool.is_idle:
      self.pool.wait()

  def count(self, task: Any, worker: int, steps: int) -> None:
    """Called under the pool's lock: a worker's steps have been applied."""
    if task.step.optimizers:
      self.staleness.end(worker, steps)
      self.steps_done += steps

  def finished(self, task: step_task.StepTask, worker: int) -> None:
    """Called under the pool's lock when a task is done."""
    del worker
    if task.result is not None:
      self._newest[task.step] = task

  def newest(self, step: Step) -> step_task.StepTask | None:
    """The newest finished task of a step since the coordinator last wrote."""
    return self._newest.get(step)

  def last_numbers(self, step: Step) -> np.ndarray:
    """The numbers that were read last; NaN if none ever were."""
    if step in self.numbers:
      return self.numbers[step][0]
    count = len(tf.nest.flatten(self._outputs_of(step)))
    return np.full([count], np.nan)

  def _outputs_of(self, step):
    for key, value in self._functions.items():
      if key[0] is step and isinstance(value, worker_function.Discovery):
        return value.outputs
    return ()

  def forget_reports(self) -> None:
    """The coordinator writes variables: what was reported before is history."""
    self._newest.clear()
    self.numbers.clear()

  def forget_functions(self) -> None:
    """Traces all functions anew: variables have new handles."""
    self._functions.clear()
    self._newest.clear()

  def report(self) -> dict[str, Any]:
    """Counters of this engine."""
    return {
      'steps': self.steps_done,
      'staleness': self.staleness.histogram,
      'dropped': self.dropped,
    }

  def _submit(
    self, step, batches, is_result_wanted=False
  ) -> step_task.StepTask:
    number = next(self._numbers)
    task = step_task.StepTask(self, number, step, batches, is_result_wanted)
    self.pool.submit(task)
    return task

  def function(self, step: Step, layout: batch_message.Layout):
    """The function for a step and a layout, and its discovery."""
    with self._lock:
      key = (step, 'parcel', layout.key)
      if key not in self._functions:
        discovery = self._discover(step, layout.traced_structure)
        self._functions[key] = (
          self._batch_function(step, layout, discovery),
          discovery,
        )
      return self._functions[key]

  def _batch_function(self, step, layout, discovery):
    return worker_function.BatchFunction(
      step.run, layout, discovery, self.markers
    )

  def input_function(self, step: Step, element_spec: Any, steps: int):
    """The function for a step on drawn data, and its discovery."""
    layout = batch_message.Layout(element_spec, steps)
    with self._lock:
      key = (step, 'drawing', layout.key)
      if key not in self._functions:
        discovery = self._discover(step, element_spec)
        self._functions[key] = (
          worker_function.InputFunction(
            step.run, element_spec, steps, discovery, self.markers
          ),
          discovery,
        )
      return self._functions[key]

  def lose_readers(self, worker: int) -> None:
    """The splits that a worker was reading go to others."""
    with self._lock:
      sources = list(self._sources)
    for source in sources:
      source.lose(worker)

  def lose_all_readers(self) -> None:
    """Every split is opened anew, after what was trained on."""
    for worker in self._workers:
      self.lose_readers(worker)

  def others(self, worker: int) -> list[int]:
    """The other workers that are alive."""
    lost = self.pool.lost
    return [w for w in self._workers if w != worker and w not in lost]

  def outputs(self, step: Step, structure: Any) -> Any:
    """What a step returns for such a batch: specs in its structure."""
    with self._lock:
      return self._discover(step, structure).outputs

  def _discover(self, step, structure):
    """Looks once a step and structure of batch."""
    layout = batch_message.Layout(structure, 1)
    key = (step, 'discovery', layout.key)
    if key not in self._functions:
      self._functions[key] = self._look(step, structure)
    return self._functions[key]

  def _look(self, step, structure) -> worker_function.Discovery:
    return worker_function.discover(step.run, structure)


class AsyncEngine(Engine):
  """Each worker applies its gradient as soon as it has it."""

  def train(self, step: Step, batches: Sequence[Batch]) -> Any:
    """Begins the steps of these batches."""
    return self.run(step, batches)


class BoundedEngine(AsyncEngine):
  """As `AsyncEngine`, but no worker is far ahead of the slowest (SSP).

  Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous
  Parallel Parameter Server".

  Args:
    *args: as `Engine`.
    max_staleness: steps that a worker may be ahead of the slowest one; 0 makes
      all begin each step together. A worker that was lost does not count, nor
      one that has read all of its data.
    **kwargs: as `Engine`.
  """

  def __init__(self, *args, max_staleness: int, **kwargs):
    self._max_staleness = max_staleness
    self._clocks: dict[int, int] | None = None
    super().__init__(*args, **kwargs)

  def _may_take(self, worker: int) -> bool:
    if self._clocks is None:
      self._clocks = dict.fromkeys(self._workers, 0)
    in_use = self.pool.in_use()
    slowest = min(self._clocks[w] for w in in_use)
    for other in self._workers:
      # One that is away will join where the slowest is.
      if other not in in_use:
        self._clocks[other] = max(self._clocks[other], slowest)
    return self._clocks[worker] - slowest <= self._max_staleness

  def finished(self, task, worker) -> None:
    """Counts the steps of each worker too."""
    super().finished(task, worker)
    self._clocks[worker] += task.steps
