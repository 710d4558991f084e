"""What `strategy.run` asks of its arguments and of the thread that calls it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import _graph_errors, _tf_internal, errors


def check_rows(args: Any, devices: Sequence[str]) -> Any:
  """Returns the arguments of `strategy.run`, of which every replica has rows.

  A graph checks that when it runs, before a replica uses the arguments.

  Args:
    args: a structure of arguments.
    devices: of the replicas of this process.

  Raises:
    UnsupportedOptionError: a replica of any process has no rows.
  """
  batch = _first_batched(args, len(devices))
  if batch is None or _tf_internal.in_xla_context():
    return args
  own = [num_rows(part) for part in batch.values]
  counts = rows_of(args, len(devices))
  for known in (own, counts):
    if any(isinstance(count, int) and count == 0 for count in known):
      raise _rowless_error(known)
  if all(isinstance(count, int) for count in counts):
    return args

  def refuse(counts):
    with _graph_errors.typed():
      raise _rowless_error(counts.tolist())

  with tf.device('CPU:0'):
    counts = tf.stack([tf.cast(count, tf.int32) for count in counts])
    check = tf.cond(
      tf.reduce_all(counts > 0),
      lambda: np.bool_(True),
      lambda: tf.ensure_shape(tf.numpy_function(refuse, [counts], tf.bool), []),
    )

  def checked(value):
    if not isinstance(value, _tf_internal.PerReplica) or not all(
      tf.is_tensor(part) and not isinstance(part, tf.Variable)
      for part in value.values
    ):
      return value
    parts = []
    for device, part in zip(devices, value.values, strict=True):
      with tf.device(device), tf.control_dependencies([check]):
        parts.append(
          tf.nest.map_structure(tf.identity, part, expand_composites=True)
        )
    return _tf_internal.PerReplica(parts)

  return tf.nest.map_structure(checked, args)


def _rowless_error(counts) -> errors.UnsupportedOptionError:
  return errors.UnsupportedOptionError(
    f'strategy.run with a batch of which replicas have {list(counts)} rows',
    'at least one row for each replica: what a replica computes from no rows, '
    'such as a mean, is not a number',
    'call strategy.step instead, which is exact for any batch, or leave out such '
    'a batch: dataset.batch(size, drop_remainder=True)',
  )


def rows_of(
  args: Any,
  num_replicas: int,
  share: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None,
) -> tuple[Any, ...] | None:
  """Returns the number of rows of every replica of every process.

  They are integers where shapes are known, such as in eager mode, and int32 tensors
  where a graph is built for batches of any size. If no argument is a distributed
  batch, the result is None.

  Args:
    args: of `strategy.run`.
    num_replicas: of this process.
    share: gets the rows of other processes, where the batch does not tell.
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
  """The first distributed value whose components have a leading dimension."""
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
  """A vector as a tuple: of integers where its values are there."""
  if tf.executing_eagerly():
    return tuple(all_rows.numpy().tolist())
  with tf.device('CPU:0'):
    return tuple(tf.unstack(all_rows))


def num_rows(tensor):
  """Leading dimension of a dense, ragged or sparse tensor: int, or int32."""
  if tensor.shape.rank and tensor.shape[0] is not None:
    return int(tensor.shape[0])
  if isinstance(tensor, tf.RaggedTensor):
    return tf.cast(tensor.nrows(), tf.int32)
  if isinstance(tensor, tf.SparseTensor):
    return tf.cast(tensor.dense_shape[0], tf.int32)
  return tf.shape(tensor)[0]


def current_replica_id() -> int | None:
  """The replica that the calling thread is; None in cross-replica context."""
  thread = threading.current_thread()
  if isinstance(thread, _tf_internal.MirroredReplicaThread):
    return thread.replica_id
  return None


def in_branch_of_replica() -> bool:
  """Returns whether a replica is building a graph inside its own, say of a `tf.cond`.

  A merge call brings all replicas together in the graph that they were started
  in; from a branch of one replica's graph no other replica's tensors can be seen.
  """
  thread = threading.current_thread()
  return (
    isinstance(thread, _tf_internal.MirroredReplicaThread)
    and not thread.in_eager
    and not tf.executing_eagerly()
    and tf.compat.v1.get_default_graph() is not thread.graph
  )


def branch_error(what: str) -> errors.UnsupportedOptionError:
  """Returns the error for something that replicas do together in a branch."""
  return errors.UnsupportedOptionError(
    f'{what} in a branch or a loop of a replica (tf.cond, tf.while_loop)',
    'a call that every replica makes outside of it: in a branch of one replica '
    "there are no other replicas' values",
    'call strategy.step instead of strategy.run, or decide outside of '
    'strategy.run which of two steps runs',
  )
