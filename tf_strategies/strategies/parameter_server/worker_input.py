"""Data that workers read themselves, handed out so that each element is seen once.

A data set function is called for each of a number of splits. A split is read by
one worker at a time, in order. Its elements are numbered; a step's mark says how
far its split has been trained on. When a worker is lost, its split goes to
another one, which skips what was trained on: each element counts once, whoever
dies.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_strategies import _tf_internal

_PREFETCH = 2


@dataclasses.dataclass(eq=False)
class WorkerTensor:
  """Stands for a tensor that only a worker will see; knows shape and dtype."""

  shape: tf.TensorShape
  dtype: tf.DType
  source: Source


@dataclasses.dataclass
class Split:
  """A part of an epoch's data.

  Attributes:
    index: of the split.
    key: number of this reading of it, unique in the process.
    done: elements that have been trained on.
  """

  index: int
  key: int
  done: int = 0


class Reader:
  """A split that is open on a worker."""

  def __init__(self, split: Split, handle: tf.Tensor):
    self.split = split
    self.handle = handle


_keys = itertools.count(1)


class Source:
  """One epoch of data: hands its splits to the workers.

  Args:
    dataset: whose epoch this is.
    done: elements of each split that a run before a restart has trained on.
  """

  def __init__(self, dataset: WorkerDataset, done: Sequence[int] = ()):
    self.dataset = dataset
    self._lock = threading.Lock()
    self._free = [Split(i, next(_keys)) for i in range(dataset.num_splits)]
    self.splits = tuple(self._free)
    for split, count in zip(self.splits, done, strict=False):
      split.done = count
    self._handed_out = sum(done)
    self._readers: dict[int, list[Reader]] = {}
    self._turn = itertools.count()
    self._opening = 0

  @property
  def is_exhausted(self) -> bool:
    """Whether every split has been read to its end."""
    with self._lock:
      return self._is_empty()

  def may_draw(self) -> bool:
    """Counts a step that is to be scheduled; False at the end of the data."""
    cardinality = self.dataset.cardinality_or_none
    if cardinality is not None:
      if self._handed_out >= cardinality:
        return False
    elif self.is_exhausted:
      return False
    self._handed_out += 1
    return True

  def has_work_for(self, worker: int) -> bool:
    """Whether a worker has anything to read, or nobody ever will."""
    with self._lock:
      if self._free or self._readers.get(worker):
        return True
      return self._is_empty()

  def _is_empty(self) -> bool:
    if self._free or self._opening:
      return False
    return not any(self._readers.values())

  def reader(self, worker: int, others: Iterable[int]) -> Reader | None:
    """What a worker reads next; opens a split if it has none.

    Args:
      worker: its index.
      others: the other workers that are alive.

    Returns:
      None if nothing is left to open.
    """
    with self._lock:
      mine = self._readers.setdefault(worker, [])
      others_need = any(not self._readers.get(w) for w in others)
      if len(mine) > 1 and others_need:
        # Taken over from a worker that was lost, and is back.
        self._free.append(mine.pop().split)
      is_needed = not mine or not others_need
      split = self._free.pop(0) if self._free and is_needed else None
      self._opening += split is not None
    if split is not None:
      self._open(split, worker)
    with self._lock:
      mine = self._readers.setdefault(worker, [])
      return mine[next(self._turn) % len(mine)] if mine else None

  def _open(self, split: Split, worker: int) -> None:
    """Opens a split; it is nobody's while this lasts."""
    opened = None
    try:
      opened = Reader(split, self.dataset.open(split, worker))
    finally:
      with self._lock:
        self._opening -= 1
        if opened is None:
          self._free.append(split)
        else:
          self._readers.setdefault(worker, []).append(opened)

  def close(self, worker: int, reader: Reader) -> None:
    """A split was read to its end."""
    with self._lock:
      self._readers[worker].remove(reader)

  def lose(self, worker: int) -> list[Split]:
    """Takes back the splits of a worker that was lost."""
    with self._lock:
      splits = [r.split for r in self._readers.pop(worker, [])]
      self._free += splits
      return splits


