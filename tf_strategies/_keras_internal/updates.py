"""Nested optimizers, and what a strategy changes in those of its scope."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf
from keras.src.backend.common import global_state, name_scope
from keras.src.optimizers import base_optimizer
from keras.src.utils import tracking

from tf_strategies import _requirements


def chain(optimizer) -> Iterator[keras.optimizers.Optimizer]:
  """Yields an optimizer and the optimizers that it wraps, from outside to inside."""
  while optimizer is not None:
    yield optimizer
    optimizer = getattr(optimizer, 'inner_optimizer', None)


def see_gradients(apply: Callable[..., None]) -> None:
  """Has the optimizer that makes a variable now call `apply(optimizer, ...)`.

  A strategy calls it for each variable in its scope. An optimizer makes its first
  variable when it is made, so each optimizer of the scope is found. Its `apply`
  becomes the strategy's, which reduces gradients before Keras clips, accumulates and
  unscales them. So Keras need not reduce them later.
  """
  scopes = global_state.get_global_attribute('name_scope_stack')
  optimizer = scopes[-1].caller if scopes else None
  if isinstance(optimizer, keras.optimizers.Optimizer) and 'apply' not in vars(
    optimizer
  ):
    changes = {'apply': apply}
    kind = keras.optimizers.LossScaleOptimizer
    if isinstance(optimizer, kind):
      changes.update(build=_build_with_scale, scale_loss=_scale_by_variable)
    for name, change in changes.items():
      object.__setattr__(optimizer, name, functools.partial(change, optimizer))
    object.__setattr__(optimizer, '_all_reduce_sum_gradients', list)


@tracking.no_automatic_dependency_tracking
def _make_scale(optimizer):
  """Makes the variables of a loss scale, unless they exist."""
  if hasattr(optimizer, 'dynamic_scale'):
    return
  for name, dtype, value in (
    ('step_counter', 'int', 0),
    ('dynamic_scale', 'float32', optimizer.initial_scale),
  ):
    variable = optimizer.add_variable(
      shape=(),
      dtype=dtype,
      initializer=keras.initializers.Constant(value),
      aggregation='none',
      name=name,
    )
    setattr(optimizer, name, variable)


def _build_with_scale(optimizer, var_list):
  """Builds an optimizer whose loss scale may already exist because of a step."""
  _make_scale(optimizer)
  optimizer.inner_optimizer.build(var_list)
  super(keras.optimizers.LossScaleOptimizer, optimizer).build(var_list)


def _scale_by_variable(optimizer, loss):
  """Scales the loss by a variable in a traced step.

  Keras scales by a number before it builds the optimizer. The number would stay
  in the step, because our steps are not traced again after they have created
  variables.
  """
  if not optimizer.built and not tf.executing_eagerly():
    with keras.name_scope(optimizer.name, caller=optimizer):
      _make_scale(optimizer)
    return keras.ops.multiply(loss, optimizer.dynamic_scale)
  return type(optimizer).scale_loss(optimizer, loss)


_WHY = 'a part of a gradient has another norm than the whole'
_requirements.mention(
  base_optimizer.BaseOptimizer.__init__, ['name_scope'], _WHY
)
for _signature in ('build(var_list)', 'scale_loss(loss)'):
  _requirements.method(
    keras.optimizers.LossScaleOptimizer,
    _signature,
    'a number for the scale would stay in a traced step',
  )
_requirements.mention(
  name_scope.name_scope.__enter__, ['name_scope_stack', 'caller'], _WHY
)
