"""Exchanges values between replicas in a whole-batch step; see `spmd.exchange`."""

from __future__ import annotations

import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.spmd import exchange, pieces

_SUM = tf.distribute.ReduceOp.SUM


class ReplicaExchange(exchange.Exchange):
  """Adds and gathers the values of the replicas of one process."""

  def __init__(self, ops: tf.distribute.CrossDeviceOps):
    self._ops = ops

  def add(self, columns, sites, gradients):
    """See base class."""
    del gradients
    values = [
      _tf_internal.PerReplica(row) for row in zip(*columns, strict=True)
    ]
    # If one site needs the sums, they are reduced to its device alone.
    one = sites[0].device if len(sites) == 1 and len(columns) > 1 else None
    pairs = [(v, v if one is None else one) for v in values]
    sums = self._ops.batch_reduce(_SUM, pairs)
    return [[self._at(value, site) for value in sums] for site in sites]

  def _at(self, value, site):
    """Returns a mirrored value at a site."""
    if not isinstance(value, tf.distribute.DistributedValues):
      return value
    return value.values[site.replica or 0]

  def scatter(self, columns, shard, sites, are_gradients):
    """See base class."""
    del are_gradients
    rows = []
    for site, column in zip(sites, columns, strict=True):
      with tf.device(site.device):
        rows.append([tf.unstack(pieces.rows(t, shard)) for t in column])
    pairs = [
      (_tf_internal.PerReplica([parts[place] for parts in row]), site.device)
      for place, site in enumerate(sites)
      for row in zip(*rows, strict=True)
    ]
    sums = iter(self._ops.batch_reduce(_SUM, pairs))
    return [[next(sums) for _ in columns[0]] for _ in sites]

  def join(self, columns, shapes, sites):
    """See base class."""
    results = [[] for _ in sites]
    for row, shape in zip(zip(*columns, strict=True), shapes, strict=True):
      gathered = self.gather(row, 0, sites)
      for site, flat, column in zip(sites, gathered, results, strict=True):
        with tf.device(site.device):
          column.append(pieces.joined(flat, shape))
    return results

  def gather(self, values, axis, sites):
    """See base class."""
    value = _tf_internal.PerReplica(values)
    gathered = self._ops._gather(value, value, axis)
    return [self._at(gathered, site) for site in sites]

  def first(self, value, like, sites):
    """See base class."""
    del like
    return at_each(sites, lambda: tf.identity(value))


def at_each(sites, make):
  """Calls `make` on the device of each site, and returns the values."""
  results = []
  for site in sites:
    with tf.device(site.device):
      results.append(make())
  return results


def is_sum(variable) -> bool:
  """Returns whether the value of a variable is the sum over its replicas."""
  return (
    variable.synchronization == tf.VariableSynchronization.ON_READ
    and variable.aggregation == tf.VariableAggregation.SUM
    and not vars(variable).get('holds_whole', False)
  )


def set_copies(variable, total) -> tf.Operation | None:
  """Sets the first copy to the sum and the others to zero."""
  first, *others = variable.values
  # A copy may not have a value yet, and therefore no shape to read.
  zero = tf.zeros_like(total)
  return tf.group(first.assign(total), *(c.assign(zero) for c in others))


def copy_first(variable) -> None:
  """Makes all copies equal to the first one."""
  first, *copies = variable.values
  for copy in copies:
    copy.assign(first.read_value())
