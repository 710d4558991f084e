"""Runs the steps of `fit` and of custom loops on the workers.

Each mode is an engine. All of them take batches one by one, run them on some
worker, and report what the steps returned; they differ in when a step's
gradient reaches the variables. A step is a task of the worker pool, whose report is
read later.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies.strategies.parameter_server import (
  batch_message,
  slots,
  splits,
  traced_step,
  worker_pool,
)


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
    self._batch = None  # Frees it: it will not be computed again.
    return True


class StepTask(worker_pool.Task):
  """One step, or a share of it, on some data.

  If a worker is lost before its call has returned and its results are fetched, another
  one computes the step again, into other slots. The first slots may be full; they are
  never applied. Afterwards the worker is not needed: its slots are applied.

  Args:
    engine: the engine.
    step: the step.
    data: `Sent` or `splits.Read`.

  Attributes:
    applies_itself: whether it applies its slots. If not, the engine does.
  """

  applies_itself = True

  def __init__(self, engine, step: Step, data):
    self.step, self.data = step, data
    self.steps = 1  # Afterwards 0 if there was no data.
    self.outputs = None  # The results, as NumPy arrays.
    self.slots: slots.Slots | None = None
    self.is_finished = False
    self.began_at = 0  # How many steps had been done.
    self._engine = engine
    # In the caller's thread, which has the user's scopes.
    self.function = engine.function(step, data.layout)
    self.apply_function = None
    if self.applies_itself:
      self.apply_function = engine.apply_function(step, self.function)

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
    self.began_at = self._engine.steps_done
    self.steps = int(self.data.read(worker, lambda a: self.compute(worker, a)))

  def compute(self, worker: int, argument: Any) -> None:
    """Computes it on a worker, into slots; applies these, if it does that itself."""
    # New ones each time: a worker that was lost may still be writing the old ones.
    self.slots = self._engine.take_slots(self.function.layout)
    # Fetches what is not in the slots before anything is applied: if the worker dies
    # until then, the step can be repeated.
    reported = tf.nest.map_structure(
      lambda t: t.numpy(), self.function(worker, argument, self.slots)
    )
    if not self.applies_itself:
      return
    if self.apply_function is not None:
      self.may_repeat = False
      numbers = self._engine.apply(self.apply_function, [self])
      if self.specs.are_numbers:
        reported = numbers
    self.outputs = self.specs.unreport(reported)

  def finish(self, worker: int) -> None:
    """Counts it."""
    self.is_finished = True
    self._engine.finished(self, worker)

  def result(self) -> Any:
    """Waits for the step, and returns its results as NumPy arrays."""
    self._engine.pool.wait(lambda: self.is_finished)
    return self.outputs


class Reports:
  """What the newest steps that are done have returned."""

  def __init__(self, pool: worker_pool.WorkerPool, with_recovery: Callable):
    self._pool = pool
    self._with_recovery = with_recovery
    # By step, its results. Current are those of steps that were done since the
    # coordinator last wrote a variable.
    self._newest: dict[Step, list[np.ndarray]] = {}
    self._current: set[Step] = set()

  def add(self, task: StepTask) -> None:
    """Called under the pool's lock: a task is done."""
    if task.outputs is not None:
      self._newest[task.step] = tf.nest.flatten(task.outputs)
      self._current.add(task.step)

  def forget(self, keeps_numbers: bool = False) -> None:
    """Notes that variables change, or that servers were restored.

    The results of a custom step do not change with variables. They are kept, since
    Keras reads the logs of an epoch after it has evaluated.
    """
    with self._pool.lock:
      self._current.clear()
      for step in [s for s in self._newest if s.results is not None]:
        if not keeps_numbers:
          del self._newest[step]

  def of(self, task: StepTask) -> Any:
    """Returns the results of a step as `LatestNumber`s; waits for other tensors.

    It also waits for arrays of a custom step: Keras stores them in its history, where
    they must not change.
    """
    specs = task.specs
    is_custom = task.step.results is None
    if not specs.are_numbers or (is_custom and set(specs.sizes) - {1}):
      return task.result()
    return tf.nest.pack_sequence_as(
      specs.specs,
      [
        LatestNumber(self, task.step, i, tuple(spec.shape))
        for i, spec in enumerate(tf.nest.flatten(specs.specs))
      ],
    )

  def newest(self, step: Step) -> list[np.ndarray] | None:
    """Returns the results of the newest task that is done.

    Waits for one if none is done since the coordinator last wrote a variable,
    which is how Keras begins an epoch.
    """
    if step not in self._current:
      self._with_recovery(
        lambda: self._pool.wait(
          lambda: step in self._current or not self._pool.is_busy()
        )
      )
    return self._newest.get(step)


class LatestNumber(np.lib.mixins.NDArrayOperatorsMixin):
  """A number, or an array, of the newest step that is done, read when used."""

  def __init__(self, reports: Reports, step: Step, index: int, shape):
    self._reports, self._step = reports, step
    self._index, self._shape = index, shape  # Among the results of the step.

  def numpy(self) -> np.ndarray:
    """Returns the newest value as a NumPy array."""
    newest = self._reports.newest(self._step)
    if newest is None:
      return np.full(self._shape, math.nan)
    return newest[self._index]

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


# What a step is done on: a batch, or the next element of what workers read.
Work = batch_message.Batch | splits.Source


