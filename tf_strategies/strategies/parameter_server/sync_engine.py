"""Synchronous steps: the rows of a batch are shared out among the workers.

With backup workers (Chen et al. 2016, "Revisiting Distributed Synchronous SGD")
the first N - k shares of a step count, and the others are dropped, so that a
slow worker does not slow down the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_strategies import errors
from tf_strategies.strategies.parameter_server import (
  batch_message,
  microbatch,
  worker_function,
  worker_pool,
)
from tf_strategies.strategies.parameter_server import engine as engine_lib
from tf_strategies.strategies.parameter_server import report as report_lib


class SyncEngine(engine_lib.Engine):
  """Applies the mean gradient of a batch's shares, weighted by their rows.

  Args:
    *args: as `Engine`.
    backup_workers: shares of a step that are not waited for.
    in_replica: runs a function in the strategy's replica context.
    **kwargs: as `Engine`.
  """

  def __init__(
    self,
    *args,
    backup_workers: int,
    in_replica: Callable[[Callable], Callable],
    **kwargs,
  ):
    super().__init__(*args, max_waiting=2 * len(args[0]), **kwargs)
    self._backup_workers = backup_workers
    self._in_replica = in_replica
    self._free_slots: dict[Any, list[microbatch.Slots]] = {}

  def train(self, step: engine_lib.Step, batches) -> Any:
    """Runs the steps, one after the other."""
    for batch in batches:
      discovery, numbers = self._train(step, batch)
    return report_lib.of_numbers(discovery, numbers)

  def draw(self, step, source, steps):
    """As `Engine.draw`, for steps without an optimizer."""
    if step.optimizers:
      raise errors.UnsupportedOptionError(
        "distribute_datasets_from_function with mode='sync'",
        'batches that the coordinator shares out among the workers',
        "pass the tf.data.Dataset to fit, or use mode='async' or 'bounded'",
      )
    return super().draw(step, source, steps)

  def forget_functions(self) -> None:
    """As `Engine.forget_functions`; slots are gone too."""
    super().forget_functions()
    self._free_slots.clear()

  def _train(self, step, batch):
    self.drain_evaluation()
    shares = split(batch, len(self._workers))
    needed = max(1, len(shares) - self._backup_workers)
    quorum = Quorum(self, needed)
    tasks = [
      MicrobatchTask(self, step, share, i, quorum)
      for i, share in enumerate(shares)
    ]
    for task in tasks:
      self.pool.submit(task)
    self.pool.wait(lambda: quorum.is_complete)
    self.dropped += self.pool.withdraw(tasks)
    chosen = sorted(quorum.chosen, key=lambda task: task.index)
    function = self._apply_function(step, chosen)
    try:
      numbers = function([task.slots for task in chosen])
    except tf.errors.OpError as e:
      raise self.pool.explain(e) from e
    self.steps_done += 1
    for task in chosen:
      self.release(task)
    return chosen[0].discovery, numbers

  def drain_evaluation(self) -> None:
    """Steps of another kind must be done before variables change."""
    if self._others_pending():
      self.drain()

  def _others_pending(self) -> bool:
    return self.pool.has(lambda task: not isinstance(task, MicrobatchTask))

  def microbatch_function(self, step, layout: batch_message.Layout):
    """The function for a share, and its discovery."""
    with self._lock:
      key = (step, 'share', layout.key)
      if key not in self._functions:
        discovery = self._discover(step, layout.traced_structure)
        self._functions[key] = (
          microbatch.MicrobatchFunction(step, layout, discovery),
          discovery,
        )
      return self._functions[key]

  def _look(self, step, structure):
    if not step.optimizers:
      return super()._look(step, structure)

    def run(batch):
      with step.capture(step.optimizers):
        return step.run(batch)

    return worker_function.discover(run, structure)

  def _apply_function(self, step, chosen):
    share = chosen[0].function
    kinds = tuple(str(task.function.specs) for task in chosen)
    if len(set(kinds)) > 1:
      raise errors.UnsupportedOptionError(
        "mode='sync' with a step whose gradients differ in kind between shares",
        'the same variables updated by every share',
        "use mode='async'",
      )
    key = (step, 'apply', kinds[0], len(chosen))
    with self._lock:
      if key not in self._functions:
        self._functions[key] = microbatch.ApplyFunction(
          step, share, len(chosen), self._in_replica
        )
      return self._functions[key]

  def take_slots(
    self, function: microbatch.MicrobatchFunction
  ) -> microbatch.Slots:
    """Slots that nobody writes into."""
    with self._lock:
      free = self._free_slots.setdefault(str(function.specs), [])
      return free.pop() if free else microbatch.Slots(function.specs)

  def release(self, task: MicrobatchTask) -> None:
    """The slots of a task can be used again."""
    with self._lock:
      key = str(task.function.specs)
      self._free_slots.setdefault(key, []).append(task.slots)


class Quorum:
  """The shares of a step that count: the first ones to be done.

  Args:
    engine: that counts the others.
    needed: how many count.
  """

  def __init__(self, engine: SyncEngine, needed: int):
    self.chosen: list[MicrobatchTask] = []
    # Shares that somebody computes or has computed, and those who did.
    self.begun = 0
    self.takers: set[int] = set()
    self._engine = engine
    self._needed = needed

  @property
  def is_complete(self) -> bool:
    """Whether enough are done."""
    return len(self.chosen) >= self._needed

  def may_take(self, worker: int) -> bool:
    """Whether a worker may take a share; called under the pool's lock.

    Each takes one. A second one, which a worker that is done early could take,
    would not count, and keep it from the next step; only where workers were
    lost do others take theirs.
    """
    if self.is_complete:
      return False
    return worker not in self.takers or self.begun < self._needed

  def add(self, task: MicrobatchTask) -> None:
    """Called under the pool's lock when a share is done."""
    if self.is_complete:
      self._engine.dropped += 1
      self._engine.release(task)
    else:
      self.chosen.append(task)


