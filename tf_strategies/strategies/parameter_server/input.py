"""What feeds the steps: batches of the coordinator, or data that workers read.

Batches that the coordinator reads go to one step each, and to another worker if
the first is lost. Data that workers read is cut into splits: a data set
function is called for each. Either way each element counts once an epoch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal, errors, option_checks
from tf_strategies._tf_internal import cluster
from tf_strategies.checkpoint import position as position_lib
from tf_strategies.strategies.parameter_server import batch_message, splits

_PREFETCH = 2

# Where a restarted run continues in its data, and the steps of its epochs; None
# if an epoch is one pass.
Resumed = tuple[position_lib.Position, int | None]


@dataclasses.dataclass(eq=False)
class WorkerTensor:
  """Stands for a tensor that only a worker sees."""

  spec: tf.TypeSpec
  source: splits.Source

  @property
  def shape(self) -> tf.TensorShape:
    """Returns the shape of the tensor."""
    return self.spec.shape

  @property
  def dtype(self) -> tf.DType:
    """Returns the dtype of the tensor."""
    return self.spec.dtype


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
    f'{what} inside a tf.function',
    'batches that the coordinator reads outside of functions',
    'call strategy.step(fn, optimizers)(batch) for each batch, or '
    'read inside of a function that '
    'tf.distribute.coordinator.ClusterCoordinator schedules, from '
    'create_per_worker_dataset',
  )


class _Dataset(_tf_internal.DistributedDataset):
  """A distributed data set that is no argument of a function."""

  def __tf_tracing_type__(self, context):
    raise _read_in_function('a distributed data set')


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
    by_rounds: bool = False,
  ):
    self.num_splits = num_splits
    # Whether a step takes an element of each split, instead of one.
    self.by_rounds = by_rounds
    self._stock = stock
    self._dataset_fn = dataset_fn
    self._take_resumed = take_resumed
    self._openers: dict[int, Any] = {}
    self._lock = threading.Lock()
    self._arrays = WorkerArrays()
    # Not those of now: they may be filled before they are read.
    with tf.device('/device:CPU:0'), WorkerArrays().captured():
      parts = [self._make(i) for i in range(num_splits)]
    self._element_spec = parts[0].element_spec
    self.layout = ReadLayout(self._element_spec)
    self.sizes = [int(p.cardinality()) for p in parts]
    least = min(self.sizes)
    self._cardinality = self.steps_of(self.sizes) if least >= 0 else least

  @property
  def element_spec(self) -> Any:
    """Returns the specs of one batch."""
    return self._element_spec

  def cardinality(self) -> int:
    """Number of steps; negative as `tf.data.Dataset.cardinality`."""
    return self._cardinality

  def steps_of(self, elements: Sequence[int]) -> int:
    """Returns how many steps it takes to read so many elements of each split."""
    return (max if self.by_rounds else sum)(elements)

  def __iter__(self) -> Iterator[Any]:
    return Batches(self._steps())

  def _steps(self) -> Iterator[Any]:
    source = None
    while True:
      resumed = self._take_resumed()
      if source is None or resumed is not None:
        source = splits.Source(self, *(resumed or ())[:1])
        # One structure for all steps: Keras traces it as a constant.
        step = tf.nest.map_structure(
          lambda s, source=source: WorkerTensor(s, source),
          self.element_spec,
        )
      if not source.may_begin_step():
        return
      yield step

  def map(self, function: Callable[..., Any]) -> WorkerDataset:
    """Has the workers map their batches: how Keras weights classes."""
    return WorkerDataset(
      lambda context: self._dataset_fn(context).map(function),
      self.num_splits,
      self._take_resumed,
      by_rounds=self.by_rounds,
    )

  def prefetch(self, buffer_size: int) -> WorkerDataset:
    """Itself: what workers read is read ahead."""
    del buffer_size
    return self

  def __call__(self) -> Any:
    """TensorFlow's own, which its `ClusterCoordinator` makes on each worker."""
    return self._stock()

  def _make(self, index: int) -> tf.data.Dataset:
    return self._dataset_fn(
      tf.distribute.InputContext(
        num_input_pipelines=self.num_splits,
        input_pipeline_id=index,
        num_replicas_in_sync=self.num_splits if self.by_rounds else 1,
      )
    )

  def open(
    self, split: splits.DataSplit, start: int, worker: int, life: int
  ) -> tf.Tensor:
    """Begins to read a split on a worker; returns the iterator's handle.

    Its first element is number `start`.
    """
    opener, arrays = self._opener(split.index)
    copies = self._arrays.on_worker(arrays, worker, life)
    copy_of = dict(zip(map(id, arrays), copies, strict=True))
    with tf.device('/device:CPU:0'):
      first = tf.constant(start, tf.int64)
    with tf.device(device(worker)):
      variant = _tf_internal.call_with(opener, [first], copy_of)
      handle = tf.raw_ops.AnonymousIteratorV3(**_types(self.element_spec))
      tf.raw_ops.MakeIterator(dataset=variant, iterator=handle)
    return handle

  def skip(self, split: splits.DataSplit, worker: int, until: int) -> None:
    """Leaves out elements of a split that a worker reads."""
    with tf.device(device(worker)):
      while split.next < until:
        tf.raw_ops.IteratorGetNext(
          iterator=split.handle, **_types(self.element_spec)
        )
        split.next += 1

  def _opener(self, index: int):
    """A function that makes a split's data set where it is called; its arrays."""
    with self._lock:
      if index not in self._openers:

        def make(first):
          rest = (
            self._make(index)
            .skip(first)
            .map(
              lambda *batch: tuple(
                tf.nest.flatten(batch, expand_composites=True)
              ),
              num_parallel_calls=1,
            )
          )
          rest = _without_rewriting(rest.prefetch(_PREFETCH))
          return tf.data.experimental.to_variant(rest)

        opener, arrays = self._arrays.function(
          make, [tf.TensorSpec([], tf.int64)]
        )
        if any(t.dtype == tf.variant for t in opener.captured_inputs):
          raise errors.UnsupportedOptionError(
            'one that was made outside of it',
            'a data set that is made in the function given to '
            'distribute_datasets_from_function',
            'move all of the input pipeline into the function: each worker '
            'makes its own',
          )
        self._openers[index] = opener, arrays
      return self._openers[index]


