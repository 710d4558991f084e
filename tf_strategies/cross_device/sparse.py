"""`tf.IndexedSlices` across devices: gathered, never summed by index.

The gradient of an embedding is a list of (row, value) pairs in which a row may
stand several times. The all-reduce of N replicas' lists is their concatenation:
the optimizer (and gradient clipping, which looks at the values) then sees the
pairs that one device would have seen.
"""

from collections.abc import Sequence

import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.cross_device import executor


def is_sparse(value) -> bool:
  """Whether the components of a distributed value are `tf.IndexedSlices`."""
  return isinstance(value.values[0], tf.IndexedSlices)


def densify_if_mixed(value):
  """Returns `value`, dense if only some replicas have slices.

  For instance when a variable is used densely in one branch only.
  """
  kinds = {isinstance(v, tf.IndexedSlices) for v in value.values}
  if len(kinds) == 1:
    return value
  dense = []
  for v in value.values:
    with tf.device(v.device):
      dense.append(tf.convert_to_tensor(v))
  return _tf_internal.PerReplica(dense)


def divide(slices: tf.IndexedSlices, count: int) -> tf.IndexedSlices:
  """Returns the slices with their values divided by `count`."""
  with tf.device(slices.values.device):
    values = executor.divide(slices.values, count)
  return tf.IndexedSlices(values, slices.indices, slices.dense_shape)


def concat(slices: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
  """Returns all replicas' rows as one `tf.IndexedSlices`, on this device."""
  dense_shape = slices[0].dense_shape
  return tf.IndexedSlices(
    tf.concat([s.values for s in slices], 0),
    tf.concat([s.indices for s in slices], 0),
    None if dense_shape is None else tf.identity(dense_shape),
  )
