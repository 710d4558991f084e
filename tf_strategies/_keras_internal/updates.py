"""Nested optimizers and their `apply`: strategies see gradients first."""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import types
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf
from keras.src.optimizers import base_optimizer
from keras.src.saving import saving_lib
from keras.src.utils import tracking

from tf_strategies import errors
from tf_strategies._keras_internal import steps


def chain(optimizer) -> Iterator[keras.optimizers.Optimizer]:
  """Yields an optimizer and the optimizers that it wraps, from outside to inside."""
  while optimizer is not None:
    yield optimizer
    optimizer = getattr(optimizer, 'inner_optimizer', None)


def before_apply(owner: type, see: Callable[..., None], why: str) -> None:
  """Makes `see(optimizer, gradients, variables, apply)` call `apply(gradients)`."""

  def how(apply):
    @functools.wraps(apply)
    def apply_seen(self, grads, trainable_variables=None):
      variables = trainable_variables
      if variables is not None:
        variables = list(variables)
      see(
        self,
        list(grads),
        variables,
        lambda grads: apply(self, grads, variables),
      )

    return apply_seen

  steps.change(owner, 'apply(grads, trainable_variables)', how, why)


def _reduce_first(optimizer, gradients, variables, apply):
  """Reduces gradients before they are clipped, accumulated and unscaled."""
  made_in = optimizer._distribution_strategy.extended
  extended = tf.distribute.get_strategy().extended
  if (
    not tf.distribute.has_strategy() and getattr(made_in, 'most_workers', 1) > 1
  ):
    raise errors.UnsupportedOptionError(
      f"{type(optimizer).__name__}.apply outside of the strategy's steps",
      'a call in a step, in which the workers add up their gradients',
      'pass the training step to strategy.step, or to strategy.run',
    )
  if hasattr(extended, 'apply_gradients'):
    if tf.distribute.in_cross_replica_context():
      raise errors.UnsupportedOptionError(
        f'{type(optimizer).__name__}.apply in cross-replica context',
        'a call in a step',
        'pass the training step to strategy.step, or to strategy.run',
      )
    extended.apply_gradients(optimizer, gradients, variables, apply)
  else:
    apply(gradients)


for _owner, _reason in (
  (
    base_optimizer.BaseOptimizer,
    'a part of a gradient has another norm than the whole',
  ),
  (
    keras.optimizers.LossScaleOptimizer,
    'gradients are added up, or divided, before they are found to be finite',
  ),
):
  before_apply(_owner, _reduce_first, _reason)


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


def _build_with_scale(build):
  """Builds an optimizer whose loss scale may already exist because of a step."""

  @functools.wraps(build)
  def build_with_scale(self, var_list):
    _make_scale(self)
    self.inner_optimizer.build(var_list)
    super(keras.optimizers.LossScaleOptimizer, self).build(var_list)

  return build_with_scale


def _scale_by_variable(scale_loss):
  """Scales the loss by a variable in a traced step.

  Keras scales by a number before it builds the optimizer. The number would stay
  in the step, because our steps are not traced again after they have created
  variables.
  """

  @functools.wraps(scale_loss)
  def scale_loss_by_variable(self, loss):
    extended = self._distribution_strategy.extended
    is_ours = hasattr(extended, 'apply_gradients')
    if self.built or tf.executing_eagerly() or not is_ours:
      return scale_loss(self, loss)
    with keras.name_scope(self.name, caller=self):
      _make_scale(self)
    return keras.ops.multiply(loss, self.dynamic_scale)

  return scale_loss_by_variable


for _signature, _how in (
  ('build(var_list)', _build_with_scale),
  ('scale_loss(loss)', _scale_by_variable),
):
  steps.change(
    keras.optimizers.LossScaleOptimizer,
    _signature,
    _how,
    'a number for the scale would stay in a traced step',
  )


def _of_the_innermost(swap):
  """Swaps the averages of the innermost optimizer.

  Keras looks inside one wrapper only.
  """

  @functools.wraps(swap)
  def swap_of_the_innermost(self):
    *_, optimizer = chain(self.model.optimizer)
    seen = copy.copy(self)
    seen.set_model(types.SimpleNamespace(optimizer=optimizer))
    swap(seen)

  return swap_of_the_innermost


for _method in ('_swap_variables()', '_finalize_ema_values()'):
  steps.change(
    keras.callbacks.SwapEMAWeights,
    _method,
    _of_the_innermost,
    'wrappers of optimizers, and loss scales, may be in each other',
  )


def _outside_of_scopes(find):
  """Creates the objects that Keras uses to find default attributes outside all
  scopes.

  In a scope, the variables of such an optimizer would wait for workers that are
  not saving. A new thread is outside of every scope.
  """

  @functools.wraps(find)
  @functools.cache
  def find_outside(obj_type):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      return pool.submit(find, obj_type).result()

  return find_outside


steps.change(
  saving_lib,
  'get_attr_skipset(obj_type)',
  _outside_of_scopes,
  'a worker may save alone inside of a scope',
)
