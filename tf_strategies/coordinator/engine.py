"""Runs the steps of `fit` and of custom loops on the workers.

Each mode is an engine. All of them take batches one by one, run them on some
worker, and report what the steps returned; they differ in when a step's
gradient reaches the variables.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import errors
from tf_strategies.coordinator import drawn
from tf_strategies.coordinator import liveness as liveness_lib
from tf_strategies.coordinator import parcel as parcel_lib
from tf_strategies.coordinator import pool as pool_lib
from tf_strategies.coordinator import report as report_lib
from tf_strategies.coordinator import staleness as staleness_lib
from tf_strategies.coordinator import worker_function


@dataclasses.dataclass(frozen=True)
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


class Batch:
  """A batch as its arrays.

  Args:
    data: structure of tensors or arrays.
    hides_rows: as of `parcel.Layout`.
  """

  def __init__(self, data: Any, hides_rows: bool = False):
    self.structure = tf.nest.map_structure(_spec, data)
    self.arrays = [_array(t) for t in tf.nest.flatten(data) if t is not None]
    for array in self.arrays:
      if array.dtype.kind not in 'biufcV':
        raise errors.UnsupportedOptionError(
          f'a batch with an array of dtype {array.dtype}',
          'dense arrays of numbers',
          'turn strings into numbers in the input pipeline, or let the workers '
          'read the data: strategy.distribute_datasets_from_function',
        )
    rows = {a.shape[:1] for a in self.arrays}
    self.hides_rows = hides_rows and len(rows) == 1 and () not in rows

  def part(self, arrays: Sequence[np.ndarray]) -> Batch:
    """A batch of some of the rows."""
    part = Batch.__new__(Batch)
    part.arrays = list(arrays)
    specs = [tf.TensorSpec(a.shape, tf.as_dtype(a.dtype)) for a in arrays]
    part.hides_rows = self.hides_rows
    part.structure = parcel_lib.pack(self.structure, specs)
    return part

  @property
  def key(self) -> Any:
    """Equal for batches of one structure, shapes and dtypes."""
    return self.layout(1).key

  def layout(self, steps: int) -> parcel_lib.Layout:
    """Of a parcel of so many such batches."""
    return parcel_lib.Layout(self.structure, steps, self.hides_rows)


def _array(tensor) -> np.ndarray:
  return tensor.numpy() if tf.is_tensor(tensor) else np.asarray(tensor)


def _spec(tensor) -> tf.TensorSpec | None:
  if tensor is None:
    return None
  if isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)):
    raise errors.UnsupportedOptionError(
      f'a batch with a {type(tensor).__name__}',
      'dense arrays of numbers',
      'make it dense in the input pipeline, or let the workers read the data: '
      'strategy.distribute_datasets_from_function',
    )
  if tf.is_tensor(tensor):
    return tf.TensorSpec(tensor.shape, tensor.dtype)
  array = np.asarray(tensor)
  return tf.TensorSpec(array.shape, tf.as_dtype(array.dtype))


class Engine(abc.ABC):
  """Runs steps in one mode.

  Args:
    workers: their indices.
    liveness: who is alive.
    marks: where done tasks are marked.
    step_timeout: seconds without progress after which waiting fails.
  """

  def __init__(
    self,
    workers: Sequence[int],
    liveness: liveness_lib.Liveness,
    marks: worker_function.Marks,
    step_timeout: float = 600.0,
    max_waiting: int | None = None,
  ):
    self.marks = marks
    self.staleness = staleness_lib.Staleness()
    self.steps_done = 0
    self.dropped = 0
    self._workers = tuple(workers)
    self._numbers = itertools.count(1)
    self._lock = threading.Lock()
    self._functions: dict[Any, Any] = {}
    self._newest: dict[Step, StepTask] = {}
    # The numbers that were read last, when, and of which task.
    self.numbers: dict[Step, Any] = {}
    self._sources = weakref.WeakSet()
    self.pool = pool_lib.Pool(
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
    for group in alike(batches):
      task = self._submit(step, group)
    return report_lib.of_task(self, task)

  def draw(self, step: Step, source: drawn.Source, steps: int) -> Any:
    """Begins steps on data that the workers read themselves."""
    with self._lock:
      self._sources.add(source)
    task = DrawTask(self, step, source, steps)
    self.pool.submit(task)
    return report_lib.of_task(self, task)

  def call(self, step: Step, batch: Batch) -> PendingCall:
    """Begins one step whose result is wanted (prediction)."""
    task = self._submit(step, [batch])
    task.is_result_wanted = True
    return PendingCall(self.pool, task)

  def settle(self) -> None:
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

  def finished(self, task: StepTask, worker: int) -> None:
    """Called under the pool's lock when a task is done."""
    del worker
    if task.result is not None:
      self._newest[task.step] = task

  def newest(self, step: Step) -> StepTask | None:
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

  def _submit(self, step, batches) -> StepTask:
    task = StepTask(self, next(self._numbers), step, batches)
    self.pool.submit(task)
    return task

  def function(self, step: Step, layout: parcel_lib.Layout):
    """The function for a step and a layout, and its discovery."""
    with self._lock:
      key = (step, 'parcel', layout.key)
      if key not in self._functions:
        discovery = self._discover(step, layout.traced_structure)
        self._functions[key] = (
          self._parcel_function(step, layout, discovery),
          discovery,
        )
      return self._functions[key]

  def _parcel_function(self, step, layout, discovery):
    return worker_function.ParcelFunction(
      step.run, layout, discovery, self.marks
    )

  def drawing_function(self, step: Step, element_spec: Any, steps: int):
    """The function for a step on drawn data, and its discovery."""
    layout = parcel_lib.Layout(element_spec, steps)
    with self._lock:
      key = (step, 'drawing', layout.key)
      if key not in self._functions:
        discovery = self._discover(step, element_spec)
        self._functions[key] = (
          worker_function.DrawingFunction(
            step.run, element_spec, steps, discovery, self.marks
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
    layout = parcel_lib.Layout(structure, 1)
    key = (step, 'discovery', layout.key)
    if key not in self._functions:
      self._functions[key] = self._look(step, structure)
    return self._functions[key]

  def _look(self, step, structure) -> worker_function.Discovery:
    return worker_function.discover(step.run, structure)


class StepTask(pool_lib.Task):
  """One or more steps on one worker.

  Args:
    engine: that runs it.
    number: of the task.
    step: what to run.
    batches: all of one layout.
  """

  def __init__(
    self, engine: Engine, number: int, step: Step, batches: Sequence[Batch]
  ):
    self.step = step
    self.steps = len(batches)
    self.result = None
    self.is_finished = False
    self.is_result_wanted = False
    self._engine = engine
    self._number = number
    self._first = 0
    self._batches = batches
    self._layout = batches[0].layout(len(batches))
    # In the caller's thread, which has the user's scopes.
    self.function, self.discovery = engine.function(step, self._layout)

  def run(self, worker: int) -> None:
    if self.step.optimizers:
      self._engine.staleness.start(worker)
    parcel = self._layout.encode(
      self._number, self._first, [b.arrays for b in self._batches]
    )
    with tf.device('/job:chief/replica:0/task:0/device:CPU:0'):
      parcel = tf.constant(parcel)
    self.result = self.function(worker, parcel)

  def survive(self, worker: int) -> bool:
    self._engine.lose_readers(worker)
    if self.is_result_wanted:
      return False
    kind = worker_function.Marks.TASKS
    self._first = self._engine.marks.done(kind, self._number)
    return self._first == self.steps

  def finish(self, worker: int) -> None:
    self.is_finished = True
    self._batches = ()
    self._engine.count(self, worker, self.steps)
    self._engine.finished(self, worker)


class DrawTask(pool_lib.Task):
  """One or more steps on data that the worker reads itself.

  Args:
    engine: that runs it.
    step: what to run.
    source: where the data come from.
    steps: how many.
  """

  def __init__(
    self, engine: Engine, step: Step, source: drawn.Source, steps: int
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
    self._one, self.discovery = engine.drawing_function(step, spec, 1)
    self._all, _ = engine.drawing_function(step, spec, steps)

  def may_run(self, worker: int) -> bool:
    return self._source.has_work_for(worker)

  def run(self, worker: int) -> None:
    if self.step.optimizers:
      self._engine.staleness.start(worker)
    while self._done < self.steps:
      others = self._engine.others(worker)
      reader = self._reader = self._source.reader(worker, others)
      if reader is None and not self._source.is_exhausted:
        raise pool_lib.NotHereError
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
    kind = worker_function.Marks.SPLITS
    marked = self._engine.marks.done(kind, split.key)
    if marked > split.done:
      self._done += marked - split.done
      split.done = marked

  def survive(self, worker: int) -> bool:
    if self._reader is not None:
      self._note_marked()
    self._engine.lose_readers(worker)
    return self._done >= self.steps

  def finish(self, worker: int) -> None:
    self.is_finished = True
    self._engine.count(self, worker, self._done)
    self._engine.finished(self, worker)


class PendingCall:
  """A step that has begun, and its result."""

  def __init__(self, pool: pool_lib.Pool, task: StepTask):
    self._pool = pool
    self._task = task

  def result(self) -> Any:
    """What the step returned, as NumPy arrays; waits for it."""
    self._pool.wait(lambda: self._task.is_finished)
    return worker_function.unreport(self._task.result, self._task.discovery)


def alike(batches: Sequence[Batch]) -> list[list[Batch]]:
  """Batches in runs of one layout each, in their order."""
  return [list(g) for _, g in itertools.groupby(batches, lambda b: b.key)]


class AsyncEngine(Engine):
  """Each worker applies its gradient as soon as it has it."""

  def train(self, step: Step, batches: Sequence[Batch]) -> Any:
    return self.run(step, batches)


class BoundedEngine(AsyncEngine):
  """As `AsyncEngine`, but no worker is far ahead of the slowest (SSP).

  Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous
  Parallel Parameter Server".

  Args:
    *args: as `Engine`.
    max_staleness: steps that a worker may be ahead of the slowest one; 0 makes
      all begin each step together. A worker that was lost does not count.
    **kwargs: as `Engine`.
  """

  def __init__(self, *args, max_staleness: int, **kwargs):
    self._max_staleness = max_staleness
    self._clocks: dict[int, int] | None = None
    super().__init__(*args, **kwargs)

  def _may_take(self, worker: int) -> bool:
    if self._clocks is None:
      self._clocks = dict.fromkeys(self._workers, 0)
    lost = self.pool.lost
    alive = [c for w, c in self._clocks.items() if w not in lost]
    slowest = min(alive, default=0)
    # One that was away joins where the slowest is.
    self._clocks[worker] = max(self._clocks[worker], slowest)
    return self._clocks[worker] - slowest <= self._max_staleness

  def finished(self, task, worker) -> None:
    super().finished(task, worker)
    self._clocks[worker] += task.steps
