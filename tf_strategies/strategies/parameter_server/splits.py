"""The splits of data that workers read, and who reads which.

Each is read in order, by one worker at a time. Its elements are numbered; `done` of
them have been trained on. When a worker is lost, its splits go to others, which skip
those. A step takes one element of one split, or, in 'sync', a round: one of each
split that has one.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import tensorflow as tf

from tf_strategies import _keras_internal, errors
from tf_strategies.checkpoint import position as position_lib
from tf_strategies.strategies.parameter_server import worker_pool

# How often each worker was given up.
Lives = Mapping[int, int]


@dataclasses.dataclass(eq=False)
class DataSplit:
  """A part of an epoch's data."""

  index: int
  # Elements that have been trained on, or dropped with `backup_workers`.
  done: int = 0
  # The worker that reads it, and the life in which it began to.
  owner: tuple[int, int] | None = None
  # Of the iterator on the worker that reads it.
  handle: tf.Tensor | None = None
  next: int = 0  # The element that the iterator yields next.
  size: int = -1  # How many elements it has; negative if that is not known.
  is_closed: bool = False  # It was read to its end.

  @property
  def is_at_end(self) -> bool:
    """Returns whether nothing is left in it."""
    return self.is_closed or 0 <= self.size <= self.done


class Source:
  """One epoch of data: hands its splits to the workers.

  A restarted run continues at `start`. The steps of its epoch that are done are
  handed out once more, and dropped. `dataset` is an `input.WorkerDataset`.
  """

  def __init__(
    self,
    dataset: Any,
    start: position_lib.Position = position_lib.Position(),  # noqa: B008
  ):
    self.dataset = dataset
    done = start.splits
    self._lock = threading.Lock()
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
    self._turn = itertools.count()

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

  def has_work_for(
    self,
    worker: int,
    others: Iterable[int],
    lives: Lives,
    wanted: Collection[DataSplit],
  ) -> bool:
    """Returns whether a worker can read one of the splits, or report its end."""
    # A late worker has read a split to its end. Any worker may report that.
    if not wanted or any(split.is_closed for split in wanted):
      return True
    mine = self._of(worker, lives)
    if any(split in wanted for split in mine):
      return True
    is_free = any(self._is_free(split, lives) for split in wanted)
    return is_free and not (mine and self._others_need(others, lives))

  def split_for(
    self,
    worker: int,
    others: Iterable[int],
    lives: Lives,
    wanted: Collection[DataSplit],
  ) -> DataSplit | None:
    """Returns the split that a worker reads next, opened; None if there is none.

    Args:
      worker: the worker.
      others: those that share the splits with it.
      lives: how often each worker was given up: then it has lost its splits.
      wanted: the splits to choose from.
    """
    with self._lock:
      mine = self._of(worker, lives)
      others_need = self._others_need(others, lives)
      if len(mine) > 1 and others_need:
        # A split of a worker that was lost and is back.
        mine.pop().owner = None
      free = [split for split in wanted if self._is_free(split, lives)]
      split = None
      if free and not (mine and others_need):
        # The split that it has read before, whose arrays it may have.
        split = min(free, key=lambda s: (s.index != worker, s.index))
        split.owner = worker, lives[worker]
    if split is not None:
      try:
        self._begin(split, worker, lives)
      except BaseException:
        split.owner = None
        raise
    mine = [each for each in self._of(worker, lives) if each in wanted]
    return mine[next(self._turn) % len(mine)] if mine else None

  def _of(self, worker: int, lives: Lives) -> list[DataSplit]:
    """Returns the splits that a worker reads."""
    owner = worker, lives[worker]
    return [s for s in self.splits if s.owner == owner and not s.is_closed]

  def _others_need(self, others: Iterable[int], lives: Lives) -> bool:
    return any(not self._of(worker, lives) for worker in others)

  def _is_free(self, split: DataSplit, lives: Lives) -> bool:
    """Returns whether nobody reads a split; its worker may be lost."""
    if split.owner is None:
      return not split.is_closed
    worker, life = split.owner
    return not split.is_closed and lives[worker] != life

  def _begin(self, split: DataSplit, worker: int, lives: Lives) -> None:
    """Opens a split at its next element, however many steps end meanwhile."""
    element = split.done
    split.handle = self.dataset.open(split, element, worker, lives[worker])
    split.next = element

  def read(
    self,
    split: DataSplit,
    worker: int,
    lives: Lives,
    function: Callable[[tf.Tensor], Any],
  ) -> bool:
    """Calls a function that reads the next element of a worker's split.

    Returns False if there is no such element, which closes the split.
    """
    if split.is_closed:
      return False
    try:
      element = split.done
      if split.next > element:  # It is read again.
        self._begin(split, worker, lives)
      # What a late worker has not read.
      self.dataset.skip(split, worker, element)
      function(split.handle)
    except tf.errors.OutOfRangeError as e:
      if not _keras_internal.is_end_of_sequence(e):
        raise
      split.is_closed = True
      split.handle = None  # Lets the worker forget the iterator.
      return False
    split.next = element + 1
    return True


