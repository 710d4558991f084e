"""Synchronous steps: each worker computes a microbatch of the batch.

With backup workers (Chen et al. 2016, "Revisiting Distributed Synchronous SGD")
the first N - k microbatches of a step count and the others are dropped, so that
a slow worker does not slow down the rest.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal, errors
from tf_strategies.checkpoint import model_state
from tf_strategies.spmd import plan
from tf_strategies.strategies.parameter_server import (
  batch_message,
  input,
  microbatch,
  splits,
  traced_step,
  worker_function,
  worker_pool,
)
from tf_strategies.strategies.parameter_server import engine as engine_lib


class SyncEngine(engine_lib.Engine):
  """Applies the mean gradient of a batch's microbatches, weighted by rows.

  `backup_workers` microbatches of a step are not waited for; `in_replica` makes
  a function run in the strategy's replica context.
  """

  def __init__(
    self,
    *args,
    backup_workers: int,
    in_replica: Callable[[Callable], Callable],
  ):
    super().__init__(*args)
    self._backup_workers = backup_workers
    self._in_replica = in_replica
    # Not the lock of functions: the pool's is held when slots are free again, and
    # who traces a function may read a variable, for which it takes that.
    self._slots_lock = threading.Lock()
    self._free_slots: dict[str, list[microbatch.Slots]] = {}
    # Steps whose batches are computed as a whole, and why.
    self._whole: weakref.WeakKeyDictionary[engine_lib.Step, str] = (
      weakref.WeakKeyDictionary()
    )
    self._warned: weakref.WeakSet[engine_lib.Step] = weakref.WeakSet()

  def train(self, step: engine_lib.Step, work: engine_lib.Work) -> Any:
    """Runs the steps, one after the other; None if there is nothing to read."""
    if isinstance(work, input.Elements):
      return self._train_on_splits(step, work)
    for batch in work:
      discovery = self.discover(step, batch.structure)
      if step in self._whole:
        # What one worker makes of all rows is what one device makes.
        self._warn_of_whole(step)
        report = self.run(step, [batch])
      else:
        report = discovery.unreport(self._train(step, batch))
    return report

  def _train_on_splits(self, step, work):
    source = work.source
    discovery = self.discover(step, source.dataset.element_spec)
    if step in self._whole:
      if len(source.splits) == 1:
        return self.run(step, work)  # Its batches are whole.
      raise errors.UnsupportedOptionError(
        f"a step whose rows workers cannot share ({self._whole[step]}) in mode='sync' "
        f'with data that {len(source.splits)} workers read',
        'gradients and results that are sums or means over rows',
        'pass the tf.data.Dataset itself to fit or iterate over it, so that one '
        "worker computes each batch as a whole; or use mode='async'",
      )

    def train_round():
      numbers = self._train_round(step, source, discovery)
      return None if numbers is None else discovery.unreport(numbers)

    return self._each(work, train_round)

  def _each(self, work: input.Elements, do: Callable[[], Any]) -> Any:
    """Does steps that are not done yet; what the last one returned, or None.

    One of which nobody had anything to read is none.
    """
    report = None
    while work.done < work.count:
      found = do()
      if found is None:
        work.count = work.done
        break
      report = found
      work.done += 1
    return report

  def run(self, step: engine_lib.Step, work: engine_lib.Work) -> Any:
    """Begins steps; each after the one before it where that may change results."""
    is_alone = step.results is None or step in self._whole
    if isinstance(work, input.Elements):

      def read_round():
        tasks = self.read_round(step, work.source, one_by_one=is_alone)
        return _read(self.reports.of(tasks[-1]), step) if tasks else None

      return self._each(work, read_round)
    if not is_alone:
      return super().run(step, work)
    for each in batch_message.alike(work):
      report = super().run(step, each)
      self.drain()
    return _read(report, step)

  def forget(self) -> None:
    """Forgets functions, splits and slots."""
    super().forget()
    with self._slots_lock:
      self._free_slots.clear()

  def _train(self, step, batch):
    parts = batch.microbatches(len(self._pool.workers))
    quorum = _Quorum(len(parts), self._backup_workers)
    return self._meet(
      step,
      quorum,
      [
        _SentTask(self, step, quorum, part, index)
        for index, part in enumerate(parts)
      ],
    )

  def _train_round(self, step, source, discovery):
    self.note_source(source)
    turn = splits.Round(source)
    quorum = _Quorum(len(turn.elements), self._backup_workers)
    tasks = [_ReadTask(self, step, quorum, turn) for _ in turn.elements]
    numbers = self._meet(step, quorum, tasks)
    turn.count()
    return numbers

  def _meet(self, step, quorum, tasks):
    """Waits for a quorum of microbatches and applies it; None if nothing was read."""
    if self._pool.is_busy(lambda task: not isinstance(task, _MicrobatchTask)):
      # Evaluation must be done before variables change.
      self.drain()
    for task in tasks:
      self._pool.submit(task)
    self.wait(lambda: quorum.is_complete)
    chosen = sorted(quorum.chosen, key=lambda task: task.index)
    if not chosen:
      return None
    function = self._apply_function(step, chosen)
    numbers = function([task.slots for task in chosen])
    with self._pool.lock:
      self._steps_done += 1
      self._dropped += quorum.close()
    for task in chosen:
      self.release(task)
    return numbers

  def _discover(self, step, structure):
    if not step.trains or step in self._whole:
      return super()._discover(step, structure)
    reasons, gradients = [], []
    look = traced_step.TracedStep(is_share=True)

    def run(batch):
      with _keras_internal.capture_apply(step.optimizers) as calls:
        look.applied = calls
        outputs = step.run(batch)
      gradients.extend(g for _, grads, _ in calls for g in grads)
      if calls.are_nested:
        reasons.append('optimizer.apply in a branch or a loop')
      return outputs

    try:
      discovery = worker_function.discover(run, structure, look)
    except errors.UnsupportedOptionError:
      if step.counters is None:
        raise
      reasons.append('an optimizer or a layer that reduces over replicas')
    else:
      reasons.extend(beside_apply(look))
      exempt = () if step.results is None else step.counters()
      reasons.extend(_beside_rows(look, exempt))
      if not discovery.are_numbers:
        reasons.append('results that are no numbers')
    leaves = [s for s in tf.nest.flatten(structure) if s is not None]
    if not all(isinstance(s, tf.TensorSpec) for s in leaves):
      reasons.append('batches of ragged or sparse tensors')
    if not reasons:
      gradients.clear()
      try:
        discovery.powers = worker_function.powers_of_rows(
          run, structure, gradients
        )
        return discovery
      except plan.NeedsExchangeError as error:
        reasons.append(str(error))
    self._whole[step] = reasons[0]
    for key in [k for k in self._functions if k[0] is step]:
      del self._functions[key]
    return super()._discover(step, structure)

  def _warn_of_whole(self, step) -> None:
    if step not in self._warned and len(self._pool.workers) > 1:
      self._warned.add(step)
      logging.warning(
        "mode='sync' computes each whole batch of a step on one worker. Workers that "
        'share its rows would not compute what one device computes. The cause: %s.',
        self._whole[step],
      )

  def _apply_function(self, step, chosen):
    layouts = [task.function.layout for task in chosen]
    if len({layout.key for layout in layouts}) > 1:
      raise errors.UnsupportedOptionError(
        "mode='sync' with a step whose gradients differ in kind between "
        'microbatches',
        'the same variables updated by every microbatch',
        "use mode='async'",
      )
    count, discovery = len(chosen), chosen[0].discovery
    return self.cached(
      (step, 'apply', layouts[0].key, count),
      lambda: microbatch.ApplyFunction(
        step, layouts[0], count, discovery, self._in_replica
      ),
    )

  def microbatch_function(self, step, layout):
    """The function for a microbatch, and its discovery."""
    discovery = self.discover(step, layout.structure)
    return self.cached(
      (step, 'microbatch', layout.key),
      lambda: microbatch.MicrobatchFunction(step, layout, discovery),
    ), discovery

  def take_slots(self, layout: microbatch.Layout) -> microbatch.Slots:
    """Slots that nobody writes into."""
    with self._slots_lock:
      free = self._free_slots.get(layout.key)
      if free:
        return free.pop()
    return microbatch.Slots(layout.specs)

  def release(self, task: _MicrobatchTask) -> None:
    """The slots of a task can be used again, if its servers have them still."""
    with self._slots_lock:
      if task.attempt == self._pool.attempt:
        key = task.function.layout.key
        self._free_slots.setdefault(key, []).append(task.slots)

  def take_back_drop(self) -> None:
    """Subtracts a dropped microbatch that had no rows; under the pool's lock."""
    self._dropped -= 1


