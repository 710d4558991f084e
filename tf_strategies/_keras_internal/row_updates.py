"""Optimizers' updates of rows that are in no variable.

A variable with an attribute `row_table` stands for the rows of that table: the indices
of its gradient are ids. What Keras does with gradients before (clipping) it does with
these too. The update is the table's, which calls the optimizer's own rule with the rows
of the gradient, and those of the optimizer's state, in place of variables.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.optimizers import base_optimizer

from tf_strategies import _requirements, errors
from tf_strategies._keras_internal import rows, steps, updates

# They update each element by itself, from that element and its state alone.
_KINDS = (
  'SGD',
  'RMSprop',
  'Adagrad',
  'Adadelta',
  'Adam',
  'AdamW',
  'Adamax',
  'Nadam',
  'Ftrl',
  'Lion',
)
_RULES = [getattr(keras.optimizers, kind).update_step for kind in _KINDS]
# What would have to touch each row in each step, or needs dense gradients.
_REFUSED = (
  'use_ema',
  'gradient_accumulation_steps',
  'loss_scale_factor',
  'clipvalue',
  'global_clipnorm',
)


def table_of(variable: Any) -> Any:
  """The table of rows that a variable stands for, or None."""
  return getattr(variable, 'row_table', None)


def check_row_optimizer(
  optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> None:
  """Refuses an optimizer that cannot update some rows of a table.

  Raises:
    UnsupportedOptionError: naming it, and those that can.
  """
  kind, name = type(optimizer).__name__, variable.path
  if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
    raise errors.UnsupportedOptionError(
      f'LossScaleOptimizer, as mixed_float16 has it, with dynamic table {name!r}',
      'an optimizer without loss scaling',
      'use mixed_bfloat16, or compile with auto_scale_loss=False',
    )
  if getattr(optimizer, 'inner_optimizer', None) is not None:
    return  # Which is asked too.
  if type(optimizer).update_step not in _RULES:
    raise errors.UnsupportedOptionError(
      f'{kind} with dynamic table {name!r}',
      f'an optimizer that updates rows: {", ".join(_KINDS)}',
      'use one of these',
    )
  for option in _REFUSED:
    value = getattr(optimizer, option, None)
    if value:
      raise errors.UnsupportedOptionError(
        f'{kind}({option}={value!r}) with dynamic table {name!r}',
        'options that leave rows alone which a batch does not use',
        f'leave out {option}',
      )
  # pylint: disable-next=protected-access
  if optimizer.weight_decay and optimizer._use_weight_decay(variable):
    raise errors.UnsupportedOptionError(
      f'{kind}(weight_decay={optimizer.weight_decay!r}) with dynamic table {name!r}',
      'an optimizer that does not decay the rows',
      'call optimizer.exclude_from_weight_decay(var_list=layer.trainable_variables) '
      'before it is built',
    )


def _check_first(optimizer, gradients, variables, apply):
  trained = optimizer._trainable_variables if variables is None else variables
  for each in trained:
    if table_of(each) is not None:
      check_row_optimizer(optimizer, each)
  apply(gradients)


def _update_tables_apart(update):
  @functools.wraps(update)
  def update_apart(self, grads, trainable_variables, learning_rate):
    pairs = list(zip(grads, trainable_variables, strict=True))
    others = [pair for pair in pairs if table_of(pair[1]) is None]
    if others:
      update(self, *map(list, zip(*others, strict=True)), learning_rate)
    for gradient, variable in pairs:
      table = table_of(variable)
      if table is not None:
        table.update(self, gradient, learning_rate)

  return update_apart


_WHY = 'the rows of a DynamicEmbedding are in no variable'
for _optimizer in (
  base_optimizer.BaseOptimizer,
  keras.optimizers.LossScaleOptimizer,
):
  updates.before_apply(_optimizer, _check_first, _WHY)
steps.change(
  tf_optimizer.TFOptimizer,
  '_backend_update_step(grads, trainable_variables, learning_rate)',
  _update_tables_apart,
  _WHY,
)
for _method in (
  '_get_variable_index(variable)',
  '_use_weight_decay(variable)',
):
  _requirements.method(base_optimizer.BaseOptimizer, _method, _WHY)


def row_slots(
  optimizer: keras.optimizers.Optimizer,
) -> list[
  tuple[keras.Variable, keras.optimizers.Optimizer, dict[str, keras.Variable]]
]:
  """Each variable of a table that an optimizer was built with, and its slots.

  Between them whose slots they are: of optimizers that wrap others the innermost.
  """
  *_, optimizer = updates.chain(optimizer)
  return [
    (variable, optimizer, rows.slots_of(optimizer, variable))
    for variable in optimizer._trainable_variables
    if table_of(variable) is not None
  ]


def update_rows(
  optimizer: keras.optimizers.Optimizer,
  of: keras.Variable,
  tensor: tf.Tensor,
  slots: Mapping[str, tf.Tensor],
  gradient: tf.IndexedSlices,
  learning_rate: Any,
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
  """Returns the updated rows, and the updated state by attribute.

  Args:
    optimizer: whose rule.
    of: the variable that stands for the rows.
    tensor: the rows.
    slots: their state.
    gradient: with as many rows.
    learning_rate: of this step.
  """
  state = {name: rows.RowValues(value) for name, value in slots.items()}
  with rows.in_place_of_slots(optimizer, of, state) as key:
    variable = rows.RowValues(tensor, key)
    optimizer.update_step(gradient, variable, learning_rate)
  return variable.tensor, {name: each.tensor for name, each in state.items()}
