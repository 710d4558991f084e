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
import threading
import time
import weakref
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
    self.reports = Reports(pool, recovery.with_recovery)
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
      data = Next(self, work)
    else:
      data = Sent(work)
    return self.reports.of(self._submit(StepTask(self, step, data)))

  def read_round(
    self,
    step: Step,
    source: splits.Source,
    is_result_wanted: bool = False,
    one_by_one: bool = False,
  ) -> list[StepTask]:
    """Runs a step on an element of each split that has one; waits for all of them."""
    self.note_source(source)
    turn = splits.Round(source)
    tasks = [
      StepTask(self, step, OfRound(self, turn, False), is_result_wanted)
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

  def call(self, step: Step, batch: batch_message.Batch) -> StepTask:
    """Begins one step whose result is wanted (prediction)."""
    return self._submit(StepTask(self, step, Sent(batch), True))

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

  def apply_function_of(self, task: StepTask) -> slots.ApplyFunction | None:
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
    self, function: slots.ApplyFunction, tasks: Sequence[StepTask]
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

  def release(self, task: StepTask) -> None:
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
