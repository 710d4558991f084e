"""What feeds the steps: batches of the coordinator, or data that workers read.

Batches that the coordinator reads go to one step each, and to another worker if
the first is lost. Data that workers read is cut into splits: a data set
function is called for each, and one worker at a time reads it, in order. Its
elements are numbered; a step's completion marker says how far its split has
been trained on. When a worker is lost, its split goes to another one, which
skips what was trained on. Either way each element counts once an epoch.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.checkpoint import position as position_lib

_PREFETCH = 2


# Where a restarted run continues in its data, and the steps of its epochs; None
# if an epoch is one pass.
Resumed = tuple[position_lib.Position, int | None]


@dataclasses.dataclass(eq=False)
class WorkerTensor:
  """Stands for a tensor that only a worker sees."""

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


@dataclasses.dataclass(eq=False)
class Reader:
  """A split that is open on a worker."""

  split: Split
  handle: tf.Tensor


_keys = itertools.count(1)


class Source:
  """One epoch of data: hands its splits to the workers.

  Args:
    dataset: whose epoch this is.
    start: where a restarted run continues. The steps of its epoch that are done
      are handed out once more, and dropped.
  """

  def __init__(
    self,
    dataset: WorkerDataset,
    start: position_lib.Position = position_lib.Position(),  # noqa: B008
  ):
    self.dataset = dataset
    done = start.splits
    self._lock = threading.Lock()
    self._free = [Split(i, next(_keys)) for i in range(dataset.num_splits)]
    self.splits = tuple(self._free)
    if done and len(done) != len(self.splits):
      raise errors.UnsupportedOptionError(
        f'{len(self.splits)} workers that read data, after a checkpoint of '
        f'{len(done)}',
        'the number of workers that the run started with',
        f'start {len(done)} workers, or continue from the end of an epoch',
      )
    for split, count in zip(self.splits, done, strict=False):
      split.done = count
    self._handed_out = sum(done) - start.step if done else 0
    self._readers: dict[int, list[Reader]] = {}
    self._turn = itertools.count()
    self._opening = 0

  @property
  def is_exhausted(self) -> bool:
    """Whether every split has been read to its end."""
    with self._lock:
      return self._is_empty()

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
  """What `distribute_datasets_from_function` returns outside of functions."""

  # pylint: disable-next=super-init-not-called
  def __init__(
    self,
    dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
    num_splits: int,
    take_resumed: Callable[[], Resumed | None],
  ):
    self.num_splits = num_splits
    self._dataset_fn = dataset_fn
    self.take_resumed = take_resumed
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
    specs = tf.nest.flatten(self.element_spec)
    with tf.device('/device:CPU:0'):
      key = tf.constant(split.key, tf.int64)
      done = tf.constant(split.done, tf.int64)
    with tf.device(f'/job:worker/replica:0/task:{worker}/device:CPU:0'):
      variant = opener(key, done)
      handle = tf.raw_ops.AnonymousIteratorV3(
        output_types=[tf.int64, tf.int64, *(s.dtype for s in specs)],
        output_shapes=[[], [], *(s.shape for s in specs)],
      )
      tf.raw_ops.MakeIterator(dataset=variant, iterator=handle)
    return handle

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
    resumed = self._dataset.take_resumed()
    if self._source is None or resumed is not None:
      self._source = Source(self._dataset, *(resumed or ())[:1])
      # One structure for all steps: Keras traces it as a constant.
      self._step = tf.nest.map_structure(
        lambda s: WorkerTensor(s.shape, s.dtype, self._source),
        self._dataset.element_spec,
      )
    if not self._source.may_begin_step():
      raise StopIteration
    return self._step


def source_of(data: Any) -> Source | None:
  """The source of a batch that workers read; None for a batch of arrays."""
  first = next(iter(tf.nest.flatten(data)), None)
  return first.source if isinstance(first, WorkerTensor) else None


class FedDataset(_tf_internal.DistributedDataset):
  """A data set whose batches the coordinator reads and sends to workers.

  Keras iterates over it as over any iterable.
  """

  # pylint: disable-next=super-init-not-called
  def __init__(
    self,
    dataset: tf.data.Dataset,
    stock: Callable[[tf.data.Dataset], Any],
    take_resumed: Callable[[], Resumed | None],
  ):
    self.dataset = dataset
    self._stock = stock
    self._take_resumed = take_resumed

  @property
  def element_spec(self) -> Any:
    """Of one batch."""
    return self.dataset.element_spec

  def cardinality(self) -> int:
    """Number of batches; negative as `tf.data.Dataset.cardinality`."""
    return int(self.dataset.cardinality())

  def __iter__(self) -> Iterator[Any]:
    # Opened when the first batch is wanted: Keras asks for an iterator at the
    # end of each epoch, for an epoch that may never come.
    resumed = self._take_resumed()
    if resumed is None:
      yield from self.dataset
    else:
      # Of the epoch's steps, `fit` reads and drops those that are done.
      position, steps_per_epoch = resumed
      start = position_lib.Position(position.epoch)
      yield from start.iterate(self.dataset, steps_per_epoch)

  def __call__(self) -> Any:
    """TensorFlow's own distributed data set."""
    return self._stock(self.dataset)


def feed(dataset, stock, take_resumed) -> FedDataset | WorkerDataset:
  """Wraps what `experimental_distribute_dataset` is given.

  Raises:
    UnsupportedOptionError: it is no data set.
  """
  if isinstance(dataset, FedDataset | WorkerDataset):
    return dataset
  if not isinstance(dataset, tf.data.Dataset):
    raise errors.UnsupportedOptionError(
      f'a {type(dataset).__name__} to distribute',
      'a tf.data.Dataset',
      'wrap a generator: tf.data.Dataset.from_generator',
    )
  return FedDataset(dataset, stock, take_resumed)
