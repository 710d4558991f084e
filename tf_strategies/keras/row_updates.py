"""Which updates of a table can be done row by row, and how."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal, errors
from tf_strategies.keras import optimizer_checks, optimizer_wrapper

# An update of a larger table is worth a warning if it is of all rows.
_LARGE_BYTES = 16 * 1024 * 1024

_warned_of: set[str] = set()


def summed(gradient: Any) -> Any:
  """A gradient in which each row is once; dense ones are as they are."""
  if not isinstance(gradient, tf.IndexedSlices):
    return gradient
  rows, places = tf.unique(gradient.indices)
  values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
  values.set_shape([None, *gradient.values.shape[1:]])
  return tf.IndexedSlices(values, rows, gradient.dense_shape)


def update_lazily(optimizer, gradient, variable, learning_rate) -> None:
  """The update of an optimizer, of the rows that the gradient has, as summed."""
  update = type(optimizer).update_step
  if not isinstance(gradient, tf.IndexedSlices):
    update(optimizer, gradient, variable, learning_rate)
    return
  gradient = summed(gradient)
  with _keras_internal.seen_as_rows(
    optimizer, variable, gradient.indices
  ) as rows:
    update(optimizer, gradient.values, rows, learning_rate)


def is_lazy(optimizer) -> bool:
  """Whether an optimizer updates only the rows that a gradient has."""
  return _keras_internal.replaced_update(optimizer) is update_lazily


def takes_sums(optimizer, clips: bool = False) -> bool:
  """Whether an optimizer makes of a row's sum what it makes of the terms.

  Most of Keras's square equal rows one by one: so these stay apart, as they do on
  one device. `clips` says whether what it is given is still to be clipped.
  """
  chain = list(optimizer_wrapper.chain(optimizer))
  if clips and any(
    getattr(each, option, None) is not None
    for each in chain
    for option in optimizer_checks.CLIPPING
  ):
    return False
  last = chain[-1] if chain else None
  return isinstance(last, keras.optimizers.SGD) or (
    last is not None and is_lazy(last)
  )


def sums_before(update: Callable) -> bool:
  """Whether equal rows may be added up before Keras's update of a variable."""
  return takes_sums(_keras_internal.optimizer_of(update))


def by_rows(update: Callable) -> Callable:
  """Keras's update of a variable, which leaves rows alone that do not change.

  Rows without a gradient stay as they are under plain SGD, of which Keras
  updates only the others, and under Adagrad, of which it computes all.
  """
  optimizer = _keras_internal.optimizer_of(update)
  if not _stays_without_gradient(optimizer):
    return update

  def update_rows(variable, gradient, *args):
    # A row of two gradients is seen twice. Adagrad adds all squares to it, reads it
    # for each of them, and adds all changes: as it does with slices, but for a
    # search for zeros to divide by, of which there are none.
    with _keras_internal.seen_as_rows(
      optimizer, variable, gradient.indices
    ) as seen:
      return update(seen, gradient.values, *args)

  return update_rows


def _stays_without_gradient(optimizer) -> bool:
  # 0 / 0 is no 0.
  return type(optimizer) is keras.optimizers.Adagrad and (
    optimizer.epsilon > 0 or optimizer.initial_accumulator_value > 0
  )


def check_may_be_nested(update: Callable, name: str) -> None:
  """Refuses an update by rows of a variable in parts inside of a branch.

  There rows of one part met state of another (a loss scale's branch, with steps that
  are applied as they come).

  Raises:
    UnsupportedOptionError: it is a `LazyRows`' update.
  """
  if is_lazy(_keras_internal.optimizer_of(update)):
    raise errors.UnsupportedOptionError(
      f'LazyRows within a branch, as LossScaleOptimizer makes it, with partitioned '
      f'variable {name!r}',
      "mode='sync', an optimizer without loss scaling, or a variable in one part",
      "use mode='sync' or mixed_bfloat16, or cut no variable: "
      'variable_partitioner=lambda shape, dtype: [1] * len(shape)',
    )


def warn_of_all_rows(update: Callable, variable: tf.Variable) -> None:
  """Says once that a large table is updated whole, though a batch has few rows."""
  optimizer = _keras_internal.optimizer_of(update)
  num_bytes = math.prod(variable.shape) * variable.dtype.size
  if (
    optimizer is None
    or num_bytes <= _LARGE_BYTES
    or variable.name in _warned_of
    or is_lazy(optimizer)
    or _stays_without_gradient(optimizer)
    or (type(optimizer) is keras.optimizers.SGD and not optimizer.momentum)
  ):
    return
  _warned_of.add(variable.name)
  logging.warning(
    '%s updates all %d rows (%.0f MB) of table %r in every step: with it, rows '
    'without a gradient change too. To update only the rows that a batch has, '
    'which is another algorithm, use tfs.keras.LazyRows(optimizer), or Adagrad.',
    type(optimizer).__name__,
    variable.shape[0],
    num_bytes / 1e6,
    variable.name,
  )
