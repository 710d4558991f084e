"""What a strategy must know of Keras 3, found where Keras gives no handle.

A strategy never sees the optimizer: Keras passes it functions. But those are
methods of, or closures over, the objects in question, so that is where this
module looks. It only reads.
"""

from __future__ import annotations

import weakref

import keras
from absl import logging

from tf_strategies import _tf_internal, errors

_WAY_OUT = (
  'wrap the optimizer: tfs.keras.DistributedOptimizer(optimizer), which '
  'reduces the gradients before Keras clips them'
)

_warned_of_masks = weakref.WeakSet()

# Keras applies these to the gradient of one replica, before the all-reduce.
_LOCAL_OPTIONS = ('clipnorm', 'clipvalue', 'global_clipnorm')


def optimizer_of(fn) -> keras.optimizers.Optimizer | None:
  """The optimizer whose update function `fn` is, or None.

  Args:
    fn: what Keras passes to `strategy.extended.update`: a closure over the
      optimizer.
  """
  fn = _tf_internal.unwrap(fn)
  for cell in getattr(fn, '__closure__', None) or ():
    try:
      content = cell.cell_contents
    except ValueError:  # The cell is still empty.
      continue
    if isinstance(content, keras.optimizers.Optimizer):
      return content
  return None


def check_without_wrapper(optimizer, strategy_name: str) -> None:
  """Refuses options that are wrong unless gradients are reduced first.

  Args:
    optimizer: a Keras optimizer that is about to update variables.
    strategy_name: for the message.

  Raises:
    UnsupportedOptionError: naming the option, its value and the wrapper.
  """
  for option in _LOCAL_OPTIONS:
    value = getattr(optimizer, option, None)
    if value is not None:
      raise errors.UnsupportedOptionError(
        f'{type(optimizer).__name__}({option}={value!r}) under {strategy_name}',
        f'{option} of the whole gradient; Keras would clip the gradient of '
        'each replica, and the sum of clipped gradients is another one',
        _WAY_OUT,
      )


def needs_rows_everywhere(optimizer) -> str | None:
  """The option of an unwrapped optimizer that a rowless replica would spoil.

  An accumulator adds up one replica's gradients before they are reduced, where
  nothing knows any more which of them came from no rows.
  """
  steps = getattr(optimizer, 'gradient_accumulation_steps', None)
  if not steps:
    return None
  return f'{type(optimizer).__name__}(gradient_accumulation_steps={steps})'


def check_model(fn, strategy_name: str) -> None:
  """Refuses a model whose loss or optimizer is wrong under the wrapper.

  Args:
    fn: what runs on each replica; only a model's train step is looked at.
    strategy_name: for the message.

  Raises:
    UnsupportedOptionError: naming the loss's reduction, or two loss scales.
  """
  model = getattr(fn, '__self__', None)
  if not isinstance(model, keras.Model) or fn.__name__ != 'train_step':
    return
  optimizer = model.optimizer
  scale = keras.optimizers.LossScaleOptimizer
  if isinstance(optimizer, scale):
    optimizer = optimizer.inner_optimizer
    # `compile` under mixed_float16 wraps what it gets. The outer scale scales
    # the loss, and both unscale the gradient.
    if isinstance(getattr(optimizer, 'inner_optimizer', None), scale):
      raise errors.UnsupportedOptionError(
        'LossScaleOptimizer(DistributedOptimizer(LossScaleOptimizer(...)))',
        'one LossScaleOptimizer',
        'pass DistributedOptimizer(optimizer) to compile, which scales the '
        'loss by itself, or compile with auto_scale_loss=False',
      )
  weighting = getattr(optimizer, 'weighting', None)
  for loss in keras.tree.flatten(getattr(model, 'loss', None)):
    _check_reduction(loss, weighting, strategy_name)
  _warn_of_masks(model)


def _warn_of_masks(model) -> None:
  """Warns once a model if a mask reaches its loss, which is then inexact."""
  outputs = keras.tree.flatten(getattr(model, 'outputs', None))
  masked = [o for o in outputs if getattr(o, '_keras_mask', None) is not None]
  if masked and model not in _warned_of_masks:
    _warned_of_masks.add(model)
    logging.warning(
      'A mask reaches output %r of model %r. Keras divides the loss by the '
      'unmasked steps of each replica, so replicas with fewer of them count as '
      'much as the others, which is not what one device computes. For an exact '
      'result stop the mask before the loss and pass sample_weight.',
      masked[0].name,
      model.name,
    )


def _check_reduction(loss, weighting: str | None, strategy_name: str) -> None:
  reduction = getattr(loss, 'reduction', 'sum_over_batch_size')
  name = f'{type(loss).__name__}(reduction={reduction!r})'
  if reduction == 'mean_with_sample_weight':
    raise errors.UnsupportedOptionError(
      f'{name} under {strategy_name}',
      "'sum_over_batch_size'; each replica would divide by the sum of its own "
      'weights, and the mean of such means is not the whole mean',
      "use 'sum_over_batch_size' with sample weights of mean 1",
    )
  if reduction in ('sum', 'none', None) and weighting == 'rows':
    raise errors.UnsupportedOptionError(
      f"{name} with DistributedOptimizer(weighting='rows')",
      'a loss that is a mean over rows',
      "use reduction='sum_over_batch_size', or "
      "DistributedOptimizer(optimizer, weighting='none')",
    )


def is_keras_step(fn) -> bool:
  """Whether `fn` is a model's own train, test or predict step."""
  if isinstance(getattr(fn, '__self__', None), keras.Model):
    return True
  # `predict` wraps its step in a local function of the trainer.
  module = getattr(fn, '__module__', '') or ''
  return module.startswith('keras.src.backend.tensorflow')


def is_check_finite(fn) -> bool:
  """Whether `fn` is what loss scaling asks every replica."""
  return (
    isinstance(
      getattr(fn, '__self__', None), keras.optimizers.LossScaleOptimizer
    )
    and fn.__name__ == 'check_finite'
  )
