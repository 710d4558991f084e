"""Batches for replicas that share the host's memory: split, not copied.

TensorFlow hands batches to replicas through one prefetching iterator a device.
On logical CPUs that gains nothing, and deleting such an iterator waits until
its tuner wakes up, which after a `fit` may take a minute. Here one pipeline
yields the parts of all replicas together.

On several workers a batch also carries how many rows every replica of the job
has: a worker sees its own rows only, but the weight of its loss depends on all.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.monitoring import input_watch
from tf_strategies.strategies.mirrored import host_iterator, replica_run


class CountedBatch(_tf_internal.PerReplica):
  """One component of a batch, a tensor a local replica.

  `all_rows`, int32 [N], are the rows of every replica of every worker.

  With one local replica, for which TensorFlow's strategies yield a tensor, it can
  be used as one.
  """

  def __init__(self, values, all_rows):
    super().__init__(tuple(values))
    self.all_rows = all_rows

  def __getattr__(self, name):
    # Asked for what this class lacks; copies are looked at before they are made.
    values = self.__dict__.get('_values', ())
    if len(values) != 1 or name.startswith('_'):
      raise AttributeError(
        f'{type(self).__name__} of {len(values)} replicas has no {name!r}: '
        'strategy.experimental_local_results(batch) returns their tensors'
      )
    return getattr(values[0], name)

  def __tf_tensor__(self, dtype=None, name=None):
    """The tensor of the only local replica."""
    if len(self.values) != 1:
      raise TypeError(
        f'a batch of {len(self.values)} replicas is not one tensor: '
        'strategy.experimental_local_results(batch) returns theirs'
      )
    return tf.convert_to_tensor(self.values[0], dtype, name=name)

  def __array__(self, dtype=None, copy=None):
    del copy
    return np.asarray(tf.convert_to_tensor(self), dtype)

  @property
  def _type_spec(self):
    return _CountedBatchSpec(
      [tf.type_spec_from_value(v) for v in self.values],
      tf.type_spec_from_value(self.all_rows),
    )


def _as_operator(name):
  def call(self, *args):
    return getattr(tf.convert_to_tensor(self), name)(*args)

  call.__name__ = name
  return call


# Not equality, by which structures are compared.
for _name in tf.Tensor.OVERLOADABLE_OPERATORS - {'__eq__', '__ne__'}:
  setattr(CountedBatch, _name, _as_operator(_name))


class _CountedBatchSpec(tf.TypeSpec):
  """Type of a `CountedBatch`; TensorFlow's data sets and functions need it."""

  __slots__ = ('_rows_spec', '_value_specs')

  value_type = property(lambda self: CountedBatch)

  def __init__(self, value_specs, rows_spec):
    self._value_specs = tuple(value_specs)
    self._rows_spec = rows_spec

  def _serialize(self):
    return self._value_specs, self._rows_spec

  @property
  def _component_specs(self):
    return (*self._value_specs, self._rows_spec)

  def _to_components(self, value):
    return (*value.values, value.all_rows)

  def _from_components(self, components):
    *values, all_rows = components
    return CountedBatch(values, all_rows)


def distribute(dataset: tf.data.Dataset, num_replicas: int) -> tf.data.Dataset:
  """A data set of distributed values of one of global batches; see `split`."""
  if is_distributed(dataset):
    return dataset

  def split_batch(*batch):
    parts = split(unwrap(dataset, batch), num_replicas, range(num_replicas))
    return per_replica(parts)

  distributed = input_watch.watch(dataset.map(split_batch).prefetch(1))
  return host_iterator.HostDataset(distributed)


