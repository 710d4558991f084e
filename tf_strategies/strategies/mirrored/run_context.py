"""The state of a replica's thread in `strategy.run`, and masks for padding rows."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.spmd.site import Site


def names_of(variables: Iterable[Any]) -> list[str]:
  """Returns the names of variables, for timelines."""
  return [getattr(v, 'path', v.name) for v in variables]


@dataclasses.dataclass(eq=False)
class ReplicaRun:
  """The replicas of one `strategy.run`. Some may have no rows.

  Attributes:
    sites: sites of this process's replicas. None of them if every replica of every
      process is known to have rows.
    num_with_rows: number of all replicas that have rows, float32, at least one.
  """

  sites: Sequence[Site] = ()
  num_with_rows: tf.Tensor | None = None


class _Thread(threading.local):
  run: ReplicaRun | None = None
  are_reduced = False


_state = _Thread()


def current_run() -> ReplicaRun | None:
  """Returns the run that the calling thread works for, if any."""
  return _state.run


def current_sites() -> Sequence[Site]:
  """Returns the sites of the replicas of the current run, if some may have no rows."""
  return () if _state.run is None else _state.run.sites


@contextlib.contextmanager
def running(run: ReplicaRun) -> Iterator[None]:
  """Makes `run` the current one of this thread."""
  before, _state.run = _state.run, run
  try:
    yield
  finally:
    _state.run = before


def are_gradients_reduced() -> bool:
  """Returns whether the calling thread is inside `gradients_reduced()`."""
  return _state.are_reduced


@contextlib.contextmanager
def gradients_reduced() -> Iterator[None]:
  """Makes reductions do nothing, as values are equal on all replicas."""
  before, _state.are_reduced = _state.are_reduced, True
  try:
    yield
  finally:
    _state.are_reduced = before


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


def per_replica(reduce_op, value, count: int):
  """Returns a value as one for each local replica.

  A tensor that they share was created outside the step, and counts once, as under
  `tf.distribute.MirroredStrategy`.
  """
  if isinstance(value, tf.distribute.DistributedValues):
    return value
  first = tf.convert_to_tensor(value)
  is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
  other = first if is_mean else tf.zeros_like(first)
  return _tf_internal.PerReplica((first, *[other] * (count - 1)))


def masked(sites: Sequence[Site], values):
  """Returns values to which replicas without rows contribute nothing."""
  masked = list(values)
  maskable = [
    i for i, v in enumerate(values) if isinstance(v, _tf_internal.PerReplica)
  ]
  columns = [
    _contributions(site, [values[i].values[replica] for i in maskable])
    for replica, site in enumerate(sites)
  ]
  for i, *parts in zip(maskable, *columns, strict=True):
    masked[i] = _tf_internal.PerReplica(parts)
  return masked


def _contributions(site, tensors):
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


def divided(value, count: tf.Tensor):
  """Returns a tensor or mirrored value divided by `count`, in its dtype."""
  if not isinstance(value, tf.distribute.DistributedValues):
    return value / tf.cast(count, value.dtype)
  components = []
  for tensor in value.values:
    with tf.device(tensor.device):
      components.append(divided(tensor, count))
  return _tf_internal.Mirrored(components)