class Round:
  """One element of each split that has one, for the tasks of one step.

  Attributes:
    source: has the splits.
    splits: those that have an element.
    waiting: those of them whose element no task has taken.
    has_shares: whether the tasks share the rows of a step.
  """

  def __init__(self, source: Source, has_shares: bool):
    self.source, self.has_shares = source, has_shares
    self.splits = [split for split in source.splits if not split.is_at_end]
    self.waiting = set(self.splits)

  def count(self) -> None:
    """Advances all splits after the step; it drops elements that were not applied."""
    for split in self.splits:
      split.done += not split.is_closed


class Read:
  """An element that a worker reads; it chooses the split.

  Args:
    engine: knows the workers.
    source: has the splits.
    turn: the round whose elements are read, each once. None for the next of any split.
  """

  def __init__(self, engine, source: Source, turn: Round | None = None):
    self.layout = source.dataset.layout
    self._engine, self._source, self._round = engine, source, turn
    self._split: DataSplit | None = None

  @property
  def index(self) -> int:
    """Returns the number of the split."""
    return self._split.index

  def _others(self, worker: int) -> list[int]:
    # A step without shares does not wait for late workers: others read their splits.
    also_late = self._round is None or self._round.has_shares
    return self._engine.others(worker, also_late)

  def _wanted(self) -> Collection[DataSplit]:
    if self._round is not None:
      return self._round.waiting.copy()
    return [split for split in self._source.splits if not split.is_closed]

  def has_work_for(self, worker: int) -> bool:
    """Returns whether there is anything for a worker to read, or an end to report."""
    return self._source.has_work_for(
      worker, self._others(worker), self._engine.lives, self._wanted()
    )

  def read(self, worker: int, compute: Callable[[Any], Any]) -> bool:
    """Calls `compute` with an iterator; returns False if there is nothing to read.

    Raises:
      NotHereError: other workers have the rest of the data.
    """
    lives = self._engine.lives
    while wanted := self._wanted():
      split = self._source.split_for(
        worker, self._others(worker), lives, wanted
      )
      if split is None:
        split = next((each for each in wanted if each.is_closed), None)
      if split is None:
        raise worker_pool.NotHereError
      self._split = split
      if self._round is None:
        if self._source.read(split, worker, lives, compute):
          return True
        continue
      try:
        self._round.waiting.remove(split)
      except KeyError:  # Another worker has come at the same time.
        continue
      try:
        return self._source.read(split, worker, lives, compute)
      except BaseException:
        self._round.waiting.add(split)  # For whoever gets it next.
        raise
    return False

  def mark_applied(self) -> None:
    """Counts the element, which was computed and applied; a round counts its own."""
    if self._round is None:
      self._split.done += 1