def of_any_length(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """The same batches, of which no graph knows the number of rows before it runs.

  What TensorFlow knows of a shape may change how it rounds.
  """

  def forget(value):
    if not isinstance(value, tf.Tensor) or not value.shape.rank:
      return value
    shape = [None, *value.shape[1:]]
    return tf.compat.v1.placeholder_with_default(value, shape)

  def forget_all(*batch):
    return tf.nest.map_structure(forget, unwrap(dataset, batch))

  return dataset.map(forget_all)


def unwrap(dataset: tf.data.Dataset, batch: tuple):
  """What a data set yields, of the arguments that its functions get."""
  return batch if type(dataset.element_spec) is tuple else batch[0]


def split(batch, num_parts: int, parts: Iterable[int]) -> tuple:
  """Cuts a batch evenly by its rows, and returns those of `parts`.

  Of n rows, the first n % num_parts parts get one more than the others; with
  fewer rows than parts the last get none. Static sizes stay static.

  Raises:
    UnsupportedOptionError: a component without a batch dimension.
  """
  return tuple(
    tf.nest.map_structure(
      lambda x, p=part: None if x is None else _part(x, num_parts, p), batch
    )
    for part in parts
  )


def per_replica(parts):
  """Makes distributed values of one structure of tensors a replica."""
  return tf.nest.map_structure(
    lambda *values: (
      None if values[0] is None else _tf_internal.PerReplica(values)
    ),
    *parts,
  )


def is_plain(batch) -> bool:
  """Whether that is one batch of arrays for all replicas, and can be split.

  Keras's `train_on_batch`, `test_on_batch` and `predict_on_batch` pass such.
  """
  leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
  return bool(leaves) and all(
    not isinstance(leaf, tf.distribute.DistributedValues)
    and len(getattr(leaf, 'shape', ())) > 0
    for leaf in leaves
  )


def part_sizes(rows, num_parts: int) -> tf.Tensor:
  """How many of `rows` rows each part of `split` gets, int32 [num_parts]."""
  rows = tf.cast(rows, tf.int32)
  extra = tf.cast(tf.range(num_parts) < rows % num_parts, tf.int32)
  return rows // num_parts + extra


def with_rows(batches, all_rows):
  """Makes counted batches of one structure of tensors a local replica."""
  return tf.nest.map_structure(
    lambda *values: (
      None if values[0] is None else CountedBatch(values, all_rows)
    ),
    *batches,
  )


def is_counted(structure) -> bool:
  """Whether `structure` is what an input pipeline of workers yields."""
  leaves = tf.nest.flatten(structure)
  return bool(leaves) and all(isinstance(v, CountedBatch) for v in leaves)


def is_distributed(dataset: tf.data.Dataset) -> bool:
  """Whether the elements of `dataset` are distributed values already."""
  return any(
    issubclass(spec.value_type, tf.distribute.DistributedValues)
    for spec in tf.nest.flatten(dataset.element_spec)
  )


def _part(value, num_parts: int, part: int):
  """One component's rows that belong to one part."""
  if value.shape.rank == 0:
    raise errors.UnsupportedOptionError(
      'a data set whose elements have scalar components',
      'components with a leading batch dimension',
      'call dataset.batch(global_batch_size)',
    )
  rows = replica_run.num_rows(value)
  size, left_over = rows // num_parts, rows % num_parts
  if isinstance(rows, int):
    start = part * size + min(part, left_over)
    return _rows(value, start, size + (part < left_over))
  start = part * size + tf.minimum(part, left_over)
  return _rows(value, start, size + tf.cast(part < left_over, size.dtype))


def _rows(value, start, size):
  if not isinstance(value, tf.SparseTensor):
    # TensorFlow protects an array of a generator's from ops that work in place,
    # but not a slice that shares its memory: such an op would write into it.
    return tf.nest.map_structure(
      lambda part: tf.raw_ops.DeepCopy(x=part),
      value[start : start + size],
      expand_composites=True,
    )
  shape = tf.concat([[tf.cast(size, tf.int64)], value.dense_shape[1:]], 0)
  begin = tf.concat(
    [[tf.cast(start, tf.int64)], tf.zeros_like(value.dense_shape[1:])], 0
  )
  return tf.sparse.slice(value, begin, shape)