def _without_rewriting(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """Turns off tf.data's graph rewriting, unless the user has chosen.

  The rewriting would copy all constants, such as the user's arrays, whenever a split is
  opened.
  """
  chosen = dataset.options().experimental_optimization
  if chosen.apply_default_optimizations is not None:
    return dataset
  options = tf.data.Options()
  options.experimental_optimization.apply_default_optimizations = False
  return dataset.with_options(options)


def _types(element_spec) -> dict[str, list]:
  """Returns types and shapes of the components of a split's elements."""
  specs = tf.nest.flatten(element_spec, expand_composites=True)
  return {
    'output_types': [s.dtype for s in specs],
    'output_shapes': [s.shape for s in specs],
  }


class ReadLayout(batch_message.BatchLayout):
  """Batches that a worker reads from the iterator of a split."""

  kind = 'read'
  argument = tf.TensorSpec([], tf.resource)

  def read(self, argument: tf.Tensor) -> Any:
    """Returns the next batch."""
    flat = tf.raw_ops.IteratorGetNext(
      iterator=argument, **_types(self.structure)
    )
    return batch_message.pack(self.structure, flat)


def source_of(data: Any) -> splits.Source | None:
  """The source of a batch that workers read; None for a batch of arrays."""
  first = next(iter(tf.nest.flatten(data)), None)
  return first.source if isinstance(first, WorkerTensor) else None


def steps_on(
  data: Sequence[Any], hides_rows: bool = False
) -> list[splits.Source | batch_message.Batch]:
  """Converts batches of a user's iterator for an engine."""
  return [
    source_of(batch) or batch_message.Batch(batch, hides_rows) for batch in data
  ]


class FedDataset(_Dataset):
  """A data set whose batches the coordinator reads and sends to workers."""

  # pylint: disable-next=super-init-not-called
  def __init__(
    self,
    dataset: tf.data.Dataset,
    stock: Callable[[tf.data.Dataset], Any],
    take_resumed: Callable[[], Resumed | None],
  ):
    option_checks.check(
      isinstance(dataset, tf.data.Dataset),
      f'a {type(dataset).__name__}',
      'a tf.data.Dataset',
      'wrap a generator: tf.data.Dataset.from_generator',
    )
    option_checks.check(
      cluster.is_reachable(dataset),
      'one that was made before this process was connected to the cluster',
      'a data set that was made after the strategy',
      'make the strategy first',
    )
    self.dataset = dataset
    self._stock = stock
    self._take_resumed = take_resumed

  @property
  def element_spec(self) -> Any:
    """Returns the specs of one batch."""
    return self.dataset.element_spec

  def cardinality(self) -> int:
    """Number of batches; negative as `tf.data.Dataset.cardinality`."""
    return int(self.dataset.cardinality())

  def __iter__(self) -> Iterator[Any]:
    # Opened now, as on one device: Keras asks for an iterator at the end of each
    # epoch and drops it, and a shuffle then goes on to its next order.
    resumed = self._take_resumed()
    if resumed is None:
      batches = iter(self.dataset)
    else:
      # Of the epoch's steps, `fit` reads and drops those that are done.
      position, steps_per_epoch = resumed
      start = position_lib.Position(position.epoch)
      batches = start.iterate(self.dataset, steps_per_epoch)
    return Batches(batches, self.element_spec)

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


_LARGE_BYTES = 1 << 16


def device(worker: int) -> str:
  """Returns the device on which a worker reads its data."""
  return f'/job:worker/replica:0/task:{worker}/device:CPU:0'


class WorkerArrays:
  """Copies the large arrays of a data set function to the workers that read them.

  An array that a traced function uses is a part of the function. TensorFlow sends
  functions to all tasks, and recreates their arrays for each worker that calls them.
  With 62 MB and four workers, the first epoch began half a minute late. Functions
  therefore capture large arrays, and each worker gets one copy.
  """

  def __init__(self):
    # Of arrays that are still there: the splits share most of them.
    self._tensors: list[tuple[weakref.ref, tf.DType, tf.Tensor]] = []
    # By worker and tensor, with the life of the worker that got it.
    self._copies: dict[tuple[int, int], tuple[int, tf.Tensor]] = {}

  @contextlib.contextmanager
  def captured(self) -> Iterator[list[tf.Tensor]]:
    """Makes graphs capture arrays; yields those that they used, in that order."""
    used = []

    def take(array, dtype):
      if array.nbytes < _LARGE_BYTES:
        return None
      used.append(self._tensor(array, dtype))
      return used[-1]

    with _tf_internal.arrays_from(take):
      yield used

  def function(
    self, make: Callable, specs: Sequence[tf.TensorSpec]
  ) -> tuple[Callable, list[tf.Tensor]]:
    """Returns a concrete function of `specs`, and the arrays that it captured."""
    with self.captured() as used:
      traced = tf.function(make, autograph=False)
      return traced.get_concrete_function(*specs), used

  def on_worker(
    self, tensors: Sequence[tf.Tensor], worker: int, life: int
  ) -> list[tf.Tensor]:
    """Copies on a worker; one that begins another life has lost them."""
    found = []
    for tensor in tensors:
      known, copy = self._copies.get((worker, id(tensor)), (None, None))
      if known != life:
        with tf.device(device(worker)):
          copy = tf.identity(tensor)
        self._copies[worker, id(tensor)] = life, copy
      found.append(copy)
    return found

  def _tensor(self, array: np.ndarray, dtype) -> tf.Tensor:
    dtype = tf.as_dtype(array.dtype if dtype is None else dtype)
    self._tensors = [t for t in self._tensors if t[0]() is not None]
    for known, of_dtype, tensor in self._tensors:
      if known() is array and of_dtype == dtype:
        return tensor
    with tf.init_scope(), tf.device('/device:CPU:0'):
      tensor = tf.constant(array, dtype)
    self._tensors.append((weakref.ref(array), dtype, tensor))
    return tensor
