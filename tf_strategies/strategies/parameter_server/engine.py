"""Runs the steps of `fit` and of custom loops on the workers.

An engine takes batches one by one, runs them on some worker, and reports what the
steps returned. What workers have computed reaches the variables in an `Update`: of
one task of the worker pool, or, in 'sync', of the tasks that share the rows of a step.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_strategies import _tf_internal, errors
from tf_strategies.spmd import plan
from tf_strategies.strategies.parameter_server import (
  batch_message,
  slots,
  splits,
  traced_step,
  worker_pool,
)
from tf_strategies.strategies.parameter_server import options as options_lib

_RESULTS_SECONDS = 0.1  # The age of results that are read while steps run.
_RETRY_SECONDS = 0.1


@dataclasses.dataclass(eq=False)
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
  # By the structure of a batch: how to combine the results of workers, or why they
  # cannot share its rows; and whether the user knows why.
  powers: dict[str, traced_step.Powers | str] = dataclasses.field(
    default_factory=dict
  )
  has_warned: bool = False
  # Results of the newest one that is done. If they are read from variables: how often
  # the chief had written any, how many were done, and the time.
  newest: list[np.ndarray] | None = None
  read_at: tuple[int, int, float] = -1, 0, 0.0
  # How many are done, and how often the chief had written variables by then.
  done: int = 0
  reported_at: int = -1


# What a step is done on: a batch, or the next element of what workers read.
Work = batch_message.Batch | splits.Source


class StepTask(worker_pool.Task):
  """One step, or a share of it, on some data.

  If a worker is lost before its call has returned and its results are fetched, another
  one computes the step again, into other slots. The first slots may be full; they are
  never applied. Afterwards the worker is not needed: its slots are applied.

  Args:
    update: the update that it is a part of.
    data: a `Batch` or a `splits.Read`.
  """

  def __init__(self, update: Update, data: Any):
    self.update, self.data = update, data
    self.has_data = True
    self.reported: list[np.ndarray] = []  # Results outside of the slots.
    self.slots: slots.Slots | None = None
    self.began_at = 0  # How many steps had been done.

  def is_wanted(self) -> bool:
    """Returns False if its update is complete without it."""
    return not (self.update.is_complete and self.may_repeat)

  def may_begin(self, worker: int) -> bool:
    """Returns whether the mode lets a worker begin it now."""
    return self.update.engine.may_begin(worker)

  def has_work_for(self, worker: int) -> bool:
    """Returns whether a worker may take it, and can read its data."""
    return self.update.may_take(worker, self) and self.data.has_work_for(worker)

  def run(self, worker: int) -> None:
    """Computes it on a worker, and applies its update if nothing else is missing."""
    self.began_at = self.update.engine.steps_done
    self.has_data = self.data.read(worker, lambda a: self._compute(worker, a))
    if not self.has_data:
      self.update.engine.conclude(self)

  def _compute(self, worker: int, argument: Any) -> None:
    engine, function = self.update.engine, self.update.function
    # New ones each time: a worker that was lost may still be writing the old ones.
    self.slots = engine.take_slots(function.layout)
    # Fetches the other results before anything is applied: if the worker dies
    # until then, the step can be repeated.
    self.reported = [t.numpy() for t in function(worker, argument, self.slots)]
    engine.conclude(self)


class Update:
  """An update of the variables by a step, or by its shares that are done first.

  Args:
    engine: the engine.
    step: the step.
    data: of each share: a `Batch` or a `splits.Read`.

  Attributes:
    function: what each share computes.
    specs: of what the step returns.
    tasks: all shares.
    chosen: those that count.
    outputs: the results, as NumPy arrays.
    is_done: whether it was applied.
  """

  def __init__(
    self,
    engine: Engine,
    step: Step,
    data: Sequence[Any],
  ):
    self.engine, self.step = engine, step
    self.function = engine.function(step, data[0].layout)
    self.specs: traced_step.Outputs = self.function.traced.outputs
    self.tasks = [StepTask(self, each) for each in data]
    self.chosen: list[StepTask] = []
    self.outputs: Any = None
    self.is_done = False
    self._count = len(data)

  @property
  def needed(self) -> int:
    """Returns how many shares it waits for."""
    backup_workers = self.engine.options.backup_workers
    return max(min(1, self._count), self._count - backup_workers)

  @property
  def is_complete(self) -> bool:
    """Returns whether it can be applied."""
    return len(self.chosen) >= self.needed

  @property
  def dropped(self) -> int:
    """Returns how many shares it is applied without."""
    return self._count - len(self.chosen)

  def result(self) -> Any:
    """Waits for it, and returns its results as NumPy arrays."""
    self.engine.pool.wait(lambda: self.is_done)
    return self.outputs

  def add(self, task: StepTask) -> None:
    """Takes a share that is done, or does without one that had no data."""
    if task.has_data:
      self.chosen.append(task)
    else:
      task.worker = None
      self._count -= 1

  def may_take(self, worker: int, task: StepTask) -> bool:
    """Returns whether a worker may take a share; under the pool's lock.

    Each takes one: a second one would not count, and would keep it from the next
    step. It takes a second one if a worker failed with that share, or if fewer shares
    are being computed than the step needs.
    """
    begun = [t.worker for t in self.tasks if t.worker is not None]
    were_lost = task.retries > 0 or len(begun) < self.needed
    return worker not in begun or were_lost


class LatestNumber(np.lib.mixins.NDArrayOperatorsMixin):
  """A number, or an array, of the newest step that is done, read when used."""

  def __init__(self, engine: Engine, step: Step, index: int, shape):
    self._engine, self._step = engine, step
    self._index, self._shape = index, shape  # Among the results of the step.

  def numpy(self) -> np.ndarray:
    """Returns the newest value as a NumPy array."""
    newest = self._engine.newest(self._step)
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


class Engine:
  """Runs steps. The mode decides which results are applied together, and when.

  * 'async': each step, as soon as a worker has computed it. Its staleness is the number
    of steps that were applied while it was computed. It is zero for a single worker.
  * 'bounded': as 'async', but no worker is more than `max_staleness` steps ahead of the
    slowest (SSP, Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous
    Parallel Parameter Server"); 0 makes all begin each step together. One that was lost
    does not count, nor one that has read all of its data.
  * 'sync': what workers compute from their rows of a batch, without the last
    `backup_workers` shares.

  Args:
    pool: of the workers.
    recovery: of the strategy.
    in_replica: calls a function in the strategy's replica context.
    options: of the strategy.
  """

  def __init__(
    self,
    pool: worker_pool.WorkerPool,
    recovery,
    in_replica: Callable[..., Any],
    options: options_lib.ParameterServerOptions,
  ):
    self.pool, self._in_replica = pool, in_replica
    self._with_recovery = recovery.with_recovery
    self.options = options
    self._writes = 0  # How often the chief has written variables.
    self.steps_done = 0
    self._staleness = collections.Counter()
    self._dropped = 0
    self._clocks = collections.Counter()  # Steps of each worker.
    self._functions: dict[Any, Any] = {}  # Traced functions.
    self._free_slots = collections.defaultdict(list)  # By `SlotLayout.key`.
    recovery.on_restored = self.forget

  @property
  def _is_sync(self) -> bool:
    return self.options.mode == 'sync'

  def begin(self, step: Step, work: Work) -> Any:
    """Begins a step, or waits while too many run; returns the newest report.

    In 'sync' a step that trains is done then. None if there was nothing to read.
    """
    is_read = isinstance(work, splits.Source)
    # A later step may change what this one computes, or reports.
    is_alone = step.trains or step.results is None
    if not (self._is_sync and (is_read or is_alone)):
      data = splits.Read(self.pool, work) if is_read else work
      return self._report_of(self.submit(step, [data]))
    updates = self.run_round(step, work, one_by_one=is_alone)
    if not updates:
      return None
    return updates[-1].outputs if is_alone else self._report_of(updates[-1])

  def submit(self, step: Step, data: Sequence[Any]) -> Update:
    """Begins an update by a step, of which each of the `data` is a share."""
    update = Update(self, step, data)
    # In the caller's thread, which has the user's scopes.
    self.apply_function(update, update.needed)
    for task in update.tasks:
      self.pool.submit(task)
    return update

  def run_round(
    self,
    step: Step,
    work: Work,
    one_by_one: bool = False,
  ) -> list[Update]:
    """Runs a step on a batch, or on an element of each split that has one.

    Returns the updates with data, of elements in the order of splits. Workers share
    one update if they may share rows; else each element is one.
    """
    powers = self._powers_for(step, work)
    self.pool.wait()  # Evaluation must be done before variables change.
    turn = None
    if isinstance(work, splits.Source):
      turn = splits.Round(work, has_shares=powers is not None)
      data = [splits.Read(self.pool, work, turn) for _ in turn.splits]
    elif powers is not None:
      data = work.microbatches(len(self.pool.workers))
    else:
      data = [work]
    updates = []
    for each in [data] if powers and data else [[one] for one in data]:
      updates.append(self.submit(step, each))
      if one_by_one:
        updates[-1].result()
    for update in updates:
      update.result()
    if turn is not None:
      turn.count()
    found = [update for update in updates if update.chosen]
    return sorted(found, key=lambda update: update.chosen[0].data.index)

  def forget(self) -> None:
    """Servers were restored: variables have new handles, workers lost splits."""
    self._functions.clear()
    self._free_slots.clear()
    self.note_write()
    self.pool.lives.update(self.pool.workers)

  def note_write(self) -> None:
    """Notes that what steps have reported is not of the present variables."""
    with self.pool.lock:
      self._writes += 1

  def newest(self, step: Step) -> list[np.ndarray] | None:
    """Returns the results of the newest task that is done.

    Waits for one if none is done since the chief last wrote a variable,
    which is how Keras begins an epoch. While steps run, results that are read from
    variables are up to `_RESULTS_SECONDS` old.
    """

    def is_current():
      return step.reported_at == self._writes

    if not is_current():
      self._with_recovery(
        lambda: self.pool.wait(lambda: is_current() or not self.pool.is_busy())
      )
    if is_current() and self._reads_results(step) and self._is_late(step):
      read_at = self._writes, step.done, time.monotonic()
      found = self._with_recovery(lambda: self._read_results(step))
      # Else servers were restored, and metrics count from zero.
      if is_current():
        step.newest, step.read_at = found, read_at
    return step.newest

  def _is_late(self, step: Step) -> bool:
    """Returns whether the results of a step must be read again."""
    writes, done, at = step.read_at
    is_recent = time.monotonic() - at < _RESULTS_SECONDS
    is_usable = done == step.done or (is_recent and self.pool.is_busy())
    return writes != self._writes or not is_usable

  def _reads_results(self, step: Step) -> bool:
    """Returns whether results are read when they are used, not in each update."""
    return step.results is not None and not self._is_sync

  def _read_results(self, step: Step) -> list[np.ndarray]:
    read = self._cached((step, 'results'), lambda: slots.results_function(step))
    try:
      return [t.numpy() for t in read()]
    except tf.errors.UnavailableError:
      # If only a connection has broken, the next attempt makes another one.
      _tf_internal.clear_errors()
      time.sleep(_RETRY_SECONDS)
      return [t.numpy() for t in read()]

  def _report_of(self, update: Update) -> Any:
    """Returns the results of a step as `LatestNumber`s; waits for other tensors.

    It also waits for arrays of a custom step: Keras stores them in its history, where
    they must not change.
    """
    specs = update.specs
    is_custom = update.step.results is None
    if not specs.are_numbers or (
      is_custom and any(s.shape.num_elements() != 1 for s in specs.specs)
    ):
      return update.result()
    return tf.nest.pack_sequence_as(
      specs.structure,
      [
        LatestNumber(self, update.step, i, tuple(spec.shape))
        for i, spec in enumerate(specs.specs)
      ],
    )

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
    if self.options.mode != 'bounded':
      return True
    in_use = self.pool.in_use()
    slowest = min(self._clocks[w] for w in in_use)
    for other in self.pool.workers:
      # One that is away will join where the slowest is.
      if other not in in_use:
        self._clocks[other] = max(self._clocks[other], slowest)
    return self._clocks[worker] - slowest <= self.options.max_staleness

  def conclude(self, task: StepTask) -> None:
    """Takes a task whose results are there; applies its update if that is complete."""
    update = task.update
    with self.pool.lock:
      self.pool.wait_for_connections()
      # The caller may repeat a step that failed. Late shares must not count then.
      has_failed = task.attempt != self.pool.attempt
      shares_rows = update.function.powers is not None
      if update.is_complete or (shares_rows and has_failed):
        if task.has_data:
          self.release(task)
        return
      update.add(task)
      if not update.is_complete:
        return
      task.may_repeat = False
    self.apply(update)
    with self.pool.lock:
      self.finished(update)
      self.pool.lock.notify_all()

  def apply(self, update: Update) -> None:
    """Applies what the tasks of an update have computed."""
    tasks = sorted(update.chosen, key=lambda task: task.data.index)
    if not tasks:
      return
    reported = tasks[0].reported
    function = self.apply_function(update, len(tasks))
    if function is not None:
      numbers = [t.numpy() for t in function([task.slots for task in tasks])]
      for task in tasks:
        self.release(task)
      if update.specs.are_numbers:
        reported = numbers
    if self._reads_results(update.step) and update.specs.are_numbers:
      return
    update.outputs = tf.nest.pack_sequence_as(update.specs.structure, reported)

  def finished(self, update: Update) -> None:
    """Counts an update that is done; under the pool's lock."""
    update.is_done = True
    for task in update.chosen:
      self._clocks[task.worker] += 1
    if update.step.trains and update.chosen:
      began_at = min(task.began_at for task in update.chosen)
      self._staleness[self.steps_done - began_at] += 1
      self.steps_done += 1
      self._dropped += update.dropped
    if update.outputs is not None:
      update.step.newest = tf.nest.flatten(update.outputs)
    if update.chosen:
      update.step.done += 1
      update.step.reported_at = self._writes

  def _powers_for(self, step: Step, work: Work) -> traced_step.Powers | None:
    """Returns how workers share the rows of a step; None if one computes them.

    Raises:
      UnsupportedOptionError: nobody has all rows of a step that needs them.
    """
    powers = self.powers(step, work.layout.structure)
    if not isinstance(powers, str):
      return powers
    if not step.trains:
      return None
    if not isinstance(work, splits.Source):
      # What one worker makes of all rows is what one device makes.
      if not step.has_warned and len(self.pool.workers) > 1:
        step.has_warned = True
        logging.warning(
          "mode='sync' computes each whole batch of a step on one worker. Workers that "
          'share its rows would not compute what one device computes. The cause: %s.',
          powers,
        )
    elif len(work.splits) > 1:
      raise errors.UnsupportedOptionError(
        f"a step that mixes rows ({powers}) in mode='sync', with data that "
        f'{len(work.splits)} workers read',
        'gradients and results that are sums or means over rows',
        'pass the tf.data.Dataset itself to fit or iterate over it, so that one '
        "worker computes each batch as a whole; or use mode='async'",
      )
    return None

  def powers(self, step: Step, structure: Any) -> traced_step.Powers | str:
    """Returns how to combine what workers compute from their rows, or why not to."""
    if not (self._is_sync and step.trains):
      return 'a step that does not train together'
    structure = tf.nest.map_structure(_tf_internal.with_any_rows, structure)
    key = repr(structure)
    if key not in step.powers:
      # The results of metrics are computed later, from sums.
      exempt = tuple if step.results is None else step.counters
      try:
        step.powers[key] = traced_step.powers_of_rows(
          step.run, step.optimizers, structure, exempt
        )
      except plan.NeedsExchangeError as error:
        step.powers[key] = str(error)
    return step.powers[key]

  def function(
    self, step: Step, layout: batch_message.BatchLayout
  ) -> slots.WorkerFunction:
    """Returns the function that computes a step on such batches."""
    return self._cached(
      (step, 'function', layout.key), lambda: self._function(step, layout)
    )

  def _function(self, step, layout):
    structure = layout.structure
    powers = self.powers(step, structure)
    if isinstance(powers, str):
      powers = None
    else:
      # As when it was decided that workers may share them.
      structure = tf.nest.map_structure(_tf_internal.with_any_rows, structure)
    traced = traced_step.TracedStep(step.run, step.optimizers, structure)
    return slots.WorkerFunction(traced, layout, powers)

  def apply_function(
    self, update: Update, count: int
  ) -> slots.ApplyFunction | None:
    """Returns what applies the slots of some tasks of a step; None without slots."""
    step, function = update.step, update.function
    if not function.layout.specs:
      return None
    return self._cached(
      (step, 'apply', function.layout.key, count),
      lambda: slots.ApplyFunction(
        step, function, count, self._in_replica, not self._reads_results(step)
      ),
    )

  def take_slots(self, layout: slots.SlotLayout) -> slots.Slots:
    """Returns slots that nobody writes into."""
    try:
      return self._free_slots[layout.key].pop()
    except IndexError:
      return slots.Slots(layout.specs)

  def release(self, task: StepTask) -> None:
    """The slots of a task can be used again, if its servers have them still."""
    if task.attempt == self.pool.attempt:
      self._free_slots[task.update.function.layout.key].append(task.slots)

  def _cached(self, key: Any, make: Callable[[], Any]) -> Any:
    """Returns the cached value of a key, or makes it. A restore empties the cache."""
    if key not in self._functions:
      self._functions[key] = make()
    return self._functions[key]
