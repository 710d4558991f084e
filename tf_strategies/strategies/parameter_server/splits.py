"""The splits of data that workers read, and who reads which.

Each is read in order, by one worker at a time. Its elements are numbered; `done` of
them have been trained on. When a worker is lost, its splits go to others, which skip
those. A step takes one element of one split, or, in 'sync', a round: one of each
split that has one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import tensorflow as tf

from tf_strategies import _keras_internal, errors
from tf_strategies.checkpoint import position as position_lib
from tf_strategies.strategies.parameter_server import worker_pool

_T = TypeVar('_T')


@dataclasses.dataclass(eq=False)
class DataSplit:
  """A part of an epoch's data."""

  index: int
  done: int = 0  # Elements that have been trained on.
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
    self._free = [
      DataSplit(i, size=size) for i, size in enumerate(dataset.sizes)
    ]
    self.splits = tuple(self._free)
    if done and len(done) != len(self.splits):
      raise errors.UnsupportedOptionError(
        f'{len(self.splits)}',
        f'{len(done)} workers that read data, as in the checkpoint',
        f'start {len(done)} workers, or continue from the end of an epoch',
      )
    for split, count in zip(self.splits, done, strict=False):
      split.done = count
    self._handed_out = dataset.steps_of(done) - start.step if done else 0
    self._splits_of: dict[int, list[DataSplit]] = {}
    self._turn = itertools.count()
    self._opening = 0

  @property
  def is_exhausted(self) -> bool:
    """Returns whether every split has been read to its end."""
    with self._lock:
      return self._is_empty()

  @property
  def position(self) -> tuple[int, ...]:
    """Elements of each split that have been trained on; empty at the end.

    With `steps_per_epoch` several epochs of `fit` are one of these.
    """
    count = self.dataset.cardinality()
    if 0 <= count <= self._handed_out or (count < 0 and self.is_exhausted):
      return ()
    return tuple(split.done for split in self.splits)

  def may_begin_step(self) -> bool:
    """Counts a step that is to be scheduled; False at the end of the data."""
    cardinality = self.dataset.cardinality()
    if cardinality < 0:
      if self.is_exhausted:
        return False
    elif self._handed_out >= cardinality:
      return False
    self._handed_out += 1
    return True

  def has_work_for(self, worker: int) -> bool:
    """Returns whether a worker has anything to read, or must report the end."""
    with self._lock:
      if self._free or self._splits_of.get(worker):
        return True
      return self._is_empty()

  def has_any_for(
    self, worker: int, others: Iterable[int], wanted: Collection[DataSplit]
  ) -> bool:
    """Returns whether `split_for` would find one of these for a worker."""
    with self._lock:
      mine = self._splits_of.get(worker, ())
      if any(split in wanted for split in mine):
        return True
      # A late worker has read it to its end. Any worker may report that.
      if any(s.is_closed and s in wanted for s in self.splits):
        return True
      others_need = any(not self._splits_of.get(w) for w in others)
      is_free = any(split in wanted for split in self._free)
      return is_free and not (mine and others_need)

  def _is_empty(self) -> bool:
    return not (self._free or self._opening or any(self._splits_of.values()))

  def split_for(
    self,
    worker: int,
    others: Iterable[int],
    life: int = 0,
    wanted: Collection[DataSplit] | None = None,
  ) -> DataSplit | None:
    """Returns the split that a worker reads next, opened; None if none is left.

    `life` counts how often the worker was given up: one that was has lost its splits.
    If some are `wanted`, it is one of them.
    """
    wanted = self.splits if wanted is None else wanted
    with self._lock:
      mine = self._splits_of.setdefault(worker, [])
      others_need = any(not self._splits_of.get(w) for w in others)
      if len(mine) > 1 and others_need:
        # A split of a worker that was lost and is back.
        self._free.append(mine.pop())
      is_needed = not mine or not others_need
      split = None
      free = [split for split in self._free if split in wanted]
      if free and is_needed:
        # The split that it has read before, whose arrays it may have.
        split = min(free, key=lambda s: s.index != worker)
        self._free.remove(split)
      self._opening += split is not None
    if split is not None:
      self._open(split, worker, life)
    with self._lock:
      mine = [s for s in self._splits_of.setdefault(worker, []) if s in wanted]
      return mine[next(self._turn) % len(mine)] if mine else None

  def _open(self, split: DataSplit, worker: int, life: int) -> None:
    """Opens a split; it is nobody's while this lasts."""
    is_open = False
    try:
      self._begin(split, split.done, worker, life)
      is_open = True
    finally:
      with self._lock:
        self._opening -= 1
        mine = self._splits_of.setdefault(worker, [])
        (mine if is_open else self._free).append(split)

  def _begin(
    self, split: DataSplit, element: int, worker: int, life: int
  ) -> None:
    """Opens a split at an element, however many steps end meanwhile."""
    split.handle = self.dataset.open(split, element, worker, life)
    split.next = element

  def read(
    self,
    split: DataSplit,
    element: int,
    worker: int,
    life: int,
    function: Callable[[tf.Tensor], _T],
  ) -> _T | None:
    """Calls a function that reads an element of a worker's split.

    Returns its result; None if there is no such element, which closes the split.
    """
    if split.is_closed:
      return None
    try:
      if split.next > element:  # It is read again.
        self._begin(split, element, worker, life)
      # What a late worker has not read.
      self.dataset.skip(split, worker, element)
      found = function(split.handle)
    except tf.errors.OutOfRangeError as e:
      if not _keras_internal.is_end_of_sequence(e):
        raise
      self.close(worker, split)
      return None
    split.next = element + 1
    return found

  def close(self, worker: int, split: DataSplit) -> None:
    """A split was read to its end."""
    with self._lock:
      self._splits_of[worker].remove(split)
      split.is_closed = True
      split.handle = None  # Lets the worker forget the iterator.

  def lose(self, worker: int) -> None:
    """Takes back the splits of a worker that was lost."""
    with self._lock:
      self._free += self._splits_of.pop(worker, [])


class Round:
  """One element of each split that has one, for the tasks of one step."""

  def __init__(self, source: Source):
    self.source = source
    self.elements = {
      split: split.done for split in source.splits if not split.is_at_end
    }
    self._waiting = set(self.elements)

  def has_work_for(self, worker: int, others: Iterable[int]) -> bool:
    """Returns whether a worker can read any of them."""
    return self.source.has_any_for(worker, others, self._waiting)

  def take(self, worker: int, others: Iterable[int], life: int) -> DataSplit:
    """The split of which a worker reads the next element, opened there."""
    found = self.source.split_for(worker, others, life, self._waiting)
    closed = (split for split in self.elements if split.is_closed)
    for split in closed if found is None else [found]:
      # Workers come at the same time.
      with contextlib.suppress(KeyError):
        self._waiting.remove(split)
        return split
    raise worker_pool.NotHereError

  def read(
    self,
    split: DataSplit,
    worker: int,
    life: int,
    function: Callable[[tf.Tensor], _T],
  ) -> _T | None:
    """Reads the element of the round as `Source.read` does."""
    element = self.elements[split]
    try:
      return self.source.read(split, element, worker, life, function)
    except BaseException:
      self._waiting.add(split)  # For whoever gets it next.
      raise

  def count(self) -> None:
    """Advances all splits after the step; elements that nobody read are dropped."""
    for split, element in self.elements.items():
      if not split.is_closed:
        split.done = element + 1
