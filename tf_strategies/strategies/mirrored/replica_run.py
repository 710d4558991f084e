"""The state of one `strategy.run`: the replicas that have rows.

A global batch may have fewer rows than there are replicas. Code in replica
context (metrics) and in cross-replica context (merge calls) finds the sites of
the replicas in the `ReplicaRun` of its thread. The sites tell whether a replica
has rows.

On zero rows, BatchNormalization computes 0/0, and oneDNN's max-pooling gradient
aborts the process. A replica without rows therefore computes on one row of zeros,
and its contributions are excluded: its values in reductions, its metric updates and
its outputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.spmd import site as site_lib
from tf_strategies.spmd.site import Site


@dataclasses.dataclass(eq=False)
class ReplicaRun:
  """One `strategy.run`.

  Attributes:
    sites: sites of this process's replicas. None if every replica of every process
      is known to have rows.
    num_with_rows: number of all replicas that have rows, float32, at least one.
  """

  sites: Sequence[Site] | None = None
  num_with_rows: tf.Tensor | None = None


def rows_of(
  args: Any,
  num_replicas: int,
  share: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None,
) -> tuple[Any, ...] | None:
  """Returns the number of rows of every replica of every process.

  They are integers if shapes are known, for example in eager mode. In a graph for
  batches of any size, they are int32 tensors. If no argument is a distributed batch,
  the result is None.

  Args:
    args: arguments of `strategy.run`.
    num_replicas: number of replicas of this process.
    share: gets the rows of other processes if the batch does not contain them.
  """
  batch = _first_batched(args, num_replicas)
  if batch is None:
    return None
  counted = getattr(batch, 'all_rows', None)
  if counted is not None:
    return _unstack(counted)
  rows = tuple(num_rows(t) for t in batch.values)
  return rows if share is None else share(rows)


def _first_batched(args, num_replicas):
  """Returns the first distributed value whose components have a leading dimension."""
  for leaf in tf.nest.flatten(args):
    if not isinstance(leaf, tf.distribute.DistributedValues):
      continue
    values = getattr(leaf, 'values', ())
    if len(values) != num_replicas or isinstance(values[0], tf.Variable):
      continue
    if all(hasattr(v, 'shape') and v.shape.rank != 0 for v in values):
      return leaf
  return None


def _unstack(all_rows):
  """Returns a vector as a tuple, of integers if its values are known."""
  if tf.executing_eagerly():
    return tuple(all_rows.numpy().tolist())
  with tf.device('CPU:0'):
    return tuple(tf.unstack(all_rows))


def num_rows(tensor):
  """Returns the leading dimension of a dense, ragged or sparse tensor: int or int32."""
  if tensor.shape.rank and tensor.shape[0] is not None:
    return int(tensor.shape[0])
  if isinstance(tensor, tf.RaggedTensor):
    return tf.cast(tensor.nrows(), tf.int32)
  if isinstance(tensor, tf.SparseTensor):
    return tf.cast(tensor.dense_shape[0], tf.int32)
  return tf.shape(tensor)[0]


class _CurrentRun(threading.local):
  run: ReplicaRun | None = None


_state = _CurrentRun()


def current() -> ReplicaRun | None:
  """Returns the run that the calling thread works for, if any."""
  return _state.run


@contextlib.contextmanager
def active(run: ReplicaRun):
  """Makes `run` the current one of this thread."""
  before = _state.run
  _state.run = run
  try:
    yield
  finally:
    _state.run = before


def current_replica_id() -> int | None:
  """Returns the replica of the calling thread, or None in cross-replica context."""
  thread = threading.current_thread()
  if isinstance(thread, _tf_internal.MirroredReplicaThread):
    return thread.replica_id
  return None


def in_branch_of_replica() -> bool:
  """Returns whether a replica is building a graph inside its own, e.g. for a
  `tf.cond`.

  A merge call brings all replicas together in the graph in which they were
  started. From a branch of one replica's graph, no tensors of other replicas
  are visible.
  """
  thread = threading.current_thread()
  return (
    isinstance(thread, _tf_internal.MirroredReplicaThread)
    and not thread.in_eager
    and not tf.executing_eagerly()
    and tf.compat.v1.get_default_graph() is not thread.graph
  )


def branch_error() -> errors.UnsupportedOptionError:
  """Returns the error for replicas that would have to meet inside of a branch.

  Each replica builds its own branch, without the tensors of other replicas.
  """
  return errors.UnsupportedOptionError(
    'optimizer.apply, or another reduction, in a tf.cond, a loop or a tf.function '
    'of a replica',
    'control flow in which replicas do not wait for each other',
    'pass the step to strategy.step in place of strategy.run, or write the control '
    'flow around strategy.run',
  )


def fill(run: ReplicaRun, args):
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


def trim(run: ReplicaRun, outputs):
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
      return site.real_rows(tensor)
    return site.contributions([tensor])[0]

  def trim_value(value):
    if isinstance(value, _tf_internal.PerReplica):
      return _map(trim_tensor, run, value)
    if len(run.sites) == 1:
      return trim_tensor(run.sites[0], value)
    return value

  return tf.nest.map_structure(trim_value, outputs)


def mask(run: ReplicaRun, values):
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
      site.real_rows(t.values), site.real_rows(t.indices), t.dense_shape
    )
    for t in tensors
  ]


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
