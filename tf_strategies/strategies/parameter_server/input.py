"""What feeds the steps: batches of the chief, or data that workers read.

Batches that the chief reads go to one step each, and to another worker if
the first is lost. Data that workers read is cut into splits: a data set
function is called for each. Either way each element counts once an epoch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal, errors, option_checks
from tf_strategies._tf_internal import cluster
from tf_strategies.checkpoint import position as position_lib
from tf_strategies.strategies.mirrored import host_input
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


class Batches(Iterator):
  """An iterator over what steps are begun with, on the chief.

  `hides_rows` says whether steps must not know how many rows there are, as on
  one device: the data set does not tell.
  """

  def __init__(self, batches: Iterator[Any], element_spec: Any = None):
    self._batches = batches
    specs = tf.nest.flatten(element_spec)
    self.hides_rows = any(
      s.shape[:1].num_elements() is None
      for s in specs
      if isinstance(s, tf.TensorSpec)
    )

  def __next__(self) -> Any:
    if not tf.executing_eagerly():
      # The graph would have this one batch as a constant.
      raise _read_in_function('next(iterator)')
    return next(self._batches)


def _read_in_function(what):
  return errors.UnsupportedOptionError(
    f'{what} inside a tf.function',
    'batches that the chief reads outside of functions',
    'call strategy.step(fn, optimizers)(batch) for each batch, or '
    'read inside of a function that '
    'tf.distribute.coordinator.ClusterCoordinator schedules, from '
    'create_per_worker_dataset',
  )


class _Dataset(_tf_internal.DistributedDataset):
  """A distributed data set that is no argument of a function."""

  element_spec: Any = None  # The specs of one batch.

  def __tf_tracing_type__(self, context):
    raise _read_in_function('a distributed data set')


class WorkerDataset(_Dataset):
  """What `distribute_datasets_from_function` returns outside of functions.

  The chief makes the data set of each split, and sends it as a graph with its arrays.
  Iterating yields one structure of `WorkerTensor`s for each step.
  """

  # pylint: disable-next=super-init-not-called
  def __init__(
    self,
    dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
    num_splits: int,
    take_resumed: Callable[[], Resumed | None],
    by_rounds: bool = False,
  ):
    self.num_splits = num_splits
    # Whether a step takes an element of each split, instead of one.
    self.by_rounds = by_rounds
    self._dataset_fn = dataset_fn
    self._take_resumed = take_resumed
    with tf.device('/device:CPU:0'):
      parts = [_reachable(self._make(i)) for i in range(num_splits)]
      self._graphs = [_graph_of(_flat(part)) for part in parts]
    self.element_spec = parts[0].element_spec
    self.layout = ReadLayout(self.element_spec)
    self.sizes = [int(p.cardinality()) for p in parts]

  def cardinality(self) -> int:
    """Number of steps; negative as `tf.data.Dataset.cardinality`."""
    least = min(self.sizes)
    return self.steps_of(self.sizes) if least >= 0 else least

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
    """Returns what TensorFlow's `ClusterCoordinator` makes on each worker."""
    return self._dataset_fn(tf.distribute.InputContext())

  def _make(self, index: int) -> tf.data.Dataset:
    return self._dataset_fn(
      tf.distribute.InputContext(
        num_input_pipelines=self.num_splits,
        input_pipeline_id=index,
        num_replicas_in_sync=self.num_splits if self.by_rounds else 1,
      )
    )

  def open(self, index: int, start: int, worker: int) -> tf.Tensor:
    """Begins to read a split on a worker; returns the iterator's handle.

    Its first element is number `start`.
    """
    types = _types(self.element_spec)
    [first] = _tf_internal.on_host(np.int64(start))
    with tf.device(device(worker)):
      variant = tf.raw_ops.DatasetFromGraph(graph_def=self._graphs[index])
      variant = tf.raw_ops.SkipDataset(
        input_dataset=variant, count=first, **types
      )
      handle = tf.raw_ops.AnonymousIteratorV3(**types)
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


def _reachable(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """Returns a data set, unless this process cannot use it any more."""
  option_checks.check(
    cluster.is_reachable(dataset),
    'one that was made before this process was connected to the cluster',
    'a data set that was made after the strategy',
    'make the strategy first',
  )
  return dataset


def _flat(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """Returns a data set whose elements are the components of batches, read ahead."""
  flat = dataset.map(
    lambda *batch: tuple(tf.nest.flatten(batch, expand_composites=True)),
    num_parallel_calls=1,
  )
  return _without_rewriting(flat.prefetch(_PREFETCH))


def _graph_of(dataset: tf.data.Dataset) -> tf.Tensor:
  """Returns a data set as a message from which any task can make it."""
  graph = tf.raw_ops.DatasetToGraphV2(
    input_dataset=tf.data.experimental.to_variant(dataset),
    strip_device_assignment=True,
  )
  option_checks.check(
    tf.strings.length(graph),  # TensorFlow makes no message that is too large.
    'one with arrays of 2 GB or more',
    'a data set that fits one message',
    'read the arrays from files, in the data set',
  )
  return graph


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

  argument = tf.TensorSpec([], tf.resource)

  def read(self, argument: tf.Tensor) -> Any:
    """Returns the next batch."""
    flat = tf.raw_ops.IteratorGetNext(
      iterator=argument, **_types(self.structure)
    )
    return batch_message.pack(self.structure, flat)


def steps_on(
  batches: Iterable[Any], hides_rows: bool = False
) -> list[splits.Source | batch_message.Batch]:
  """Converts batches of a user's iterator for an engine."""
  found = []
  for batch in batches:
    first = next(iter(tf.nest.flatten(batch)), None)
    is_read = isinstance(first, WorkerTensor)
    found.append(
      first.source if is_read else batch_message.Batch(batch, hides_rows)
    )
  return found


class FedDataset(_Dataset):
  """A data set whose batches the chief reads and sends to workers."""

  # pylint: disable-next=super-init-not-called
  def __init__(
    self,
    dataset: tf.data.Dataset,
    take_resumed: Callable[[], Resumed | None],
  ):
    host_input.check_dataset(dataset)
    self.dataset = _reachable(dataset)
    self.element_spec = dataset.element_spec
    self._take_resumed = take_resumed

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
    """Returns what TensorFlow's `ClusterCoordinator` makes on each worker."""
    # A worker has not got the chief's data set, but can make one like it.
    with tf.init_scope():
      graph = _graph_of(self.dataset)
    # Not of a constant, which TensorFlow would make a data set of beforehand.
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph)
    return tf.data.experimental.from_variant(variant, self.element_spec)


def device(worker: int) -> str:
  """Returns the device on which a worker reads its data."""
  return f'/job:worker/replica:0/task:{worker}/device:CPU:0'
