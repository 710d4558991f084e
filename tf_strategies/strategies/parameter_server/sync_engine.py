"""Synchronous steps: each worker computes a microbatch of the batch.

With backup workers (Chen et al. 2016, "Revisiting Distributed Synchronous SGD")
the first N - k microbatches of a step count and the others are dropped, so that
a slow worker does not slow down the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tf_strategies import errors
from tf_strategies.strategies.parameter_server import (
  batch_message,
  microbatch,
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
    self._free_slots: dict[str, list[microbatch.Slots]] = {}

  def train(self, step: engine_lib.Step, work: engine_lib.Work) -> Any:
    """Runs the steps, one after the other."""
    engine_lib.check_is_sent(
      work, "mode='sync'", "use mode='async' or 'bounded'"
    )
    for batch in work:
      discovery, numbers = self._train(step, batch)
    return discovery.unreport(numbers)

  def forget(self) -> None:
    """As `Engine.forget`; slots are gone too."""
    super().forget()
    self._free_slots.clear()

  def _train(self, step, batch):
    if self._pool.is_busy(lambda task: not isinstance(task, _MicrobatchTask)):
      # Evaluation must be done before variables change.
      self.drain()
    parts = batch.microbatches(len(self._pool.workers))
    quorum = _Quorum(max(1, len(parts) - self._backup_workers))
    for index, part in enumerate(parts):
      self._pool.submit(_MicrobatchTask(self, step, part, index, quorum))
    self.wait(lambda: quorum.is_complete)
    chosen = sorted(quorum.chosen, key=lambda task: task.index)
    function = self._apply_function(step, chosen)
    numbers = function([task.slots for task in chosen])
    self._steps_done += 1
    for task in chosen:
      self.release(task)
    return chosen[0].discovery, numbers

  def _discover(self, step, structure):
    if not step.optimizers:
      return super()._discover(step, structure)

    def run(batch):
      with step.capture(step.optimizers):
        return step.run(batch)

    return worker_function.discover(run, structure)

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
    return self._cached(
      (step, 'apply', layouts[0].key, count),
      lambda: microbatch.ApplyFunction(
        step, layouts[0], count, discovery, self._in_replica
      ),
    )

  def microbatch_function(self, step, layout):
    """The function for a microbatch, and its discovery."""
    discovery = self.discover(step, layout.traced_structure)
    return self._cached(
      (step, 'microbatch', layout.key),
      lambda: microbatch.MicrobatchFunction(step, layout, discovery),
    ), discovery

  def take_slots(self, layout: microbatch.Layout) -> microbatch.Slots:
    """Slots that nobody writes into."""
    with self._lock:
      free = self._free_slots.get(layout.key)
      return free.pop() if free else microbatch.Slots(layout.specs)

  def release(self, task: _MicrobatchTask) -> None:
    """The slots of a task can be used again."""
    with self._lock:
      key = task.function.layout.key
      self._free_slots.setdefault(key, []).append(task.slots)

  def drop(self) -> None:
    """Counts a microbatch that was not needed; under the pool's lock."""
    self._dropped += 1


class _Quorum:
  """The microbatches of a step that count: the first ones to be done."""

  def __init__(self, needed: int):
    self.chosen: list[_MicrobatchTask] = []
    # Microbatches that somebody computes or has computed, and those who did.
    self.begun: set[_MicrobatchTask] = set()
    self.takers: set[int] = set()
    self._needed = needed

  @property
  def is_complete(self) -> bool:
    return len(self.chosen) >= self._needed

  def may_take(self, worker: int, task: _MicrobatchTask) -> bool:
    """Whether a worker may take a microbatch; under the pool's lock.

    Each takes one: a second one would not count, and keep it from the next
    step. Only where workers were lost do others take theirs.
    """
    were_lost = task.retries > 0 or len(self.begun) < self._needed
    return worker not in self.takers or were_lost


class _MicrobatchTask(worker_pool.Task):
  """Microbatch number `index` of a synchronous step, whose rows are `batch`."""

  def __init__(
    self,
    engine: SyncEngine,
    step: engine_lib.Step,
    batch: batch_message.Batch,
    index: int,
    quorum: _Quorum,
  ):
    self.index = index
    self.slots = None
    self._engine = engine
    self._batch = batch
    self._quorum = quorum
    self._layout = batch.layout(1)
    self.function, self.discovery = engine.microbatch_function(
      step, self._layout
    )

  def is_wanted(self) -> bool:
    return not self._quorum.is_complete

  def discard(self) -> None:
    # Its slots are not used again: a lost worker may still write them.
    self._engine.drop()

  def has_work_for(self, worker: int) -> bool:
    return self._quorum.may_take(worker, self)

  def begin(self, worker: int) -> None:
    self._quorum.begun.add(self)
    self._quorum.takers.add(worker)

  def survive(self, worker: int) -> bool:
    self._quorum.begun.discard(self)
    return super().survive(worker)

  def run(self, worker: int) -> None:
    # New ones each time: a worker that was lost may still write the old ones.
    self.slots = self._engine.take_slots(self.function.layout)
    message = self._layout.encode(0, 0, [self._batch.arrays])
    self._engine.staleness.start(worker)
    self.function(worker, message, self.slots)

  def finish(self, worker: int) -> None:
    self._engine.staleness.end(worker, 0)
    if self._quorum.is_complete:
      self._engine.drop()
      self._engine.release(self)
    else:
      self._quorum.chosen.append(self)
