"""Optimizers in each other, and their `apply`: strategies hear of gradients first."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator

import keras
import tensorflow as tf
from keras.src.optimizers import base_optimizer

from tf_strategies._keras_internal import steps


def chain(optimizer) -> Iterator[keras.optimizers.Optimizer]:
  """An optimizer, and those that it wraps, the outermost first."""
  while optimizer is not None:
    yield optimizer
    optimizer = getattr(optimizer, 'inner_optimizer', None)


def _reduce_first(apply):
  """Reduces gradients before they are clipped, accumulated and unscaled."""

  @functools.wraps(apply)
  def apply_reduced(self, grads, trainable_variables=None):
    extended = tf.distribute.get_strategy().extended
    reduce_first = getattr(extended, 'apply_gradients', None)
    if reduce_first is None:
      apply(self, grads, trainable_variables)
      return
    variables = trainable_variables
    if variables is not None:
      variables = list(variables)
    reduce_first(
      self,
      list(grads),
      variables,
      lambda reduced: apply(self, reduced, variables),
    )

  return apply_reduced


steps.change(
  base_optimizer.BaseOptimizer,
  'apply(grads, trainable_variables)',
  _reduce_first,
  'a part of a gradient has another norm than the whole',
)


def _mark_first(apply):
  """Lets a strategy know, in a model's step, which tensors are gradients."""

  @functools.wraps(apply)
  def apply_marked(self, grads, trainable_variables=None):
    mark = getattr(tf.distribute.get_strategy().extended, 'mark', None)
    if mark is not None and trainable_variables is not None:
      trainable_variables = list(trainable_variables)
      grads = mark(list(grads), trainable_variables)
    apply(self, grads, trainable_variables)

  return apply_marked


steps.change(
  keras.optimizers.LossScaleOptimizer,
  'apply(grads, trainable_variables)',
  _mark_first,
  'gradients are added up before they are found to be finite',
)


def _of_the_innermost(swap):
  """Swaps the averages of the optimizer that has them: Keras looks into one wrapper."""

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
