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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.checkpoint import position as position_lib
from tf_strategies.strategies.parameter_server import (
  batch_message,
  worker_arrays,
)

_PREFETCH = 2

# Where a restarted run continues in its data, and the steps of its epochs; None
# if an epoch is one pass.
Resumed = tuple[position_lib.Position, int | None]


@dataclasses.dataclass(eq=False)
class WorkerTensor:
  """Stands for a tensor that only a worker sees."""

  spec: tf.TypeSpec
  source: Source

  @property
  def shape(self) -> tf.TensorShape:
    """Of the tensor."""
    return self.spec.shape

  @property
  def dtype(self) -> tf.DType:
    """Of the tensor."""
    return self.spec.dtype


@dataclasses.dataclass(eq=False)
class Split:
  """A part of an epoch's data."""

  index: int
  key: int  # Number of this reading of it, unique in the process.
  done: int = 0  # Elements that have been trained on.
  handle: tf.Tensor | None = (
    None  # Of the iterator on the worker that reads it.
  )


_keys = itertools.count(1)


class Batches:
  """An iterator over what steps are begun with, on the coordinator.

  `hides_rows` says whether steps must not know how many rows there are, as on
  one device: the data set does not tell.
  """

  def __init__(self, batches: Iterator[Any], element_spec: Any = None):
    self._batches = batches
    specs = tf.nest.flatten(element_spec)
    self.hides_rows = any(
      s.shape.rank is None or s.shape[:1].num_elements() is None
      for s in specs
      if isinstance(s, tf.TensorSpec)
    )

  def __iter__(self) -> Batches:
    return self

  def __next__(self) -> Any:
    if not tf.executing_eagerly():
      # The graph would have this one batch as a constant.
      raise _read_in_function('next(iterator)')
    return next(self._batches)


def _read_in_function(what):
  return errors.UnsupportedOptionError(
    f'{what} inside a tf.function of the coordinator',
    'batches that the coordinator reads outside of functions',
    'call strategy.remote_step(fn, optimizers)(batch) for each batch, or '
    'read inside of a function that '
    'tf.distribute.coordinator.ClusterCoordinator schedules, from '
    'create_per_worker_dataset',
  )


class _Dataset(_tf_internal.DistributedDataset):
  """A distributed data set that is no argument of a function."""

  def __tf_tracing_type__(self, context):
    raise _read_in_function('a distributed data set')


class Source:
  """One epoch of data: hands its splits to the workers.

  A restarted run continues at `start`. The steps of its epoch that are done are
  handed out once more, and dropped.
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
    self._splits_of: dict[int, list[Split]] = {}
    self._turn = itertools.count()
    self._opening = 0

  @property
  def is_exhausted(self) -> bool:
    """Whether every split has been read to its end."""
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
    """Whether a worker has anything to read, or nobody ever will."""
    with self._lock:
      if self._free or self._splits_of.get(worker):
        return True
      return self._is_empty()

  def _is_empty(self) -> bool:
    return not (self._free or self._opening or any(self._splits_of.values()))

  def split_for(
    self, worker: int, others: Iterable[int], token: int = 0
  ) -> Split | None:
    """What a worker reads next, opened if it has none; None if none is left.

    `token` is the worker's; one that gets another one has lost its splits.
    """
    with self._lock:
      mine = self._splits_of.setdefault(worker, [])
      others_need = any(not self._splits_of.get(w) for w in others)
      if len(mine) > 1 and others_need:
        # Taken over from a worker that was lost, and is back.
        self._free.append(mine.pop())
      is_needed = not mine or not others_need
      split = None
      if self._free and is_needed:
        # One that it has read before: it may have its arrays.
        split = min(self._free, key=lambda s: s.index != worker)
        self._free.remove(split)
      self._opening += split is not None
    if split is not None:
      self._open(split, worker, token)
    with self._lock:
      mine = self._splits_of.setdefault(worker, [])
      return mine[next(self._turn) % len(mine)] if mine else None

  def _open(self, split: Split, worker: int, token: int) -> None:
    """Opens a split; it is nobody's while this lasts."""
    is_open = False
    try:
      split.handle = self.dataset.open(split, worker, token)
      is_open = True
    finally:
      with self._lock:
        self._opening -= 1
        mine = self._splits_of.setdefault(worker, [])
        (mine if is_open else self._free).append(split)

  def close(self, worker: int, split: Split) -> None:
    """A split was read to its end."""
    with self._lock:
      self._splits_of[worker].remove(split)
      split.handle = None  # Lets the worker forget the iterator.

  def lose(self, worker: int) -> None:
    """Takes back the splits of a worker that was lost."""
    with self._lock:
      self._free += self._splits_of.pop(worker, [])