class _Quorum:
  """The microbatches of a step that count: the first ones to be done."""

  def __init__(self, count: int, backup_workers: int):
    self.chosen: list[_MicrobatchTask] = []
    # Microbatches that somebody computes or has computed, and those who did.
    self.begun: set[_MicrobatchTask] = set()
    self.takers: set[int] = set()
    self.is_closed = False
    self._count = count
    self._backup_workers = backup_workers

  @property
  def _needed(self) -> int:
    return max(min(1, self._count), self._count - self._backup_workers)

  @property
  def is_complete(self) -> bool:
    return len(self.chosen) >= self._needed

  def close(self) -> int:
    """The step is done; returns how many microbatches it leaves out for good."""
    self.is_closed = True
    return self._count - len(self.chosen)

  def put_back(self, worker: int, task: _MicrobatchTask) -> None:
    """A worker that had taken a microbatch leaves it to others."""
    self.begun.discard(task)
    self.takers.discard(worker)

  def leave_out(self, task: _MicrobatchTask) -> None:
    """There was nothing to compute for one of them."""
    self.begun.discard(task)
    self._count -= 1

  def may_take(self, worker: int, task: _MicrobatchTask) -> bool:
    """Returns whether a worker may take a microbatch; under the pool's lock.

    Each takes one: a second one would not count, and keep it from the next
    step. Only where workers were lost do others take theirs.
    """
    were_lost = task.retries > 0 or len(self.begun) < self._needed
    return worker not in self.takers or were_lost


