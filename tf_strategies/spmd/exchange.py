"""How replicas meet, to exchange tensors between blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.spmd import pieces
from tf_strategies.spmd.kinds import Shard
from tf_strategies.spmd.program import Tensor
from tf_strategies.spmd.site import Site, at_each

_SUM = tf.distribute.ReduceOp.SUM
# `columns[i][t]` is tensor t. Of terms, i is the number of a local replica. Of results,
# it is an index in `sites`: replicas, or a home device.
Columns: TypeAlias = Sequence[Sequence[tf.Tensor]]


class Exchange:
  """Exchanges tensors between replicas of one process; subclasses, of several.

  Its methods are called while a step is traced, not when it runs.
  """

  def __init__(self, ops: tf.distribute.CrossDeviceOps):
    self._ops = ops

  def add(
    self,
    columns: Columns,
    sites: Sequence[Site],
    gradients: Sequence[str | None],
  ) -> Columns:
    """Returns the sums over all replicas, for each site.

    Args:
      columns: the terms.
      sites: where the sums are needed.
      gradients: for each tensor of a column, the name of the variable whose
        gradient it is. None for other tensors, which are never compressed.
    """
    del gradients
    values = [
      _tf_internal.PerReplica(row) for row in zip(*columns, strict=True)
    ]
    # If one site needs the sums, they are reduced to its device alone.
    is_one = len(sites) == 1 and len(columns) > 1
    pairs = [(v, sites[0].device if is_one else v) for v in values]
    sums = self._ops.batch_reduce(_SUM, pairs)
    return [[_at(value, site) for value in sums] for site in sites]

  def scatter(
    self,
    columns: Columns,
    shard: Shard,
    sites: Sequence[Site],
    are_gradients: bool,
  ) -> Columns:
    """Returns each local replica's pieces of the sums over all replicas."""
    del are_gradients
    rows = at_each(
      sites,
      lambda _, column: [tf.unstack(pieces.rows(t, shard)) for t in column],
      columns,
    )
    pairs = [
      (_tf_internal.PerReplica([parts[place] for parts in row]), site.device)
      for place, site in enumerate(sites)
      for row in zip(*rows, strict=True)
    ]
    sums = iter(self._ops.batch_reduce(_SUM, pairs))
    return [[next(sums) for _ in columns[0]] for _ in sites]

  def join(
    self,
    columns: Columns,
    shapes: Sequence[tf.TensorShape],
    sites: Sequence[Site],
  ) -> Columns:
    """Returns, for each site, whole tensors of these shapes from the replicas' pieces."""
    flat = [self.gather(row, 0, sites) for row in zip(*columns, strict=True)]
    return at_each(
      sites, lambda _, *column: list(map(pieces.joined, column, shapes)), *flat
    )

  def gather(
    self, values: Sequence[tf.Tensor], axis: int, sites: Sequence[Site]
  ) -> list[tf.Tensor]:
    """Returns the concatenation of all replicas' tensors, in the order of the rows."""
    value = _tf_internal.PerReplica(values)
    gathered = self._ops._gather(value, value, axis)
    return [_at(gathered, site) for site in sites]

  def first(
    self, value: tf.Tensor | None, like: Tensor, sites: Sequence[Site]
  ) -> list[tf.Tensor]:
    """Returns the first replica's tensor: `value`, which is None in other processes."""
    del like
    return at_each(sites, lambda _: tf.identity(value))


def _at(value, site):
  """Returns the copy of a value at a site."""
  if not isinstance(value, tf.distribute.DistributedValues):
    return value
  return value.values[site.replica or 0]