class WorkerDataset(_Dataset):
  """What `distribute_datasets_from_function` returns outside of functions.

  Iterating yields one structure of `WorkerTensor`s for each step.
  """

  # pylint: disable-next=super-init-not-called
  def __init__(
    self,
    dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
    num_splits: int,
    take_resumed: Callable[[], Resumed | None],
    stock: Callable[[], Any] | None = None,
  ):
    self.num_splits = num_splits
    self._stock = stock
    self._dataset_fn = dataset_fn
    self._take_resumed = take_resumed
    self._openers: dict[int, Any] = {}
    self._lock = threading.Lock()
    self._arrays = worker_arrays.Arrays()
    # Not those of now: they may be filled before they are read.
    with tf.device('/device:CPU:0'), worker_arrays.Arrays().captured():
      parts = [self._make(i) for i in range(num_splits)]
    self._element_spec = parts[0].element_spec
    self._layouts: dict[int, Layout] = {}
    sizes = [int(p.cardinality()) for p in parts]
    self._cardinality = sum(sizes) if min(sizes) >= 0 else min(sizes)

  @property
  def element_spec(self) -> Any:
    """Of one batch."""
    return self._element_spec

  def layout(self, steps: int) -> Layout:
    """Of so many steps in one call; one object, since its key costs time."""
    if steps not in self._layouts:
      self._layouts[steps] = Layout(self._element_spec, steps)
    return self._layouts[steps]

  def cardinality(self) -> int:
    """Number of batches; negative as `tf.data.Dataset.cardinality`."""
    return self._cardinality

  def __iter__(self) -> Iterator[Any]:
    return Batches(self._steps())

  def _steps(self) -> Iterator[Any]:
    source = None
    while True:
      resumed = self._take_resumed()
      if source is None or resumed is not None:
        source = Source(self, *(resumed or ())[:1])
        # One structure for all steps: Keras traces it as a constant.
        step = tf.nest.map_structure(
          lambda s, source=source: WorkerTensor(s, source),
          self.element_spec,
        )
      if not source.may_begin_step():
        return
      yield step

  def __call__(self) -> Any:
    """TensorFlow's own, which its `ClusterCoordinator` makes on each worker."""
    return self._stock()

  def _make(self, index: int) -> tf.data.Dataset:
    return self._dataset_fn(
      tf.distribute.InputContext(
        num_input_pipelines=self.num_splits,
        input_pipeline_id=index,
        num_replicas_in_sync=1,
      )
    )

  def open(self, split: Split, worker: int, token: int) -> tf.Tensor:
    """Begins to read a split on a worker; returns the iterator's handle."""
    opener, arrays = self._opener(split.index)
    arrays = self._arrays.on_worker(arrays, worker, token)
    with tf.device('/device:CPU:0'):
      key = tf.constant(split.key, tf.int64)
      done = tf.constant(split.done, tf.int64)
      token = tf.constant(token, tf.int64)
    with tf.device(f'/job:worker/replica:0/task:{worker}/device:CPU:0'):
      variant = opener(key, done, token, *arrays)
      handle = tf.raw_ops.AnonymousIteratorV3(**_numbered(self.element_spec))
      tf.raw_ops.MakeIterator(dataset=variant, iterator=handle)
    return handle

  def _opener(self, index: int):
    """A function that makes a split's data set where it is called; its arrays."""
    with self._lock:
      if index not in self._openers:

        def make(key, done, token):
          numbered = self._make(index).enumerate().skip(done)
          numbered = numbered.map(
            lambda i, batch: (
              key,
              token,
              i,
              *tf.nest.flatten(batch, expand_composites=True),
            ),
            num_parallel_calls=1,
          )
          numbered = _without_rewriting(numbered.prefetch(_PREFETCH))
          return tf.data.experimental.to_variant(numbered)

        scalar = tf.TensorSpec([], tf.int64)
        opener, arrays = self._arrays.function(make, [scalar] * 3)
        if any(t.dtype == tf.variant for t in opener.captured_inputs):
          raise errors.UnsupportedOptionError(
            'a data set that was made outside of the function given to '
            'distribute_datasets_from_function',
            'a function that makes the data set, since each worker makes its own',
            'move all of the input pipeline into the function',
          )
        self._openers[index] = opener, arrays
      return self._openers[index]


