"""Which variables are sums over their copies, and how copies become equal."""

from __future__ import annotations

import tensorflow as tf


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
