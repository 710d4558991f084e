"""Replicas without rows: they run on a stand-in row and contribute nothing.

The last batch of an epoch may have fewer rows than there are replicas. On zero
rows BatchNormalization computes 0/0, and oneDNN's max-pooling gradient aborts
the process. So a replica without rows computes on one row of zeros, and
everything that it would contribute is left out: its values in reductions, its
metric updates, its outputs.
"""

from __future__ import annotations

import functools

import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.strategies.mirrored import replica_run


def fill(run: replica_run.ReplicaRun, args, devices):
  """Returns `args` with one row of zeros wherever a replica has no rows.

  Ragged and sparse batches stay as they are, and the dense ones beside them
  with them: rows must go together.
  """
  if run.has_rows is None or any(map(_is_composite, tf.nest.flatten(args))):
    return args

  def fill_value(value):
    if not _is_batched(value, len(devices)):
      return value
    return _map(lambda _, tensor: one_row_if_empty(tensor), value, devices)

  return tf.nest.map_structure(fill_value, args)


def trim(run: replica_run.ReplicaRun, outputs, devices):
  """Returns `outputs` without what replicas without rows computed.

  Batched tensors (their leading dimension is unknown in a graph, one in eager
  mode) lose their stand-in row. Everything else becomes zero.
  """
  if run.has_rows is None:
    return outputs

  def trim_value(value):
    if not isinstance(value, _tf_internal.PerReplica):
      return value
    return _map(functools.partial(_trim_tensor, run), value, devices)

  return tf.nest.map_structure(trim_value, outputs)


def mask(run: replica_run.ReplicaRun, values, devices):
  """Returns values of which replicas without rows hold zeros (slices: no rows)."""
  masked = list(values)
  maskable = [
    i for i, v in enumerate(values) if isinstance(v, _tf_internal.PerReplica)
  ]
  columns = []
  for replica_id, device in enumerate(devices):
    tensors = [values[i].values[replica_id] for i in maskable]
    with tf.device(device):
      columns.append(mask_tensors(run, replica_id, tensors))
  for i, *parts in zip(maskable, *columns, strict=True):
    masked[i] = _tf_internal.PerReplica(parts)
  return masked


def mask_tensors(run, replica_id, tensors):
  """One replica's tensors, or nothing in their place if it has no rows."""
  parts = tf.nest.flatten(tensors, expand_composites=True)
  kept = run.select(
    replica_id,
    lambda: [tf.identity(p) for p in parts],
    lambda: tf.nest.flatten(
      [_nothing_like(t) for t in tensors], expand_composites=True
    ),
  )
  masked = tf.nest.pack_sequence_as(tensors, kept, expand_composites=True)
  for after, before in zip(masked, tensors, strict=True):
    if isinstance(before, tf.Tensor):
      after.set_shape(before.shape)
  return masked


def drop_rows(run, value, axis, devices):
  """Returns `value`, of length zero along `axis` where a replica is empty."""

  def drop(tensor):
    size = tf.shape(tensor)
    size = tf.tensor_scatter_nd_update(size, [[axis % tensor.shape.rank]], [0])
    return tf.slice(tensor, tf.zeros_like(size), size)

  return _map(
    lambda i, tensor: run.select(
      i, lambda: tf.identity(tensor), lambda: drop(tensor)
    ),
    value,
    devices,
  )


def divide(value, count: tf.Tensor):
  """Returns a tensor or mirrored value divided by `count`, in its dtype."""
  if not isinstance(value, tf.distribute.DistributedValues):
    return value / tf.cast(count, value.dtype)
  divided = []
  for tensor in value.values:
    with tf.device(tensor.device):
      divided.append(divide(tensor, count))
  return _tf_internal.Mirrored(divided)


def _map(fn, value, devices):
  """Maps each replica's number and tensor, on its device."""
  mapped = []
  for i, (tensor, device) in enumerate(zip(value.values, devices, strict=True)):
    with tf.device(device):
      mapped.append(fn(i, tensor))
  return _tf_internal.PerReplica(mapped)


def _nothing_like(tensor):
  if isinstance(tensor, tf.IndexedSlices):
    return tf.IndexedSlices(
      tensor.values[:0], tensor.indices[:0], tensor.dense_shape
    )
  return tf.zeros_like(tensor)


def _is_composite(value) -> bool:
  return isinstance(value, _tf_internal.PerReplica) and isinstance(
    value.values[0], tf.RaggedTensor | tf.SparseTensor
  )


def _is_batched(value, num_replicas) -> bool:
  """Returns whether `value` is one dense batch a replica that may have no rows."""
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
  """The tensor, or one row of zeros in place of none."""

  def one_row():
    return tf.zeros(tf.concat([[1], tf.shape(tensor)[1:]], 0), tensor.dtype)

  shape = tensor.shape
  if shape.rank and shape[0] is not None:
    return tensor if shape[0] > 0 else one_row()
  filled = tf.cond(tf.shape(tensor)[0] > 0, lambda: tensor, one_row)
  if shape.rank:
    filled.set_shape(tf.TensorShape([None]).concatenate(shape[1:]))
  return filled


def _trim_tensor(run, replica_id, tensor):
  if not isinstance(tensor, tf.Tensor):
    return tensor
  rank = tensor.shape.rank
  if rank and tensor.shape[0] in (None, 1):
    kept = run.select(replica_id, lambda: tensor, lambda: tensor[:0])
    if not isinstance(run.has_rows[replica_id], bool):
      kept.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:]))
    return kept
  return run.select(replica_id, lambda: tensor, lambda: tf.zeros_like(tensor))