def _without_rewriting(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """The data set, whose graph tf.data leaves as it is, unless its user chose.

  To rewrite it, tf.data copies all of its constants, whenever a split is opened:
  the arrays of the user.
  """
  chosen = dataset.options().experimental_optimization
  if chosen.apply_default_optimizations is not None:
    return dataset
  options = tf.data.Options()
  options.experimental_optimization.apply_default_optimizations = False
  return dataset.with_options(options)


def _numbered(element_spec) -> dict[str, list]:
  """Of what an open split yields: key, token, the element's number, the batch."""
  specs = tf.nest.flatten(element_spec, expand_composites=True)
  return {
    'output_types': [*[tf.int64] * 3, *(s.dtype for s in specs)],
    'output_shapes': [[], [], [], *(s.shape for s in specs)],
  }


class Layout(batch_message.Layout):
  """Steps whose batches a worker reads from the iterator of a split."""

  kind = batch_message.SPLITS
  argument = tf.TensorSpec([], tf.resource)

  def first_step(self, argument: tf.Tensor) -> tf.Tensor:
    """The iterator is where the steps continue."""
    return tf.constant(0, tf.int64)

  def read(self, argument: tf.Tensor, step: tf.Tensor) -> batch_message.Reading:
    """The next batch, whatever the step; its split, and its number from 1."""
    key, token, index, *flat = tf.raw_ops.IteratorGetNext(
      iterator=argument, **_numbered(self.structure)
    )
    batch = batch_message.pack(self.structure, flat)
    return batch_message.Reading(batch, key, index + 1, token)


@dataclasses.dataclass(frozen=True)
class Elements:
  """Some steps on what the workers read from a source."""

  source: Source
  count: int

  def __len__(self) -> int:
    return self.count


def source_of(data: Any) -> Source | None:
  """The source of a batch that workers read; None for a batch of arrays."""
  first = next(iter(tf.nest.flatten(data)), None)
  return first.source if isinstance(first, WorkerTensor) else None


def steps_on(
  data: Sequence[Any], hides_rows: bool = False
) -> Elements | list[batch_message.Batch]:
  """What an engine begins steps with, from batches of a user's iterator."""
  source = source_of(data)
  if source is not None:
    return Elements(source, len(data))
  return [batch_message.Batch(batch, hides_rows) for batch in data]


class FedDataset(_Dataset):
  """A data set whose batches the coordinator reads and sends to workers."""

  # pylint: disable-next=super-init-not-called
  def __init__(
    self,
    dataset: tf.data.Dataset,
    stock: Callable[[tf.data.Dataset], Any],
    take_resumed: Callable[[], Resumed | None],
  ):
    if not isinstance(dataset, tf.data.Dataset):
      raise errors.UnsupportedOptionError(
        f'a {type(dataset).__name__} to distribute',
        'a tf.data.Dataset',
        'wrap a generator: tf.data.Dataset.from_generator',
      )
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
    # Opened now, as on one device: Keras asks for an iterator at the end of each
    # epoch and drops it, and a shuffle then goes on to its next order.
    resumed = self._take_resumed()
    if resumed is None:
      return Batches(iter(self.dataset), self.element_spec)
    # Of the epoch's steps, `fit` reads and drops those that are done.
    position, steps_per_epoch = resumed
    start = position_lib.Position(position.epoch)
    return Batches(
      start.iterate(self.dataset, steps_per_epoch), self.element_spec
    )

  def __call__(self) -> Any:
    """TensorFlow's own, which its `ClusterCoordinator` makes on each worker."""
    # A worker has not got the coordinator's data set, but can make one like it.
    with tf.init_scope():
      graph = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(self.dataset),
        strip_device_assignment=True,
      )
    # Not of a constant, which TensorFlow would make a data set of beforehand.
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph)
    return self._stock(
      tf.data.experimental.from_variant(variant, self.element_spec)
    )
