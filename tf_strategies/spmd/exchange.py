"""How replicas meet between the blocks of a program: what strategies implement."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import tensorflow as tf

from tf_strategies.spmd.kinds import Shard
from tf_strategies.spmd.program import Tensor
from tf_strategies.spmd.site import Site


class Exchange(abc.ABC):
  """How replicas meet. It is called while a step is traced, not when it runs.

  `columns[r][t]` is tensor t of local replica r. `[s][t]` of a result is tensor t for
  `sites[s]`, the places that need it: all replicas, some of them, or a home device.
  """

  @abc.abstractmethod
  def add(
    self,
    columns: Sequence[Sequence[tf.Tensor]],
    sites: Sequence[Site],
    gradients: Sequence[str | None],
  ) -> list[list[tf.Tensor]]:
    """Returns the sums over all replicas; for each site a list of tensors.

    Args:
      columns: the terms.
      sites: where the sums are needed.
      gradients: for each tensor of a column, the name of the variable whose
        gradient it is. None for other tensors, which are never compressed.
    """

  @abc.abstractmethod
  def scatter(
    self,
    columns: Sequence[Sequence[tf.Tensor]],
    shard: Shard,
    sites: Sequence[Site],
    are_gradients: bool,
  ) -> list[list[tf.Tensor]]:
    """Returns each local replica's pieces of the sums over all replicas."""

  @abc.abstractmethod
  def join(
    self,
    columns: Sequence[Sequence[tf.Tensor]],
    shapes: Sequence[tf.TensorShape],
    sites: Sequence[Site],
  ) -> list[list[tf.Tensor]]:
    """Returns, for each site, whole tensors of these shapes from the replicas' pieces."""

  @abc.abstractmethod
  def gather(
    self, values: Sequence[tf.Tensor], axis: int, sites: Sequence[Site]
  ) -> list[tf.Tensor]:
    """Returns the concatenation of all replicas' tensors, in the order of the rows."""

  @abc.abstractmethod
  def first(
    self, value: tf.Tensor | None, like: Tensor, sites: Sequence[Site]
  ) -> list[tf.Tensor]:
    """Returns the first replica's tensor: `value`, which is None in other processes."""
