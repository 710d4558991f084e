"""Synchronous steps: each worker computes a microbatch of the batch.

With backup workers (Chen et al. 2016, "Revisiting Distributed Synchronous SGD")
the first N - k microbatches of a step count and the others are dropped, so that
a slow worker does not slow down the rest.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal, errors
from tf_strategies.strategies.parameter_server import (
  batch_message,
  input,
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
    super().__init__(*args, in_replica=in_replica, meets=True)
    self._backup_workers = backup_workers
    self._in_replica = in_replica
    self._free_slots: dict[str, list[microbatch.Slots]] = {}
    # Steps whose batches are computed as a whole, and why.
    self._whole: weakref.WeakKeyDictionary[engine_lib.Step, str] = (
      weakref.WeakKeyDictionary()
    )

  def train(self, step: engine_lib.Step, work: engine_lib.Work) -> Any:
    """Runs the steps, one after the other."""
    engine_lib.check_is_sent(
      work, "mode='sync'", "use mode='async' or 'bounded'"
    )
    for batch in work:
      discovery = self.discover(step, batch.layout(1).traced_structure)
      if step in self._whole:
        # What one worker makes of all rows is what one device makes.
        report = self.run(step, [batch])
      else:
        report = discovery.unreport(self._train(step, batch))
    return report

  def run(self, step: engine_lib.Step, work: engine_lib.Work) -> Any:
    """Begins steps; each after the one before it where that may change results."""
    if not step.whole_because and step not in self._whole:
      return super().run(step, work)
    is_sent = not isinstance(work, input.Elements)
    for each in batch_message.alike(work) if is_sent else [work]:
      report = super().run(step, each)
      self.drain()
    return report

  def forget(self) -> None:
    """As `Engine.forget`; slots are gone too."""
    super().forget()
    self._free_slots.clear()

  def _train(self, step, batch):
    if self._pool.is_busy(lambda task: not isinstance(task, _MicrobatchTask)):
      # Evaluation must be done before variables change.
      self.drain()
    parts = batch.microbatches(len(self._pool.workers))
    rows = sum(part.layout(1).rows for part in parts)
    quorum = _Quorum(max(1, len(parts) - self._backup_workers))
    for index, part in enumerate(parts):
      task = _MicrobatchTask(self, step, part, index, quorum, rows)
      self._pool.submit(task)
    self.wait(lambda: quorum.is_complete)
    chosen = sorted(quorum.chosen, key=lambda task: task.index)
    function = self._apply_function(step, chosen)
    numbers = function([task.slots for task in chosen])
    self._steps_done += 1
    for task in chosen:
      self.release(task)
    return numbers

  def _discover(self, step, structure):
    if step.trains and step.whole_because:
      self._compute_whole(step, step.whole_because)
    if not step.optimizers or step in self._whole:
      return super()._discover(step, structure)
    reasons, gradients = [], []

    def run(batch):
      with (
        step.capture(step.optimizers) as calls,
        step.tracing_share(tf.constant(1.0)) as found,
      ):
        outputs = step.run(batch)
      reasons.extend(found)
      gradients.extend(g for _, grads, _ in calls for g in grads)
      return outputs

    discovery = worker_function.discover(run, structure, is_share=True)
    if step.counters is not None:
      access = discovery.access
      paths = {id(c.value): c.path for c in step.counters()}
      for key, variable in access.written.items():
        if key in paths and key in access.overwritten:
          reasons.append(f'metric variable {paths[key]!r} that is no sum')
        elif key in paths:
          continue
        elif _keras_internal.is_seed_state(variable.name, variable.dtype):
          reasons.append('random numbers, as of Dropout')
        else:
          reasons.append(f'{variable.name!r}, which it writes from all rows')
      leaves = [s for s in tf.nest.flatten(structure) if s is not None]
      if not reasons and all(isinstance(s, tf.TensorSpec) for s in leaves):
        gradients.clear()
        meets = worker_function.why_rows_meet(run, structure, gradients)
        if meets:
          reasons.append(f'what mixes rows: {meets}')
    if not discovery.are_numbers:
      reasons.append('results that are no numbers')
    if not reasons:
      return discovery
    self._compute_whole(step, reasons[0])
    return super()._discover(step, structure)

  def _compute_whole(self, step, reason: str) -> None:
    if step in self._whole:
      return
    self._whole[step] = reason
    for key in [k for k in self._functions if k[0] is step]:
      del self._functions[key]
    if len(self._pool.workers) > 1:
      logging.warning(
        "mode='sync' computes every batch of a step with %s on one worker: a mean "
        "over the workers' rows would not be what one device computes. To use "
        'all workers at once, leave it out, or take strategy.remote_step for '
        'a step whose gradients are means over rows.',
        reason,
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
    discovery = self.discover(step, layout.traced_structure)
    return self.cached(
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
    rows: int,
  ):
    self.index = index
    self._rows = rows  # Of all microbatches of the step.
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
    message = self._layout.encode(self._rows, 0, [self._batch.arrays])
    self._engine.staleness.start(worker)
    self.function(worker, message, self.slots)

  def finish(self, worker: int) -> None:
    self._engine.staleness.end(worker, 0)
    if self._quorum.is_complete:
      self._engine.drop()
      self._engine.release(self)
    else:
      self._quorum.chosen.append(self)
