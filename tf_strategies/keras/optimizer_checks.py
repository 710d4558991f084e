"""What a strategy must know of Keras 3, found where Keras gives no handle.

A strategy never sees the optimizer: Keras passes it functions. But those are
methods of, or closures over, the objects in question, so that is where this
module looks. It only reads.
"""

from __future__ import annotations

import keras

from tf_strategies import _tf_internal, errors

_WAY_OUT = (
  'wrap the optimizer: tfs.keras.DistributedOptimizer(optimizer), which '
  'reduces the gradients before Keras clips them'
)

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


def check_losses(fn, strategy_name: str) -> None:
  """Refuses losses of a model whose parts do not add up to the whole.

  Args:
    fn: what runs on each replica; only a model's train step is looked at.
    strategy_name: for the message.

  Raises:
    UnsupportedOptionError: naming the loss's reduction.
  """
  model = getattr(fn, '__self__', None)
  if fn.__name__ != 'train_step' or not isinstance(model, keras.Model):
    return
  for loss in keras.tree.flatten(getattr(model, 'loss', None)):
    reduction = getattr(loss, 'reduction', 'sum_over_batch_size')
    if reduction == 'mean_with_sample_weight':
      raise errors.UnsupportedOptionError(
        f'{type(loss).__name__}(reduction={reduction!r}) under {strategy_name}',
        "'sum_over_batch_size'; each replica would divide by the sum of its "
        'own weights, and the mean of such means is not the whole mean',
        "use 'sum_over_batch_size' with sample weights of mean 1",
      )
    weighting = getattr(_without_loss_scale(model), 'weighting', None)
    if reduction in ('sum', 'none', None) and weighting == 'rows':
      raise errors.UnsupportedOptionError(
        f'{type(loss).__name__}(reduction={reduction!r}) with '
        "DistributedOptimizer(weighting='rows')",
        'a loss that is a mean over rows',
        "use reduction='sum_over_batch_size', or "
        "DistributedOptimizer(optimizer, weighting='none')",
      )


def _without_loss_scale(model):
  optimizer = model.optimizer
  if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
    return optimizer.inner_optimizer
  return optimizer


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
