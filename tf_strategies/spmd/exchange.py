"""How replicas meet between the blocks of a program: what strategies implement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from tf_strategies.spmd.kinds import Shard
from tf_strategies.spmd.program import Tensor
from tf_strategies.spmd.site import Site


class Exchange(Protocol):
  """How replicas meet; each column holds one local replica's tensors."""

  def add(
    self,
    columns: Sequence[Sequence[tf.Tensor]],
    sites: Sequence[Site],
    are_gradients: bool,
  ) -> list[list[tf.Tensor]]:
    """The sums over all replicas; for each site a list of tensors."""

  def scatter(
    self,
    columns: Sequence[Sequence[tf.Tensor]],
    shard: Shard,
    sites: Sequence[Site],
    are_gradients: bool,
  ) -> list[list[tf.Tensor]]:
    """Returns for each local replica its pieces of the sums over all replicas."""

  def join(
    self,
    columns: Sequence[Sequence[tf.Tensor]],
    shapes: Sequence[tf.TensorShape],
    sites: Sequence[Site],
  ) -> list[list[tf.Tensor]]:
    """For each site the tensors of these shapes, of which replicas have pieces."""

  @property
  def rounds_gradients(self) -> bool:
    """Returns whether sums of gradients, and only those, may be rounded on their way."""

  def gather(
    self, values: Sequence[tf.Tensor], axis: int, sites: Sequence[Site]
  ) -> list[tf.Tensor]:
    """All replicas' tensors behind each other, in the order of the rows."""

  def first(
    self, value: tf.Tensor | None, like: Tensor, sites: Sequence[Site]
  ) -> list[tf.Tensor]:
    """The first replica's tensor; `value` is None where that is elsewhere."""
