"""What a worker that trains by itself trains on: batches that it gets, or reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_strategies.strategies.parameter_server import (
  batch_message,
  local_program,
  splits,
  worker_function,
  worker_pool,
)

# Makes a function that belongs to a key, or finds that it was made.
_Cached = Callable[[Any, Callable[[], Callable]], Callable]


class Sent:
  """Batches of the coordinator."""

  def __init__(
    self,
    program: local_program.Program,
    cached: _Cached,
    batches: Sequence[batch_message.Batch],
  ):
    self.steps = len(batches)
    self.rows = sum(batch.layout(1).rows for batch in batches)
    self._program = program
    self._runs = [
      (run[0].layout(len(run)), [b.arrays for b in run])
      for run in batch_message.alike(batches)
    ]
    self._functions = [
      cached(layout.key, lambda x=layout: program.steps_function(x))
      for layout, _ in self._runs
    ]

  def has_work_for(self, worker: int) -> bool:
    """Whether a worker can train on it."""
    del worker
    return True

  def train(self, worker: int, values: Sequence[Any]) -> tuple[list, Any]:
    """Trains: from values of variables to others, and what the last step said."""
    numbers = None
    for (layout, arrays), function in zip(
      self._runs, self._functions, strict=True
    ):
      message = layout.encode(0, 0, arrays)
      values, numbers = self._program.run_steps(
        function, worker, message, values
      )
    return values, numbers

  def commit(self) -> None:
    """What it made counts: it is not done again."""
    self._runs = ()


class Read:
  """At most `steps` elements, which the worker reads one by one.

  They are of one split, or of whichever the worker is given.
  """

  def __init__(
    self,
    program: local_program.Program,
    cached: _Cached,
    engine: Any,
    source: splits.Source,
    steps: int,
    split: splits.Split | None = None,
  ):
    self.steps = self.rows = 0  # That were read.
    self._program, self._engine, self._source = program, engine, source
    self._asked = steps
    self._split = split
    self._read: dict[splits.Split, int] = {}
    layout = source.dataset.layout(1)
    self._function = cached(layout.key, lambda: program.read_function(layout))
    engine.note_source(source)

  def has_work_for(self, worker: int) -> bool:
    """Whether a worker can train on it."""
    return self._split is not None or self._source.has_work_for(worker)

  def train(self, worker: int, values: Sequence[Any]) -> tuple[list, Any]:
    """As `Sent.train`; numbers are None if there was nothing to read."""
    for split in self._read:  # By a worker that was lost.
      self._source.undo_close(split)
    self._read, numbers = {}, None
    others = self._engine.others(worker)
    token = self._engine.journal.token(worker)
    with tf.device(worker_function.COORDINATOR):
      rows = tf.constant(0, tf.int64)
    if self._split is not None:
      self._source.give(self._split, worker, token)

    def step(handle):
      return worker_function.run_on_worker(
        self._function, worker, handle, rows, *values
      )

    while sum(self._read.values()) < self._asked:
      split = self._split or self._source.split_for(worker, others, token)
      if split is None or split.is_closed:
        break
      count = self._read.get(split, 0)
      found = self._source.read(split, split.done + count, worker, token, step)
      if found is not None:
        rows, numbers, *values = found
        self._read[split] = count + 1
    self.steps, self.rows = sum(self._read.values()), int(rows.numpy())
    is_over = self._split is not None or self._source.is_exhausted
    if not self.steps and not is_over:
      raise worker_pool.NotHereError
    return values, numbers

  def commit(self) -> None:
    """As `Sent.commit`."""
    for split, count in self._read.items():
      split.done += count
    self._read = {}
