"""What `DistributedOptimizer` may ask of a strategy: one protocol, with types.

The `extended` of every strategy of this package implements it. Any other
strategy gets `Unsupported`, which trains on one replica as it is and rejects
more with an error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import tensorflow as tf

from tf_strategies import errors

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


@runtime_checkable
class GradientReducer(Protocol):
  """Reduces the gradients of one step over replicas, and has them applied.

  The methods here are right for replicas that have equally many rows and a
  copy of each variable.

  Attributes:
    sums_sparse_as_dense: whether sparse gradients become dense in any case, so
      that duplicate rows are added up before an optimizer sees them.
    applies_all_or_none: whether nothing that an update does, such as counting
      the step, may happen before all gradients have come.
  """

  sums_sparse_as_dense: bool = False
  applies_all_or_none: bool = False

  @contextlib.contextmanager
  def gradients_reduced(
    self, gradients: Sequence[Gradient | None] = ()
  ) -> Iterator[None]:
    """Context in which an optimizer's own reductions do nothing.

    `gradients` are the reduced ones, where there are any yet.
    """
    before, _state.are_reduced = _state.are_reduced, True
    parts = []
    if self.applies_all_or_none and not tf.executing_eagerly():
      parts = tf.nest.flatten(list(gradients), expand_composites=True)
    try:
      with tf.control_dependencies([p for p in parts if p is not None]):
        yield
    finally:
      _state.are_reduced = before

  def row_weight(self) -> tf.Tensor | None:
    """N * n_i / sum(n) for this replica's n_i rows; None if all are equal."""
    return None

  def prefers_dense(self, slices: tf.IndexedSlices) -> bool:
    """Whether a sparse gradient is less to send as a dense one."""
    del slices
    return self.sums_sparse_as_dense

  def reduce_and_apply(
    self,
    gradients: Sequence[Gradient],
    apply: Callable[[Sequence[Gradient]], None],
  ) -> None:
    """Sums this replica's gradients over replicas and passes them to `apply`."""
    context = tf.distribute.get_replica_context()
    reduced = list(gradients)
    if reduced:
      reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, reduced)
    apply(reduced)


class Unsupported(GradientReducer):
  """Stands for a strategy that is not one of this package's."""

  def __init__(self, strategy: tf.distribute.Strategy):
    self._name = type(strategy).__name__

  @contextlib.contextmanager
  def gradients_reduced(self, gradients=()):
    """Does nothing: variables are made as that strategy makes them."""
    del gradients
    yield

  def reduce_and_apply(self, gradients, apply):
    """Raises UnsupportedOptionError, which names the strategy."""
    del gradients, apply
    raise errors.UnsupportedOptionError(
      f'DistributedOptimizer under {self._name}',
      'the strategies of tf_strategies',
      "use tfs.create_strategy('ring_mirrored') in place of it",
    )


def current() -> GradientReducer:
  """What the strategy in whose scope or replica this is called implements."""
  strategy = tf.distribute.get_strategy()
  if isinstance(strategy.extended, GradientReducer):
    return strategy.extended
  return Unsupported(strategy)


class _ThreadState(threading.local):
  are_reduced: bool = False


_state = _ThreadState()


def are_gradients_reduced() -> bool:
  """Whether the calling thread is inside `gradients_reduced()`.

  Gradients are then equal on all replicas, and nothing is reduced again.
  """
  return _state.are_reduced
