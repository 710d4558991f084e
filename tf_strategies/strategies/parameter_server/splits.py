"""The splits of data that workers read, and who reads which.

Split i is read in order, by worker i, or by another one while that one is lost. Its
elements are numbered; `done` of them have been trained on. Whoever reads it next
begins there. A step takes one element of one split, or, in 'sync', a round: one of
each split that has one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tf_strategies import errors
from tf_strategies.checkpoint import position as position_lib
from tf_strategies.strategies.parameter_server import worker_pool


@dataclasses.dataclass(eq=False)
class DataSplit:
  """A part of an epoch's data."""

  index: int
  # Elements that have been trained on, or dropped with `backup_workers`.
  done: int = 0
  # The worker that has the iterator, and the life in which it opened it.
  owner: tuple[int, int] | None = None
  handle: tf.Tensor | None = None  # Of the iterator.
  next: int = 0  # The element that the iterator yields next.
  size: int = -1  # How many elements it has; negative if that is not known.
  is_closed: bool = False  # It was read to its end.

  @property
  def is_at_end(self) -> bool:
    """Returns whether nothing is left in it."""
    return self.is_closed or 0 <= self.size <= self.done


class Source:
  """One epoch of data, in splits.

  A restarted run continues at `start`. The steps of its epoch that are done are
  handed out once more, and dropped. `dataset` is an `input.WorkerDataset`.

  Attributes:
    layout: of its elements.
    splits: all splits.
    waiting: those that nobody reads now, for steps that take one element.
    predicted: predictions of elements that were not returned yet.
  """

  has_shares = True

  def __init__(
    self,
    dataset: Any,
    start: position_lib.Position = position_lib.Position(),  # noqa: B008
  ):
    self.dataset, self.layout = dataset, dataset.layout
    done = start.splits
    self.splits = tuple(
      DataSplit(i, size=size) for i, size in enumerate(dataset.sizes)
    )
    if done and len(done) != len(self.splits):
      raise errors.UnsupportedOptionError(
        f'{len(self.splits)}',
        f'{len(done)} workers that read data, as in the checkpoint',
        f'start {len(done)} workers, or continue from the end of an epoch',
      )
    for split, count in zip(self.splits, done, strict=False):
      split.done = count
    self._handed_out = dataset.steps_of(done) - start.step if done else 0
    self.waiting = set(self.splits)
    self.predicted: list[Any] = []

  @property
  def is_exhausted(self) -> bool:
    """Returns whether every split has been read to its end."""
    return all(split.is_closed for split in self.splits)

  @property
  def position(self) -> tuple[int, ...]:
    """Elements of each split that have been trained on; empty at the end.

    With `steps_per_epoch` several epochs of `fit` are one of these.
    """
    if self._is_over():
      return ()
    return tuple(split.done for split in self.splits)

  def may_begin_step(self) -> bool:
    """Counts a step that is to be scheduled; False at the end of the data."""
    if self._is_over():
      return False
    self._handed_out += 1
    return True

  def _is_over(self) -> bool:
    """Returns whether all steps were handed out."""
    count = self.dataset.cardinality()
    return self.is_exhausted if count < 0 else count <= self._handed_out

  def read(
    self,
    split: DataSplit,
    worker: int,
    lives: Mapping[int, int],
    function: Callable[[tf.Tensor], Any],
  ) -> bool:
    """Calls a function that reads the next element of a split on a worker.

    Args:
      split: the split.
      worker: the worker.
      lives: how often each worker was given up: then it has lost its iterators.
      function: takes an iterator.

    Returns:
      False if there is no such element, which closes the split.
    """
    if split.is_closed:
      return False
    element, owner = split.done, (worker, lives[worker])
    try:
      if split.owner != owner or split.next > element:  # It is read again.
        split.handle = self.dataset.open(split.index, element, worker)
        split.owner, split.next = owner, element
      # What a late worker has not read.
      self.dataset.skip(split, worker, element)
      split.next = element + 1
      function(split.handle)
    except tf.errors.OutOfRangeError as e:
      if 'End of sequence' not in str(e):  # Of the data.
        raise
      split.is_closed = True
      split.handle = None  # Lets the worker forget the iterator.
      return False
    return True


class Round:
  """One element of each split that has one, for the tasks of one step.

  Attributes:
    splits: those that have an element.
    waiting: those of them whose element no task has taken.
    has_shares: whether the tasks share the rows of a step.
  """

  def __init__(self, source: Source, has_shares: bool):
    self.has_shares = has_shares
    self.splits = [split for split in source.splits if not split.is_at_end]
    self.waiting = set(self.splits)

  def count(self) -> None:
    """Advances all splits after the step; it drops elements that were not applied."""
    for split in self.splits:
      split.done += not split.is_closed


class Read:
  """An element that a worker reads; it chooses the split.

  Args:
    pool: of the workers.
    source: has the splits.
    turn: the round whose elements are read, each once. None for the next of any split.
  """

  def __init__(
    self,
    pool: worker_pool.WorkerPool,
    source: Source,
    turn: Round | None = None,
  ):
    self.layout = source.layout
    self.index = 0  # Of the split.
    self._pool, self._source = pool, source
    self._turn = source if turn is None else turn

  def _readable(self, worker: int) -> list[DataSplit]:
    """Returns the splits that a worker can read, or whose end it can report."""
    # A step without shares does not wait for late workers: others read their splits.
    readers = self._pool.readers(also_late=self._turn.has_shares)
    return [
      split
      for split in self._turn.waiting.copy()
      if split.is_closed or readers[split.index] == worker
    ]

  def has_work_for(self, worker: int) -> bool:
    """Returns whether there is anything for a worker to read, or an end to report."""
    return self._source.is_exhausted or bool(self._readable(worker))

  def _take(self, worker: int) -> DataSplit | None:
    """Takes the least advanced split that a worker can read."""
    with self._pool.lock:
      split = min(
        self._readable(worker), key=lambda s: (s.done, s.index), default=None
      )
      self._turn.waiting.discard(split)
      return split

  def read(self, worker: int, compute: Callable[[Any], Any]) -> bool:
    """Calls `compute` with an iterator; returns False if there is nothing to read.

    Raises:
      NotHereError: other workers have the rest of the data.
    """
    is_round = self._turn is not self._source
    while split := self._take(worker):
      self.index, is_read = split.index, False
      try:
        is_read = self._source.read(split, worker, self._pool.lives, compute)
      finally:
        split.done += is_read and not is_round
        if not (split.is_closed or (is_read and is_round)):
          self._turn.waiting.add(split)
      if is_read or is_round:
        return is_read
    if self._source.is_exhausted:
      return False
    raise worker_pool.NotHereError
