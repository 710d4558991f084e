"""Batches for replicas that share the host's memory: split, not copied.

TensorFlow hands batches to replicas through one prefetching iterator a device.
On logical CPUs that gains nothing, and deleting such an iterator waits until
its tuner wakes up, which after a `fit` may take a minute. Here one pipeline
yields the parts of all replicas together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.monitoring import input_watch
from tf_strategies.strategies.mirrored import replica_run


def distribute(dataset: tf.data.Dataset, num_replicas: int) -> tf.data.Dataset:
  """Returns a data set of distributed values, split evenly by rows.

  Args:
    dataset: of global batches; every component has a leading batch dimension.
    num_replicas: into how many parts each batch is split.

  Returns:
    A data set in whose elements each component is a `PerReplica`. Of n rows,
    the first n % num_replicas replicas get one more than the others; with fewer
    rows than replicas the last replicas get none. Static batch sizes stay
    static.

  Raises:
    UnsupportedOptionError: a component without a batch dimension.
  """
  if is_distributed(dataset):
    return dataset

  def split_batch(*batch):
    batch = batch if len(batch) > 1 else batch[0]
    return regroup(split(batch, num_replicas, range(num_replicas)))

  return input_watch.watch(dataset.map(split_batch).prefetch(1))


def split(batch, num_parts: int, parts: Iterable[int]) -> tuple:
  """Cuts a batch into even parts of its rows.

  Args:
    batch: a structure of tensors, each with a leading batch dimension.
    num_parts: how many parts there are; the first n % num_parts of them get one
      row more than the others.
    parts: the numbers of those that are wanted.

  Returns:
    One structure for each of `parts`.

  Raises:
    UnsupportedOptionError: a component without a batch dimension.
  """
  return tuple(
    tf.nest.map_structure(lambda x, p=part: _part(x, num_parts, p), batch)
    for part in parts
  )


def regroup(batches: Sequence):
  """Makes one structure of distributed values of one structure a replica."""
  return tf.nest.map_structure(
    lambda *values: _tf_internal.PerReplica(values), *batches
  )


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
  # The first rows % num_parts parts get the rows that are left over.
  size, left_over = rows // num_parts, rows % num_parts
  if isinstance(rows, int):
    start = part * size + min(part, left_over)
    return _rows(value, start, size + (part < left_over))
  start = part * size + tf.minimum(part, left_over)
  return _rows(value, start, size + tf.cast(part < left_over, size.dtype))


def part_sizes(rows, num_parts: int) -> tf.Tensor:
  """How many of `rows` rows each part of `split` gets, int32 [num_parts]."""
  rows = tf.cast(rows, tf.int32)
  extra = tf.cast(tf.range(num_parts) < rows % num_parts, tf.int32)
  return rows // num_parts + extra


def _rows(value, start, size):
  if not isinstance(value, tf.SparseTensor):
    return value[start : start + size]
  shape = tf.concat([[tf.cast(size, tf.int64)], value.dense_shape[1:]], 0)
  begin = tf.concat(
    [[tf.cast(start, tf.int64)], tf.zeros_like(value.dense_shape[1:])], 0
  )
  return tf.sparse.slice(value, begin, shape)