class _MicrobatchTask(worker_pool.Task):
  """A microbatch of a synchronous step."""

  index: int  # Its place: those that count are added in this order.

  def __init__(self, engine: SyncEngine, step, quorum: _Quorum, layout):
    self.slots = None
    self._engine = engine
    self._quorum = quorum
    self.function, self.discovery = engine.microbatch_function(step, layout)

  def is_wanted(self) -> bool:
    return not self._quorum.is_complete

  def has_work_for(self, worker: int) -> bool:
    return self._quorum.may_take(worker, self)

  def begin(self, worker: int) -> None:
    self._quorum.begun.add(self)
    self._quorum.takers.add(worker)

  def give_up(self, worker: int) -> None:
    # Who gets another token has lost its iterators.
    self._engine.journal.revoke([worker])

  def survive(self, worker: int) -> bool:
    self._engine.lose_splits(worker)
    self._quorum.begun.discard(self)
    return False

  def compute(self, worker: int, message: Any) -> microbatch.Slots:
    """Leaves it in slots."""
    # New ones each time: a worker that was lost may still write the old ones.
    self.slots = self._engine.take_slots(self.function.layout)
    self._engine.staleness.start(worker)
    self.function(worker, message, self.slots)
    return self.slots

  def finish(self, worker: int) -> None:
    self._engine.staleness.end(worker, 0)
    if self._quorum.is_complete:
      self._engine.release(self)
    else:
      self._quorum.chosen.append(self)