class MicrobatchTask(worker_pool.Task):
  """A share of a synchronous step.

  Args:
    engine: that runs it.
    step: what to run.
    batch: the rows of the share.
    index: of the share in its step.
    quorum: of the step.
  """

  def __init__(
    self,
    engine: SyncEngine,
    step: engine_lib.Step,
    batch: engine_lib.Batch,
    index: int,
    quorum: Quorum,
  ):
    self.index = index
    self.slots = None
    self._engine = engine
    self._batch = batch
    self._ballot = quorum
    self._layout = batch.layout(1)
    self.function, self.discovery = engine.microbatch_function(
      step, self._layout
    )

  def may_run(self, worker: int) -> bool:
    """Whether the share of this worker is still wanted."""
    return self._ballot.may_take(worker)

  def begin(self, worker: int) -> None:
    """Notes who computes it."""
    self._ballot.begun += 1
    self._ballot.takers.add(worker)

  def survive(self, worker: int) -> bool:
    """Lets another worker compute it."""
    self._ballot.begun -= 1
    return super().survive(worker)

  def run(self, worker: int) -> None:
    """Computes the share and leaves it in slots."""
    # New ones each time: a worker that was lost may still write the old ones.
    self.slots = self._engine.take_slots(self.function)
    parcel = self._layout.encode(0, 0, [self._batch.arrays])
    with tf.device('/job:chief/replica:0/task:0/device:CPU:0'):
      parcel = tf.constant(parcel)
    self._engine.staleness.start(worker)
    self.function(worker, parcel, self.slots)

  def finish(self, worker: int) -> None:
    """Counts the share, or drops it."""
    self._engine.staleness.end(worker, 0)
    self._ballot.add(self)


def split(batch: engine_lib.Batch, count: int) -> list[engine_lib.Batch]:
  """The rows of a batch in `count` parts, as even as can be, none empty."""
  rows = {a.shape[0] if a.ndim else None for a in batch.arrays}
  if len(rows) != 1 or None in rows:
    raise errors.UnsupportedOptionError(
      f'a batch whose arrays have {sorted(map(str, rows))} rows',
      "with mode='sync': arrays with one first dimension, which is shared out",
      "give all arrays the batch's rows, or use mode='async'",
    )
  total = rows.pop()
  count = max(1, min(count, total))
  starts = [total * i // count for i in range(count + 1)]
  return [
    batch.part([a[first:last] for a in batch.arrays])
    for first, last in itertools.pairwise(starts)
  ]
