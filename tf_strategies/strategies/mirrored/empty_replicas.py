"""Replicas without rows run on a padding row and contribute nothing.

The last batch of an epoch may have fewer rows than there are replicas. On zero
rows, BatchNormalization computes 0/0, and oneDNN's max-pooling gradient aborts
the process. A replica without rows therefore computes on one row of zeros, and
its contributions are excluded: its values in reductions, its metric updates and
its outputs.
"""

from __future__ import annotations

import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.spmd import site as site_lib
from tf_strategies.strategies.mirrored import replica_run


def fill(run: replica_run.ReplicaRun, args):
  """Returns `args` with one row of zeros for each replica without rows.

  Batches that contain ragged or sparse components do not change, because their
  components must keep the same rows.
  """
  if run.sites is None or any(map(_is_composite, tf.nest.flatten(args))):
    return args

  def fill_value(value):
    if not _is_batched(value, len(run.sites)):
      return value
    return _map(lambda _, tensor: one_row_if_empty(tensor), run, value)

  return tf.nest.map_structure(fill_value, args)


def trim(run: replica_run.ReplicaRun, outputs):
  """Returns `outputs` without the results of replicas without rows.

  Batched tensors (their leading dimension is unknown in a graph, one in eager
  mode) lose their padding row. All other values become zero.
  """
  if run.sites is None:
    return outputs

  def trim_tensor(site, tensor):
    if not isinstance(tensor, tf.Tensor):
      return tensor
    if tensor.shape.rank and tensor.shape[0] in (None, 1):
      return without_rows(site, tensor)
    return site.contributions([tensor])[0]

  def trim_value(value):
    if isinstance(value, _tf_internal.PerReplica):
      return _map(trim_tensor, run, value)
    if len(run.sites) == 1:
      return trim_tensor(run.sites[0], value)
    return value

  return tf.nest.map_structure(trim_value, outputs)


def mask(run: replica_run.ReplicaRun, values):
  """Returns values to which replicas without rows contribute nothing."""
  masked = list(values)
  maskable = [
    i for i, v in enumerate(values) if isinstance(v, _tf_internal.PerReplica)
  ]
  columns = [
    contributions(site, [values[i].values[replica] for i in maskable])
    for replica, site in enumerate(run.sites)
  ]
  for i, *parts in zip(maskable, *columns, strict=True):
    masked[i] = _tf_internal.PerReplica(parts)
  return masked


def contributions(site: site_lib.Site, tensors):
  """Returns one replica's tensors, or zeros and empty slices if it has no rows."""
  dense = site.contributions([t for t in tensors if isinstance(t, tf.Tensor)])
  dense = iter(dense)
  return [
    next(dense)
    if isinstance(t, tf.Tensor)
    else tf.IndexedSlices(
      without_rows(site, t.values), without_rows(site, t.indices), t.dense_shape
    )
    for t in tensors
  ]


def without_rows(site: site_lib.Site, tensor: tf.Tensor, axis: int = 0):
  """Returns a tensor, of length zero along `axis` if the replica has no rows."""
  with tf.device(site.device):
    kept = site.if_real(
      lambda: tf.identity(tensor),
      lambda: tf.gather(tensor, tf.constant([], tf.int32), axis=axis),
    )
  if site.rows.real is not None and tensor.shape.rank is not None:
    shape = tensor.shape.as_list()
    shape[axis] = None
    kept.set_shape(shape)
  return kept


def divide(value, count: tf.Tensor):
  """Returns a tensor or mirrored value divided by `count`, in its dtype."""
  if not isinstance(value, tf.distribute.DistributedValues):
    return value / tf.cast(count, value.dtype)
  divided = []
  for tensor in value.values:
    with tf.device(tensor.device):
      divided.append(divide(tensor, count))
  return _tf_internal.Mirrored(divided)


def _map(fn, run, value):
  """Maps each replica's site and tensor, on its device."""
  mapped = []
  for site, tensor in zip(run.sites, value.values, strict=True):
    with tf.device(site.device):
      mapped.append(fn(site, tensor))
  return _tf_internal.PerReplica(mapped)


def _is_composite(value) -> bool:
  return isinstance(value, _tf_internal.PerReplica) and isinstance(
    value.values[0], tf.RaggedTensor | tf.SparseTensor
  )


def _is_batched(value, num_replicas) -> bool:
  """Returns whether `value` is one dense batch per replica that may have no rows."""
  if not isinstance(value, _tf_internal.PerReplica):
    return False
  tensors = value.values
  return len(tensors) == num_replicas and all(
    isinstance(t, tf.Tensor)
    and t.shape.rank != 0
    and t.dtype not in (tf.variant, tf.resource)
    for t in tensors
  )


def one_row_if_empty(tensor):
  """Returns the tensor, or one row of zeros if it has no rows."""

  def one_row():
    return tf.zeros(tf.concat([[1], tf.shape(tensor)[1:]], 0), tensor.dtype)

  shape = tensor.shape
  if shape.rank and shape[0] is not None:
    return tensor if shape[0] > 0 else one_row()
  filled = tf.cond(tf.shape(tensor)[0] > 0, lambda: tensor, one_row)
  if shape.rank:
    filled.set_shape(tf.TensorShape([None]).concatenate(shape[1:]))
  return filled