class WorkerDataset(_tf_internal.DistributedDataset):
  """What `distribute_datasets_from_function` returns outside of functions.

  Args:
    dataset_fn: makes the data set of a split from a `tf.distribute.
      InputContext` with its number and the number of all.
    num_splits: number of splits.
    take_resumption: tells once where a restarted run goes on.
  """

  # pylint: disable-next=super-init-not-called
  def __init__(
    self,
    dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
    num_splits: int,
    take_resumption: Callable[[], Any] = lambda: None,
  ):
    self.num_splits = num_splits
    self._dataset_fn = dataset_fn
    self.take_resumption = take_resumption
    self._openers: dict[int, Any] = {}
    self._lock = threading.Lock()
    with tf.device('/device:CPU:0'):
      parts = [self._make(i) for i in range(num_splits)]
    self._element_spec = parts[0].element_spec
    sizes = [int(p.cardinality()) for p in parts]
    self._cardinality = sum(sizes) if min(sizes) >= 0 else min(sizes)

  @property
  def element_spec(self) -> Any:
    """Of one batch."""
    return self._element_spec

  @property
  def cardinality_or_none(self) -> int | None:
    """Number of batches, where it is known and finite."""
    return self._cardinality if self._cardinality >= 0 else None

  def cardinality(self) -> int:
    """Number of batches; negative as `tf.data.Dataset.cardinality`."""
    return self._cardinality

  def __iter__(self) -> Iterator[Any]:
    return WorkerIterator(self)

  def _make(self, index: int) -> tf.data.Dataset:
    return self._dataset_fn(
      tf.distribute.InputContext(
        num_input_pipelines=self.num_splits,
        input_pipeline_id=index,
        num_replicas_in_sync=1,
      )
    )

  def open(self, split: Split, worker: int) -> tf.Tensor:
    """Begins to read a split on a worker; returns the iterator's handle."""
    opener = self._opener(split.index)
    with tf.device('/device:CPU:0'):
      key, done = (
        tf.constant(split.key, tf.int64),
        tf.constant(split.done, tf.int64),
      )
    with tf.device(f'/job:worker/replica:0/task:{worker}/device:CPU:0'):
      variant = opener(key, done)
      handle = tf.raw_ops.AnonymousIteratorV3(
        output_types=[tf.int64, tf.int64, *self.output_types],
        output_shapes=[[], [], *self.output_shapes],
      )
      tf.raw_ops.MakeIterator(dataset=variant, iterator=handle)
    return handle

  @property
  def output_types(self) -> list[tf.DType]:
    """Of the tensors of a batch."""
    return [s.dtype for s in tf.nest.flatten(self._element_spec)]

  @property
  def output_shapes(self) -> list[tf.TensorShape]:
    """Of the tensors of a batch."""
    return [s.shape for s in tf.nest.flatten(self._element_spec)]

  def _opener(self, index: int):
    """A function that makes a split's data set where it is called."""
    with self._lock:
      if index not in self._openers:

        def make(key, done):
          numbered = self._make(index).enumerate().skip(done)
          numbered = numbered.map(
            lambda i, batch: (key, i, *tf.nest.flatten(batch)),
            num_parallel_calls=1,
          )
          return tf.data.experimental.to_variant(numbered.prefetch(_PREFETCH))

        scalar = tf.TensorSpec([], tf.int64)
        self._openers[index] = tf.function(
          make, autograph=False
        ).get_concrete_function(scalar, scalar)
      return self._openers[index]


class WorkerIterator:
  """Yields one structure of `WorkerTensor`s for each step."""

  def __init__(self, dataset: WorkerDataset):
    self._dataset = dataset
    self._source: Source | None = None
    self._step = None

  def __iter__(self):
    return self

  def __next__(self):
    resumed = self._dataset.take_resumption()
    if self._source is None or resumed is not None:
      self._source = Source(self._dataset, resumed.splits if resumed else ())
      # One structure for all steps: Keras traces it as a constant.
      self._step = tf.nest.map_structure(
        lambda s: WorkerTensor(s.shape, s.dtype, self._source),
        self._dataset.element_spec,
      )
    if not self._source.may_draw():
      raise StopIteration
    return self._step


def source_of(data: Any) -> Source | None:
  """The source of a batch that workers draw; None for a batch of arrays."""
  first = next(iter(tf.nest.flatten(data)), None)
  return first.source if isinstance(first, WorkerTensor) else None
