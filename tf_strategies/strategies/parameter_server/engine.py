"""Runs the steps of `fit` and of custom loops on the workers.

Each mode is an engine. All of them take batches one by one, run them on some
worker, and report what the steps returned; they differ in when a step's
gradient reaches the variables.
"""

from __future__ import annotations

import abc
import collections
import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_strategies import errors
from tf_strategies.strategies.parameter_server import (
  batch_message,
  input,
  step_task,
  traced_step,
  worker_function,
  worker_pool,
)

Step = step_task.Step
Batch = batch_message.Batch


class Staleness:
  """Counts updates between the start and the end of each step.

  A step's staleness is the number of other steps that were applied while it was
  computed (Ho et al. 2013, "More Effective Distributed ML via a Stale
  Synchronous Parallel Parameter Server"). Zero for a single worker.

  Example:

    >>> staleness = Staleness()
    >>> staleness.start('a'); staleness.start('b')
    >>> staleness.end('a'); staleness.end('b')
    >>> staleness.histogram
    {0: 1, 1: 1}
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


class Engine(abc.ABC):
  """Runs steps in one mode.

  Args:
    pool: the workers.
    markers: where steps that are done are marked.
    recovery: repeats what a dead server ended; tells when it has restored one.
  """

  def __init__(
    self,
    pool: worker_pool.WorkerPool,
    markers: worker_function.CompletionMarkers,
    recovery,
  ):
    self.markers = markers
    self.staleness = Staleness()
    self._pool = pool
    self._steps_done = 0
    self._dropped = 0
    self._numbers = itertools.count(1)
    self._lock = threading.Lock()
    self._functions: dict[Any, Any] = {}
    self._sources = weakref.WeakSet()
    self._reports = step_task.Reports(pool, recovery.with_recovery)
    recovery.on_restored(self.forget)

  @abc.abstractmethod
  def train(self, step: Step, batches: Sequence[Batch]) -> Any:
    """Begins the steps of these batches; waits while too many are running.

    Returns:
      The report of the newest step that is done, when it is read.
    """

  def run(self, step: Step, batches: Sequence[Batch]) -> Any:
    """Runs steps without an optimizer (evaluation), as `train` does."""
    for group in batch_message.alike(batches):
      task = self._submit(step, group)
    return self._reports.of(task)

  def run_on_worker_input(
    self, step: Step, source: input.Source, steps: int
  ) -> Any:
    """Begins steps on data that the workers read themselves."""
    with self._lock:
      self._sources.add(source)
    task = step_task.InputTask(self, step, source, steps)
    self._pool.submit(task)
    return self._reports.of(task)

  def call(self, step: Step, batch: Batch) -> step_task.PendingCall:
    """Begins one step whose result is wanted (prediction)."""
    task = self._submit(step, [batch], is_result_wanted=True)
    return step_task.PendingCall(self._pool, task)

  def _submit(self, step, batches, is_result_wanted=False):
    task = step_task.StepTask(
      self, next(self._numbers), step, batches, is_result_wanted
    )
    self._pool.submit(task)
    return task

  def drain(self) -> None:
    """Waits until all steps are done.

    Raises:
      ParameterServerUnavailableError: a server died.
      WorkerUnavailableError: nothing happened for `step_timeout`.
    """
    if not self._pool.is_idle:
      self._pool.wait()

  def forget_reports(self) -> None:
    """The coordinator writes variables: earlier reports are out of date."""
    self._reports.forget()

  def forget(self) -> None:
    """Servers were restored: variables have new handles, workers lost splits."""
    with self._lock:
      self._functions.clear()
    self._reports.forget(keeps_numbers=True)
    for worker in self._pool.workers:
      self.lose_readers(worker)

  def report(self) -> dict[str, Any]:
    """Counters of this engine."""
    return {
      'steps': self._steps_done,
      'staleness': self.staleness.histogram,
      'dropped': self._dropped,
    }

  # What tasks call.

  def may_begin(self, worker: int) -> bool:
    """Whether a worker may begin a task now; under the pool's lock."""
    del worker
    return True

  def started(self, step: Step, worker: int) -> None:
    """A worker begins a task."""
    if step.optimizers:
      self.staleness.start(worker)

  def finished(self, task: Any, worker: int) -> None:
    """Called under the pool's lock when a worker's task is done."""
    if task.step.optimizers:
      self.staleness.end(worker, task.steps)
      self._steps_done += task.steps
    self._reports.add(task)

  def others(self, worker: int) -> list[int]:
    """The other workers that are alive."""
    lost = self._pool.lost
    return [w for w in self._pool.workers if w != worker and w not in lost]

  def lose_readers(self, worker: int) -> None:
    """The splits that a worker was reading go to others."""
    with self._lock:
      sources = list(self._sources)
    for source in sources:
      source.lose(worker)

  def function(self, step: Step, layout: batch_message.Layout):
    """The function for batches that are sent, and its discovery."""
    return self._traced(
      (step, 'message', layout.key),
      layout.traced_structure,
      lambda discovery: self._batch_function(step, layout, discovery),
    )

  def input_function(self, step: Step, element_spec: Any, steps: int):
    """The function for data that workers read, and its discovery."""
    layout = batch_message.Layout(element_spec, steps)
    return self._traced(
      (step, 'input', layout.key),
      element_spec,
      lambda discovery: worker_function.InputFunction(
        step.run, element_spec, steps, discovery, self.markers
      ),
    )

  def outputs(self, step: Step, structure: Any) -> Any:
    """What a step returns for such a batch: specs in its structure."""
    with self._lock:
      return self._discover(step, structure).outputs

  def _traced(self, key, structure, make):
    """A function, made once a key, and the discovery of its step."""
    with self._lock:
      discovery = self._discover(key[0], structure)
      if key not in self._functions:
        self._functions[key] = make(discovery)
      return self._functions[key], discovery

  def _discover(self, step, structure) -> worker_function.Discovery:
    """Looks once a step and structure of batch."""
    key = (step, 'discovery', batch_message.Layout(structure, 1).key)
    if key not in self._functions:
      self._functions[key] = self._look(step, structure)
    return self._functions[key]

  def _look(self, step, structure) -> worker_function.Discovery:
    return worker_function.discover(step.run, structure)

  def _batch_function(self, step, layout, discovery):
    return worker_function.BatchFunction(
      step.run, layout, discovery, self.markers
    )


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
  """

  def __init__(self, *args, max_staleness: int):
    super().__init__(*args)
    self._max_staleness = max_staleness
    self._clocks = dict.fromkeys(self._pool.workers, 0)

  def may_begin(self, worker: int) -> bool:
    """Whether a worker is not too far ahead."""
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


class LocalSgdEngine(AsyncEngine):
  """Local SGD: a worker trains `local_steps` steps, then sends the difference.

  The variables are read once, the steps are done on that copy, and the
  difference, divided by the number of workers, is added to the servers'
  variables. That is another algorithm than one step at a time: the mean of
  models that trained apart for a while (Stich 2019, "Local SGD Converges Fast
  and Communicates Little"), without waiting for each other. With one worker it
  is exact.

  Args:
    *args: as `Engine`.
    local_steps: steps between reading and sending.
  """

  def __init__(self, *args, local_steps: int):
    super().__init__(*args)
    self._local_steps = local_steps
    # Batches of training steps that wait until there are enough of them.
    self._waiting: list[Batch] = []
    self._waiting_step: Step | None = None
    self._newest_report: Any = None

  def train(self, step: Step, batches: Sequence[Batch]) -> Any:
    """Collects batches, and begins a task when there are enough."""
    if step is not self._waiting_step:
      self._flush()
      self._waiting_step = step
      self._newest_report = None
    for batch in batches:
      self._waiting.append(batch)
      # The first ones go at once: Keras wants a report.
      if len(self._waiting) == self._local_steps or not self._newest_report:
        self._flush()
    return self._newest_report

  def run_on_worker_input(self, step, source, steps):
    """As `Engine.run_on_worker_input`, for steps without an optimizer."""
    if step.optimizers:
      raise errors.UnsupportedOptionError(
        f'distribute_datasets_from_function with local_steps='
        f'{self._local_steps}',
        'batches that the coordinator sends',
        'pass the tf.data.Dataset to fit, or leave out local_steps',
      )
    self._flush()
    return super().run_on_worker_input(step, source, steps)

  def run(self, step, batches):
    """Evaluation sees what was trained before."""
    self._flush()
    return super().run(step, batches)

  def drain(self) -> None:
    """Waits until all steps are done, the collected ones too."""
    self._flush()
    super().drain()

  def _flush(self) -> None:
    batches, self._waiting = self._waiting, []
    if batches:
      self._newest_report = super().run(self._waiting_step, batches)

  def _look(self, step, structure):
    return worker_function.discover(
      step.run, structure, holds_updates=bool(step.optimizers)
    )

  def _batch_function(self, step, layout, discovery):
    if not step.optimizers:
      return super()._batch_function(step, layout, discovery)
    fraction = 1.0 / len(self._pool.workers)
    return _LocalSgdFunction(
      fraction, step.run, layout, discovery, self.markers
    )


class _LocalSgdFunction(worker_function.BatchFunction):
  """All steps of a message on one copy of the variables."""

  def __init__(self, fraction: float, *args):
    self._fraction = fraction
    super().__init__(*args)

  def _trace(self, argument):
    traced = traced_step.TracedStep(self._discovery.access, holds_updates=True)
    with traced.tracing():
      for step in range(self._steps):
        batch, _ = self._batch_and_marker(argument, step)
        outputs = self._run_step(batch)
      reported = worker_function.report(outputs, self._discovery.are_numbers)
    _, marker = self._batch_and_marker(
      argument, tf.constant(self._steps - 1, tf.int64)
    )
    traced.write_as_sums(self._fraction)
    traced.commit(marker)
    return reported
