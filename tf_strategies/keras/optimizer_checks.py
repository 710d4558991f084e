"""Checks options of models and optimizers that would be wrong under a strategy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal, errors, option_checks

_warned_of_masks = weakref.WeakSet()

# Options that depend on the norm or the size of a gradient.
CLIPPING = ('clipnorm', 'clipvalue', 'global_clipnorm')
# Optimizers that need a whole variable and cannot update a part.
WHOLE_VARIABLE_OPTIMIZERS = ('Adafactor', 'Lamb', 'Muon')


def check_model(
  step: _keras_internal.KerasStep | None, strategy: tf.distribute.Strategy
) -> None:
  """Rejects a model whose optimizer is wrong on several replicas.

  It checks only a model's train step.

  Raises:
    UnsupportedOptionError: if there are two loss scales.
  """
  if step is None or step.model is None or step.kind != 'train':
    return
  if strategy.num_replicas_in_sync == 1:
    return
  model = step.model
  optimizer = model.optimizer
  scale = keras.optimizers.LossScaleOptimizer
  if isinstance(optimizer, scale):
    optimizer = optimizer.inner_optimizer
    # Under mixed_float16, `compile` wraps its optimizer. The outer scale scales
    # the loss, and both unscale the gradient.
    if isinstance(getattr(optimizer, 'inner_optimizer', None), scale):
      kind = type(optimizer).__name__
      raise errors.UnsupportedOptionError(
        f'LossScaleOptimizer({kind}(LossScaleOptimizer(...)))',
        'one LossScaleOptimizer',
        f'pass {kind}(optimizer) to compile, which scales the '
        'loss by itself, or compile with auto_scale_loss=False',
      )


def check_step(fn: Any, optimizers: Any) -> None:
  """Raises UnsupportedOptionError for arguments that `strategy.step` rejects."""
  option_checks.check_function(
    'fn', fn, 'pass a function of a batch: strategy.step(train_step)'
  )
  option_checks.check(
    isinstance(optimizers, Sequence),
    f'optimizers={optimizers!r}',
    'a list of Keras optimizers',
    'write strategy.step(train_step, [optimizer])',
  )


def check_losses(fn: Callable, strategy: tf.distribute.Strategy) -> None:
  """Rejects losses that are wrong if Keras sees several replicas.

  Strategies whose steps are written for one device weight every loss
  themselves.

  Raises:
    UnsupportedOptionError: names the loss's reduction.
  """
  step = _keras_internal.step_of(fn)
  if strategy.num_replicas_in_sync == 1 or step is None:
    return
  for loss in keras.tree.flatten(getattr(step.model, 'loss', None)):
    _check_reduction(loss, type(strategy).__name__)
  masked = _keras_internal.masked_outputs(step.model)
  if masked and step.model not in _warned_of_masks:
    _warned_of_masks.add(step.model)
    logging.warning(
      'A mask reaches output %r of model %r. Keras divides the loss by the '
      'unmasked steps of each replica, so replicas with fewer of them count as '
      'much as the others, which is not what one device computes. For an exact '
      'result stop the mask before the loss and pass sample_weight.',
      masked[0].name,
      step.model.name,
    )


def _check_reduction(loss, strategy_name: str) -> None:
  reduction = getattr(loss, 'reduction', 'sum_over_batch_size')
  name = f'{type(loss).__name__}(reduction={reduction!r})'
  option_checks.check(
    reduction != 'mean_with_sample_weight',
    f'{name} under {strategy_name}',
    "reduction='sum_over_batch_size'",
    "use 'sum_over_batch_size' with sample weights of mean 1. Otherwise "
    'each replica divides by the sum of its own weights',
  )


def built_optimizer(model: keras.Model) -> keras.optimizers.Optimizer | None:
  """Returns the optimizer of a compiled model, after building it."""
  optimizer = getattr(model, 'optimizer', None)
  if optimizer is not None and not optimizer.built:
    optimizer.build(model.trainable_variables)
  return optimizer


def check_has_one_rule(
  optimizer: keras.optimizers.Optimizer, what: str
) -> None:
  """Rejects a `MultiOptimizer`, whose own update is never called.

  It chooses an optimizer by a variable's path, and an anchor has a different
  path.

  Raises:
    UnsupportedOptionError: names it as `what`.
  """
  option_checks.check(
    not hasattr(optimizer, 'optimizers'),
    what,
    'an optimizer with one rule for all variables',
    'pass an optimizer such as keras.optimizers.SGD(1.0), or wrap those that '
    'MultiOptimizer chooses from',
  )


def check_partitioned_update(fn: Callable, name: str) -> None:
  """Rejects optimizers that cannot update a part of a variable independently.

  Raises:
    UnsupportedOptionError: names the optimizer and the variable.
  """
  optimizer = _keras_internal.optimizer_of(fn)
  kind = type(optimizer).__name__
  option_checks.check(
    kind not in WHOLE_VARIABLE_OPTIMIZERS,
    f'{kind} with partitioned variable {name!r}',
    'an optimizer that updates each element by itself, such as Adam or SGD',
    'use another optimizer, or cut no variable: '
    'variable_partitioner=lambda shape, dtype: [1] * len(shape)',
  )
