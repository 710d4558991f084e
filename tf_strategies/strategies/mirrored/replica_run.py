"""What a strategy knows of one `strategy.run`: the rows of each replica.

A global batch does not always divide by the number of replicas. Which replica
has how many rows decides how much its gradient counts, and whether it takes
part at all. Code in replica context (gradients, metrics) and in cross-replica
context (merge calls) finds that in the `ReplicaRun` of its thread.

Rows are Python integers where shapes are known (always in eager mode) and
scalar tensors where a graph is built for batches of any size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_strategies import _tf_internal

_Rows = tuple[Any, ...]


@dataclasses.dataclass(eq=False)
class ReplicaRun:
  """One `strategy.run` over replicas that hold `rows` rows each."""

  # Of this process's replicas, int or int32; None if no argument is batched.
  rows: _Rows | None
  # The same of all replicas of all processes.
  all_rows: _Rows | None
  # Of this process's, bool; None if every replica of every process surely has.
  has_rows: _Rows | None
  # The shared variables that replicas have read, by replica and `id`.
  reads: dict[int, dict[int, tf.Variable]] = dataclasses.field(
    default_factory=dict
  )

  @classmethod
  def of(
    cls,
    args: Any,
    num_replicas: int,
    share: Callable[[_Rows], _Rows] | None = None,
  ) -> ReplicaRun:
    """Reads the rows from the first batched distributed value in `args`.

    Where the batch does not tell, `share` gets those of other processes.
    """
    batch = _first_batched(args, num_replicas)
    if batch is None:
      return cls(None, None, None)
    rows = all_rows = tuple(num_rows(t) for t in batch.values)
    counted = getattr(batch, 'all_rows', None)
    if counted is not None:
      all_rows = _unstack(counted)
    elif share is not None:
      all_rows = share(rows)
    if all(isinstance(n, int) for n in all_rows):
      has_rows = None if all(all_rows) else tuple(n > 0 for n in rows)
      return cls(rows, all_rows, has_rows)
    with tf.device('CPU:0'):
      has_rows = tuple(n > 0 for n in rows)
    return cls(rows, all_rows, has_rows)

  def num_with_rows(self) -> tf.Tensor:
    """Returns how many of all replicas have rows, float32, at least one."""
    with tf.device('CPU:0'):
      has_rows = tf.stack(self.all_rows) > 0
      return tf.maximum(tf.reduce_sum(tf.cast(has_rows, tf.float32)), 1.0)

  def select(self, replica_id: int, if_rows, if_empty):
    """Calls `if_rows()` where the replica has rows, else `if_empty()`."""
    condition = True if self.has_rows is None else self.has_rows[replica_id]
    if isinstance(condition, bool):
      return if_rows() if condition else if_empty()
    return tf.cond(condition, if_rows, if_empty)


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


class _ThreadState(threading.local):
  run: ReplicaRun | None = None


_state = _ThreadState()


def current() -> ReplicaRun | None:
  """The run that the calling thread works for, if any."""
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
  """The replica that the calling thread is; None in cross-replica context."""
  thread = threading.current_thread()
  if isinstance(thread, _tf_internal.MirroredReplicaThread):
    return thread.replica_id
  return None


def note_read(variable) -> None:
  """Notes that the replica of the calling thread reads a shared variable."""
  run, replica_id = current(), current_replica_id()
  if run is not None and replica_id is not None:
    run.reads.setdefault(replica_id, {})[id(variable)] = variable


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
