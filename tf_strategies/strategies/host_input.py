"""Batches for replicas that share the host's memory: split, not copied.

TensorFlow hands batches to replicas through one prefetching iterator a device.
On logical CPUs that gains nothing, and deleting such an iterator waits until
its tuner wakes up, which after a `fit` may take a minute. Here one pipeline
yields the parts of all replicas together.
"""

from __future__ import annotations

import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.strategies import replica_run


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

  def split(*batch):
    parts = tf.nest.map_structure(lambda x: _split(x, num_replicas), batch)
    return parts if len(parts) > 1 else parts[0]

  return dataset.map(split).prefetch(1)


def is_distributed(dataset: tf.data.Dataset) -> bool:
  """Whether the elements of `dataset` are distributed values already."""
  return any(
    spec.value_type is _tf_internal.PerReplica
    for spec in tf.nest.flatten(dataset.element_spec)
  )


def _split(value, num_replicas: int):
  """One component's rows, shared out to the replicas in order."""
  if value.shape.rank == 0:
    raise errors.UnsupportedOptionError(
      'a data set whose elements have scalar components',
      'components with a leading batch dimension',
      'call dataset.batch(global_batch_size)',
    )
  rows = replica_run.num_rows(value)
  parts = []
  for replica in range(num_replicas):
    # The first rows % num_replicas replicas get the rows that are left over.
    size = (rows + num_replicas - 1 - replica) // num_replicas
    start = parts[-1][1] if parts else 0
    parts.append((start, start + size))
  return _tf_internal.PerReplica(
    [_rows(value, start, stop - start) for start, stop in parts]
  )


def _rows(value, start, size):
  if not isinstance(value, tf.SparseTensor):
    return value[start : start + size]
  shape = tf.concat([[tf.cast(size, tf.int64)], value.dense_shape[1:]], 0)
  begin = tf.concat(
    [[tf.cast(start, tf.int64)], tf.zeros_like(value.dense_shape[1:])], 0
  )
  return tf.sparse.slice(value, begin, shape)