class _SentTask(_MicrobatchTask):
  """Rows of a batch that are sent to the worker."""

  def __init__(self, engine, step, quorum, batch: batch_message.Batch, index):
    self.index = index
    self._batch, self._layout = batch, batch.layout(1)
    super().__init__(engine, step, quorum, self._layout)

  def run(self, worker: int) -> None:
    self.compute(worker, self._layout.encode(0, 0, [self._batch.arrays]))


class _ReadTask(_MicrobatchTask):
  """What a split has for a round, which the worker reads itself."""

  def __init__(self, engine, step, quorum, turn: splits.Round):
    layout = turn.source.dataset.layout(1)
    super().__init__(engine, step, quorum, layout)
    self._round = turn
    self._split: splits.DataSplit | None = None
    self._is_read = False

  @property
  def index(self) -> int:
    return self._split.index

  def has_work_for(self, worker: int) -> bool:
    others = self._engine.others(worker)
    return super().has_work_for(worker) and self._round.has_work_for(
      worker, others
    )

  def run(self, worker: int) -> None:
    token = self._engine.journal.token(worker)
    try:
      self._split = self._round.take(worker, self._engine.others(worker), token)
    except worker_pool.NotHereError:
      self._quorum.put_back(worker, self)
      raise
    found = self._round.read(
      self._split, worker, token, lambda handle: self.compute(worker, handle)
    )
    self._is_read = found is not None

  def finish(self, worker: int) -> None:
    if self._is_read:
      super().finish(worker)
      return
    self._engine.staleness.end(worker, 0)
    self._quorum.leave_out(self)
    if self._quorum.is_closed:
      self._engine.take_back_drop()


def _read(report: Any, step) -> Any:
  """Returns what a step that is done reported; a later one may report otherwise."""
  if step.results is not None:
    return report
  return tf.nest.map_structure(np.asarray, report)


def beside_apply(look: traced_step.TracedStep) -> list[str]:
  """Returns the reasons why the rows of a step cannot be shared among workers.

  These are writes of variables that `apply` updates, reads of them after `apply`, when
  the shares are not added up yet, and writes of rows, which a share cannot hold back.
  """
  updated = []  # By each call: names, by ids of handles.
  for optimizer, _, targets in look.applied:
    if targets is None:
      targets = _keras_internal.trainable_variables(optimizer)
    names = {}
    for variable in [*targets, *optimizer.variables]:
      value = model_state.value_of(variable)
      for part in getattr(value, 'parts', [value]):
        names[id(part.handle)] = variable.name
    updated.append(names)
  by_any = {k: name for names in updated for k, name in names.items()}
  found = [f'{v.name!r}, of which it writes rows' for v in look.row_writes]
  for variable in look.access.written.values():
    name = by_any.get(id(variable.handle))
    if name is not None:
      found.append(f'{name!r}, which it writes and optimizer.apply updates')
  for handle, count, _ in look.noted_reads:
    for names in updated[:count]:
      if id(handle) in names:
        name = names[id(handle)]
        found.append(f'{name!r}, which it reads after optimizer.apply')
  return found


def _beside_rows(look: traced_step.TracedStep, counters) -> list[str]:
  """Returns the reasons why writes of a step keep workers from sharing its rows.

  These are random numbers, writes in a branch or a loop, and variables that it reads
  after it wrote them from some of the rows. Results of metrics are computed later from
  `counters`.
  """
  found = []
  access = look.access
  for key, variable in access.written.items():
    if _keras_internal.is_seed_state(variable.name, variable.dtype):
      found.append('random numbers, as of Dropout')
    elif key in access.nested_writes:
      found.append(f'{variable.name!r}, which it writes in a branch or a loop')
  written = list(access.written.values())
  counted = {id(c.value) for c in counters}
  for handle, _, count in look.noted_reads:
    found.extend(
      f'{variable.name!r}, which it reads when it has written it'
      for variable in written[:count]
      if variable.handle is handle and id(variable) not in counted
    )
  return found