class Engine:
  """Runs steps; each is applied as soon as a worker has computed it.

  The staleness of a step is the number of steps that were applied while it was computed
  (Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel
  Parameter Server"). It is zero for a single worker.

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
    self.reports = Reports(pool, recovery.with_recovery)
    self.pool, self._in_replica = pool, in_replica
    self.steps_done = 0
    self._staleness = collections.Counter()
    self._dropped = 0
    self._functions: dict[Any, Any] = {}  # Traced functions.
    self._free_slots = collections.defaultdict(list)  # By `SlotLayout.key`.
    recovery.on_restored = self.forget

  def begin(self, step: Step, work: Work) -> Any:
    """Begins a step, or waits while too many run; returns the newest report."""
    is_read = isinstance(work, splits.Source)
    data = splits.Read(self.pool, work) if is_read else Sent(work)
    return self.reports.of(self.pool.submit(StepTask(self, step, data)))

  def read_round(
    self, step: Step, source: splits.Source, one_by_one: bool = False
  ) -> list[StepTask]:
    """Runs a step on an element of each split that has one; waits for all of them."""
    turn = splits.Round(source, has_shares=False)
    tasks = [
      StepTask(self, step, splits.Read(self.pool, source, turn))
      for _ in turn.splits
    ]
    for task in tasks:
      self.pool.submit(task)
      if one_by_one:
        task.result()
    for task in tasks:
      task.result()
    turn.count()
    found = [task for task in tasks if task.steps]
    return sorted(found, key=lambda task: task.data.index)

  def call(self, step: Step, batch: batch_message.Batch) -> StepTask:
    """Begins one step whose result is wanted (prediction)."""
    return self.pool.submit(StepTask(self, step, Sent(batch)))

  def forget(self) -> None:
    """Servers were restored: variables have new handles, workers lost splits."""
    self._functions.clear()
    self._free_slots.clear()
    self.reports.forget(keeps_numbers=True)
    self.pool.lives.update(self.pool.workers)

  def report(self) -> dict[str, Any]:
    """Counters of this engine."""
    return {
      'steps': self.steps_done,
      'staleness': dict(sorted(self._staleness.items())),
      'dropped': self._dropped,
    }

  # What tasks call.

  def may_begin(self, worker: int) -> bool:
    """Returns whether a worker may begin a task now; under the pool's lock."""
    del worker
    return True

  def finished(self, task: Any, worker: int) -> None:
    """Called under the pool's lock when a worker's task is done."""
    if task.step.trains and task.steps:
      self._staleness[self.steps_done - task.began_at] += 1
      self.steps_done += 1
    self.reports.add(task)

  def look(self, step: Step, layout: batch_message.BatchLayout) -> None:
    """Traces a step on such batches, which may make variables."""
    if isinstance(self.powers(step, layout.structure), str):
      self.function(step, layout)

  def powers(self, step: Step, structure: Any) -> traced_step.Powers | str:
    """Returns how to combine what workers compute from their rows, or why not to."""
    del step, structure
    return 'a step that does not train together'

  def function(
    self, step: Step, layout: batch_message.BatchLayout
  ) -> slots.WorkerFunction:
    """Returns the function that computes a step on such batches."""
    return self._cached(
      (step, 'function', layout.key), lambda: self._function(step, layout)
    )

  def _function(self, step, layout):
    structure = layout.structure
    shares_rows = not isinstance(self.powers(step, structure), str)
    if shares_rows:
      # As when it was decided that workers may share them.
      structure = tf.nest.map_structure(batch_message.with_any_rows, structure)
    traced = traced_step.TracedStep(step.run, step.optimizers, structure)
    return slots.WorkerFunction(traced, layout, shares_rows)

  def apply_function(
    self,
    step: Step,
    function: slots.WorkerFunction,
    count: int = 1,
    powers=None,
  ) -> slots.ApplyFunction | None:
    """Returns what applies the slots of some tasks of a step; None without slots."""
    if not function.layout.specs:
      return None
    return self._cached(
      (step, 'apply', function.layout.key, count),
      lambda: slots.ApplyFunction(
        step, function.traced, function.layout, count, powers, self._in_replica
      ),
    )

  def apply(
    self, function: slots.ApplyFunction, tasks: Sequence[StepTask]
  ) -> np.ndarray:
    """Applies what tasks have computed; returns the numbers of the step.

    Raises:
      ParameterServerUnavailableError: it is not known whether all was applied.
    """
    try:
      numbers = function([task.slots for task in tasks]).numpy()
    except tf.errors.OpError as e:
      self.pool.check_update(e)
      raise
    for task in tasks:
      self.release(task)
    return numbers

  def take_slots(self, layout: slots.SlotLayout) -> slots.Slots:
    """Returns slots that nobody writes into."""
    try:
      return self._free_slots[layout.key].pop()
    except IndexError:
      return slots.Slots(layout.specs)

  def release(self, task: StepTask) -> None:
    """The slots of a task can be used again, if its servers have them still."""
    if task.attempt == self.pool.attempt:
      self._free_slots[task.function.layout.key].append(task.slots)

  def _cached(self, key: Any, make: Callable[[], Any]) -> Any:
    """Returns the cached value of a key, or makes it. A restore empties the cache."""
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
    self._clocks = dict.fromkeys(self.pool.workers, 0)

  def may_begin(self, worker: int) -> bool:
    """Returns whether a worker is not too far ahead."""
    in_use = self.pool.in_use()
    slowest = min(self._clocks[w] for w in in_use)
    for other in self.pool.workers:
      # One that is away will join where the slowest is.
      if other not in in_use:
        self._clocks[other] = max(self._clocks[other], slowest)
    return self._clocks[worker] - slowest <= self._max_staleness

  def finished(self, task, worker) -> None:
    """Counts the steps of each worker too."""
    super().finished(task, worker)
    self._clocks[worker] += task.steps
