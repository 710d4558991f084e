"""Optimizers' `apply`: strategies hear of gradients first."""

from __future__ import annotations

import functools

import keras
import tensorflow as tf
from keras.src.optimizers import base_optimizer

from tf_strategies._keras_internal import steps


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
