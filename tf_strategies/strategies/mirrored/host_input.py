"""Batches for replicas that share the host's memory: split without copies.

TensorFlow passes batches to replicas through one prefetching iterator per
device. On logical CPUs this gains nothing, and deleting such an iterator waits
until its tuner wakes up. After a `fit`, this may take a minute. Here one
pipeline yields the parts of all replicas together.

On several workers, a batch also contains the number of rows of every replica in
the job. A worker sees only its own rows, but the weight of its loss depends on
all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal, errors, option_checks
from tf_strategies.monitoring import input_watch


class CountedBatch(_tf_internal.PerReplica):
  """One component of a batch, as one tensor for each local replica.

  `all_rows`, int32 [N], are the rows of every replica of every worker.

  With one local replica it can be used as a tensor, because TensorFlow's
  strategies yield a tensor there.
  """

  def __init__(self, values, all_rows):
    super().__init__(tuple(values))
    self.all_rows = all_rows

  def __getattr__(self, name):
    # Called for missing attributes, also while a copy has no `_values` yet.
    values = self.__dict__.get('_values', ())
    if len(values) != 1 or name.startswith('_'):
      raise AttributeError(
        f'{type(self).__name__} of {len(values)} replicas has no {name!r}: '
        'strategy.experimental_local_results(batch) returns their tensors'
      )
    return getattr(values[0], name)

  def __tf_tensor__(self, dtype=None, name=None):
    """Returns the tensor of the only local replica."""
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
    parts = *self.values, self.all_rows
    return _CountedBatchSpec(*map(tf.type_spec_from_value, parts))


def _as_operator(name):
  def call(self, *args):
    return getattr(tf.convert_to_tensor(self), name)(*args)

  call.__name__ = name
  return call


# Except equality, which is used to compare structures.
for _name in tf.Tensor.OVERLOADABLE_OPERATORS - {'__eq__', '__ne__'}:
  setattr(CountedBatch, _name, _as_operator(_name))


class _CountedBatchSpec(_tf_internal.PerReplicaSpec):
  """Type of a `CountedBatch`; TensorFlow's data sets and functions need it.

  The last of its parts are the rows.
  """

  __slots__ = ()

  value_type = property(lambda self: CountedBatch)

  def _to_components(self, value):
    return (*value.values, value.all_rows)

  def _from_components(self, components):
    *values, all_rows = components
    return CountedBatch(values, all_rows)


# These iterators raise if Python loops over them in a graph. While the graph is
# built, Python's `for` would draw batches without end. This happens in code
# that AutoGraph does not convert (`enumerate`, `zip`, a comprehension,
# `autograph=False`).


class LoopError(errors.UnsupportedOptionError, NotImplementedError):
  """A Python loop over a distributed iterator while a graph is built.

  It is also a `NotImplementedError`, which TensorFlow's strategies raise.
  """


class HostIterator(_tf_internal.OwnedIterator):
  """A `tf.data.Iterator` that raises where a Python loop would not end."""

  def __iter__(self):
    if not tf.executing_eagerly():
      raise LoopError(
        "a loop of Python's (enumerate, zip, a comprehension, or any with "
        'autograph=False) over a distributed iterator inside of a tf.function',
        'a `for` that AutoGraph converts, or next(iterator)',
        'write `for batch in iterator:` and keep a counter of your own, or loop '
        'outside of the tf.function',
      )
    return super().__iter__()

  def __next__(self):
    if (
      tf.distribute.has_strategy()
      and not tf.distribute.in_cross_replica_context()
    ):
      # Each replica would draw a batch from all of them.
      raise errors.UnsupportedOptionError(
        'a call inside of a replica',
        'next(iterator) of a distributed iterator outside of strategy.run',
        'write strategy.run(step, args=(next(iterator),))',
      )
    return super().__next__()

  @property
  def _type_spec(self):
    return _HostIteratorSpec(self.element_spec)


class _HostIteratorSpec(tf.data.IteratorSpec):
  """Type of a `HostIterator`, which keeps its type as an argument of a function."""

  __slots__ = ()

  value_type = property(lambda self: HostIterator)

  def _from_components(self, components):
    return HostIterator(components=components, element_spec=self._element_spec)


class HostDataset(_tf_internal.UnaryUnchangedStructureDataset):
  """`dataset`, with iterators that are `HostIterator`s, and whose waits are recorded."""

  def __init__(self, dataset: tf.data.Dataset):
    dataset = input_watch.watch(dataset)
    super().__init__(dataset, dataset._variant_tensor)  # pylint: disable=protected-access

  def __iter__(self):
    iterator = super().__iter__()
    # TensorFlow creates the iterator and offers no other way to choose its
    # class.
    iterator.__class__ = HostIterator
    return iterator


def distribute(dataset: tf.data.Dataset, num_replicas: int) -> tf.data.Dataset:
  """Returns a data set of distributed values, made from global batches; see `split`."""
  if is_distributed(dataset):
    return dataset

  def split_batch(*batch):
    parts = split(unwrap(dataset, batch), num_replicas, range(num_replicas))
    return per_replica(parts)

  return HostDataset(dataset.map(split_batch).prefetch(1))


def unwrap(dataset: tf.data.Dataset, batch: tuple):
  """Returns the element of a data set, given the arguments of its functions."""
  return batch if type(dataset.element_spec) is tuple else batch[0]


def split(batch, num_parts: int, parts: Iterable[int]) -> tuple:
  """Cuts a batch evenly by its rows, and returns the parts with the numbers
  `parts`.

  Of n rows, the first n % num_parts parts get one more than the others. If
  there are fewer rows than parts, the last parts get none. Static sizes stay
  static.

  Raises:
    UnsupportedOptionError: if a component has no batch dimension.
  """
  return tuple(
    tf.nest.map_structure(
      lambda x, p=part: None if x is None else _part(x, num_parts, p), batch
    )
    for part in parts
  )


def per_replica(parts, all_rows: tf.Tensor | None = None):
  """Makes distributed values from one structure of tensors per local replica.

  With `all_rows` these are counted batches.
  """

  def make(*values):
    if values[0] is None:
      return None
    if all_rows is None:
      return _tf_internal.PerReplica(values)
    return CountedBatch(values, all_rows)

  return tf.nest.map_structure(make, *parts)


def check_dataset(dataset: object) -> None:
  """Raises UnsupportedOptionError unless a value is a `tf.data.Dataset`."""
  option_checks.check_type(
    'data',
    dataset,
    tf.data.Dataset,
    'a tf.data.Dataset',
    'wrap a generator: tf.data.Dataset.from_generator',
  )


def is_distributed(dataset: tf.data.Dataset) -> bool:
  """Returns whether the elements of `dataset` are distributed values already."""
  return any(
    issubclass(spec.value_type, tf.distribute.DistributedValues)
    for spec in tf.nest.flatten(dataset.element_spec)
  )


def _part(value, num_parts: int, part: int):
  """Returns the rows of one component that belong to one part."""
  if value.shape.rank == 0:
    raise errors.UnsupportedOptionError(
      'a data set whose elements have scalar components',
      'components with a leading batch dimension',
      'call dataset.batch(global_batch_size)',
    )
  return _rows(value, *share(num_rows(value), part, num_parts))


def share(total, place, places):
  """Returns the start and the length of a share. The first shares may be longer.

  The result is a number if all arguments are.
  """
  shortest, left_over = total // places, total % places
  length = (total + places - 1 - place) // places
  # The shares before a longer one are as long, and of those before a short one some
  # are longer by one: all that are left over.
  return place * length + left_over * (1 + shortest - length), length


def _rows(value, start, size):
  if not isinstance(value, tf.SparseTensor):
    # TensorFlow protects a generator's array from ops that work in place, but
    # not a slice that shares its memory. Such an op would write to the array.
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


def first_batch(args: Any) -> tf.distribute.DistributedValues | None:
  """Returns the first distributed batch whose components have rows."""
  for leaf in tf.nest.flatten(args):
    if (
      isinstance(leaf, tf.distribute.DistributedValues)
      and not isinstance(leaf, tf.Variable)
      and all(hasattr(v, 'shape') and v.shape.rank != 0 for v in leaf.values)
    ):
      return leaf
  return None


def num_rows(tensor):
  """Returns the leading dimension of a dense, ragged or sparse tensor: int or int32."""
  if tensor.shape.rank and tensor.shape[0] is not None:
    return int(tensor.shape[0])
  return tf.shape(tensor)[0]


def counts_of(batch: tf.distribute.DistributedValues) -> tf.Tensor:
  """Returns the numbers of rows of the replicas' parts of a batch, int32 [N]."""
  with tf.device('CPU:0'):
    return tf.stack(list(map(num_rows, batch.values)))


def one_row_if_empty(tensor):
  """Returns the tensor, or one row of zeros if it has no rows."""

  def one_row():
    return tf.zeros(tf.concat([[1], tf.shape(tensor)[1:]], 0), tensor.dtype)

  rows = num_rows(tensor)
  if isinstance(rows, int):
    return tensor if rows else one_row()
  filled = tf.cond(rows > 0, lambda: tensor, one_row)
  if tensor.shape.rank:
    filled.set_shape([None, *tensor.shape[1:]])
  return filled
