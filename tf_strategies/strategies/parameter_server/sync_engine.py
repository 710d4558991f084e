"""Synchronous steps: workers share the rows of a batch."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_strategies import errors
from tf_strategies.spmd import plan
from tf_strategies.strategies.parameter_server import (
  batch_message,
  splits,
  traced_step,
  worker_pool,
)
from tf_strategies.strategies.parameter_server import engine as engine_lib


class SyncEngine(engine_lib.Engine):
  """Applies what workers compute from their rows of a batch together.

  A step does not wait for its last `backup_workers` shares.
  """

  def __init__(self, *args, backup_workers: int):
    super().__init__(*args)
    self._backup_workers = backup_workers
    # By step and layout: how to combine the results of workers, or why they cannot
    # share the rows of a batch.
    self._sharing: weakref.WeakKeyDictionary[
      engine_lib.Step, dict[Any, traced_step.Powers | str]
    ] = weakref.WeakKeyDictionary()
    self._warned: weakref.WeakSet[engine_lib.Step] = weakref.WeakSet()

  def begin(self, step: engine_lib.Step, work: engine_lib.Work) -> Any:
    """Runs a step; None if there is nothing to read."""
    if not step.trains:
      return self._run(step, work)
    is_read = isinstance(work, splits.Source)
    structure = work.dataset.element_spec if is_read else work.structure
    powers = self.powers(step, structure)
    if not isinstance(powers, str):
      return self._train(step, work, powers)
    if not is_read:
      # What one worker makes of all rows is what one device makes.
      self._warn_of_whole(step, powers)
    elif len(work.splits) > 1:
      raise errors.UnsupportedOptionError(
        f"a step that mixes rows ({powers}) in mode='sync', with data that "
        f'{len(work.splits)} workers read',
        'gradients and results that are sums or means over rows',
        'pass the tf.data.Dataset itself to fit or iterate over it, so that one '
        "worker computes each batch as a whole; or use mode='async'",
      )
    return self._run(step, work)

  def _run(self, step, work):
    """Begins a step; waits for the one before it if that may change results."""
    is_alone = step.results is None or step.trains
    if isinstance(work, splits.Source):
      tasks = self.read_round(step, work, one_by_one=is_alone)
      return _read(self.reports.of(tasks[-1]), step) if tasks else None
    report = super().begin(step, work)
    if is_alone:
      self.pool.wait()
    return _read(report, step)

  def powers(
    self, step: engine_lib.Step, structure: Any
  ) -> traced_step.Powers | str:
    """See base class."""
    if not step.trains:
      return super().powers(step, structure)
    known = self._sharing.setdefault(step, {})
    structure = tf.nest.map_structure(batch_message.with_any_rows, structure)
    key = repr(structure)
    if key not in known:
      # The results of metrics are computed later, from what was added up.
      exempt = tuple if step.results is None else step.counters
      try:
        known[key] = traced_step.powers_of_rows(
          step.run, step.optimizers, structure, exempt
        )
      except plan.NeedsExchangeError as error:
        known[key] = str(error)
    return known[key]

  def _train(self, step, work, powers):
    """Applies a quorum of the shares of a step; None if nothing was read."""
    self.pool.wait()  # Evaluation must be done before variables change.
    turn = None
    if isinstance(work, splits.Source):
      turn = splits.Round(work, has_shares=True)
      data = [splits.Read(self.pool, work, turn) for _ in turn.splits]
    else:
      parts = work.microbatches(len(self.pool.workers))
      data = [engine_lib.Sent(part, i) for i, part in enumerate(parts)]
    quorum = _Quorum(len(data), self._backup_workers)
    for task in [_Share(self, step, quorum, each) for each in data]:
      self.pool.submit(task)
    self.pool.wait(lambda: quorum.is_complete)
    chosen = sorted(quorum.chosen, key=lambda task: task.data.index)
    numbers = None
    if chosen:
      first = chosen[0]
      function = self.apply_function(step, first.function, len(chosen), powers)
      with self.pool.running(first):
        numbers = self.apply(function, chosen)
      with self.pool.lock:
        self.steps_done += 1
        self._dropped += quorum.dropped
    if turn is not None:
      turn.count()
    return None if numbers is None else first.specs.unreport(numbers)

  def _warn_of_whole(self, step, reason) -> None:
    if step not in self._warned and len(self.pool.workers) > 1:
      self._warned.add(step)
      logging.warning(
        "mode='sync' computes each whole batch of a step on one worker. Workers that "
        'share its rows would not compute what one device computes. The cause: %s.',
        reason,
      )


class _Quorum:
  """The shares of a step that count: the first ones to be done."""

  def __init__(self, count: int, backup_workers: int):
    self.chosen: list[_Share] = []
    # Shares that were begun, and by which worker.
    self.begun: dict[_Share, int] = {}
    self._count = count
    self._backup_workers = backup_workers

  @property
  def _needed(self) -> int:
    return max(min(1, self._count), self._count - self._backup_workers)

  @property
  def is_complete(self) -> bool:
    return len(self.chosen) >= self._needed

  @property
  def dropped(self) -> int:
    """Returns how many shares the step is done without."""
    return self._count - len(self.chosen)

  def put_back(self, task: _Share) -> None:
    """The worker that had taken a share leaves it to others."""
    self.begun.pop(task, None)

  def leave_out(self, task: _Share) -> None:
    """Does without a share, which had no data."""
    self.put_back(task)
    self._count -= 1

  def may_take(self, worker: int, task: _Share) -> bool:
    """Returns whether a worker may take a share; under the pool's lock.

    Each takes one: a second one would not count, and would keep it from the next
    step. It takes a second one if a worker failed with that share, or if fewer shares
    are being computed than the step needs.
    """
    were_lost = task.retries > 0 or len(self.begun) < self._needed
    return worker not in self.begun.values() or were_lost


class _Share(engine_lib.StepTask):
  """Some rows of a synchronous step, which is applied together with others."""

  applies_itself = False

  def __init__(self, engine: SyncEngine, step, quorum: _Quorum, data):
    self._quorum = quorum
    super().__init__(engine, step, data)

  def is_wanted(self) -> bool:
    return not self._quorum.is_complete

  def has_work_for(self, worker: int) -> bool:
    return self._quorum.may_take(worker, self) and super().has_work_for(worker)

  def begin(self, worker: int) -> None:
    self._quorum.begun[self] = worker

  def run(self, worker: int) -> None:
    try:
      super().run(worker)
    except worker_pool.NotHereError:
      self._quorum.put_back(self)
      raise

  def lose(self, worker: int) -> None:
    self._quorum.put_back(self)

  def finish(self, worker: int) -> None:
    del worker
    if not self.steps:
      self._quorum.leave_out(self)
    elif self._quorum.is_complete:
      self._engine.release(self)
    else:
      self._quorum.chosen.append(self)


def _read(report: Any, step) -> Any:
  """Returns what a step that is done reported; a later one may report otherwise."""
  if step.results is not None:
    return report
  return tf.nest.map_structure(np.asarray, report)
