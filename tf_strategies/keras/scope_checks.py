"""Rejects objects made in the scope of a strategy other than the training one.

TensorFlow detects some of these mistakes when it traces a step or creates a
variable, but its messages are about its internals. Models are checked before.
"""

import atexit
import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal, errors

# Names of strategies whose scope has not been entered yet, by id.
_unused: dict[int, str] = {}
# Models that were trained without a strategy in the meantime.
_trained_outside: list[str] = []

_FIX = (
  'make the model, its optimizer and its metrics, and call compile, inside one '
  '`with strategy.scope():`'
)


def note_created(strategy: tf.distribute.Strategy) -> None:
  """Records a strategy, to warn at exit if models were trained without it."""
  _unused[id(strategy)] = _name(strategy)


def note_entered(strategy: tf.distribute.Strategy) -> None:
  """Records that the scope of a strategy is entered.

  Raises:
    ScopeError: in the scope of another strategy.
  """
  _unused.pop(id(strategy), None)
  _check_alone(strategy)


def _check_alone(strategy: tf.distribute.Strategy) -> None:
  if (
    tf.distribute.has_strategy()
    and tf.distribute.get_strategy() is not strategy
  ):
    raise errors.ScopeError(
      f'{_name(strategy)} inside the scope of '
      f'{_name(tf.distribute.get_strategy())} (mixing different '
      'tf.distribute.Strategy objects)',
      'one strategy at a time',
      'leave one scope before you enter the other',
    )


def _is_ours(strategy) -> bool:
  return type(strategy).__module__.startswith('tf_strategies.')


def check(model: keras.Model, kind: str) -> None:
  """Checks a model that is about to train, test or predict.

  Raises:
    ScopeError: if a part of it was made outside the strategy's scope, or in the scope
      of another strategy, and would be wrong or fail.
  """
  strategy = model.distribute_strategy
  if _is_ours(strategy) or _is_ours(tf.distribute.get_strategy()):
    _check_alone(strategy)
  optimizers = _keras_internal.optimizers_of(model)
  if not _is_ours(strategy):
    for optimizer in optimizers:
      of_optimizer = _keras_internal.strategy_of(optimizer)
      if kind == 'train' and _is_ours(of_optimizer):
        _refuse(f'model {model.name!r}', None, of_optimizer)
    if kind == 'train':
      _trained_outside.append(model.name)
    return
  if kind == 'train':
    of_model = f' of model {model.name!r}'
    _check_variables(model.trainable_variables, strategy, of_model)
    for optimizer in optimizers:
      if _keras_internal.strategy_of(optimizer) is not strategy:
        _refuse_optimizer(optimizer, strategy)
  if kind != 'predict':
    found = _keras_internal.metric_variables(model)
    _check_variables(found, strategy, ' of a metric')


def check_applying(strategy: tf.distribute.Strategy) -> None:
  """Checks an optimizer, if one is adding up gradients that were not added before.

  Raises:
    ScopeError: the optimizer was made outside the scope, so that it clips and
      accumulates parts of gradients.
  """
  optimizer = _keras_internal.applying_optimizer()
  if optimizer is not None and strategy.num_replicas_in_sync > 1:
    _refuse_optimizer(optimizer, strategy)


@contextlib.contextmanager
def optimizers_checked(strategy: tf.distribute.Strategy) -> Iterator[None]:
  """Replaces what `apply` raises if something was made outside of the scope.

  Raises:
    ScopeError: names the optimizer, or a variable.
  """
  try:
    yield
  except Exception as error:
    optimizer = _keras_internal.failed_optimizer(error)
    if optimizer is not None:
      if _keras_internal.strategy_of(optimizer) is not strategy:
        _refuse_optimizer(optimizer, strategy, error)
      variables = _keras_internal.trainable_variables(optimizer)
      _check_variables(variables, strategy, cause=error)
    raise


def _check_variables(variables, strategy, of='', cause=None) -> None:
  for variable in variables:
    value = getattr(variable, '_value', None)  # None before it exists.
    if value is None or strategy.extended.variable_created_in_scope(value):
      continue
    _refuse(f'variable {variable.path!r}{of}', None, strategy, cause)


@atexit.register
def warn_if_unused() -> None:
  """Warns of strategies that were not used while models trained without one.

  It warns at the end of the program, because earlier models may only serve as a
  comparison.
  """
  for name in set(_unused.values()) if _trained_outside else ():
    logging.warning(
      'Model %r was made outside of strategy.scope() and trained on one device, '
      'and the scope of %s was never entered. To use it, %s.',
      _trained_outside[0],
      name,
      _FIX,
    )


def _refuse_optimizer(optimizer, used_in, cause=None) -> None:
  what = f'{type(optimizer).__name__} {optimizer.name!r}'
  _refuse(what, _keras_internal.strategy_of(optimizer), used_in, cause)


def _refuse(what: str, made_in, used_in, cause=None) -> None:
  is_one = made_in is None or not _is_ours(made_in)
  place = 'outside of any scope' if is_one else f'under {_name(made_in)}'
  raise errors.ScopeError(
    f'{what}, made {place}',
    f'objects that were made in the scope of this {_name(used_in)}',
    _FIX,
  ) from cause


def _name(strategy) -> str:
  return type(strategy).__name__


_keras_internal.check_first(check)
