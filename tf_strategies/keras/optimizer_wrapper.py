"""The base class of wrappers of Keras optimizers."""

import functools
import operator
from collections.abc import Iterable

import keras

from tf_strategies import _keras_internal, errors, option_checks

# Options that depend on the norm or the size of a gradient.
CLIPPING = ('clipnorm', 'clipvalue', 'global_clipnorm')
# Optimizers that need a whole variable and cannot update a part.
WHOLE_VARIABLE_OPTIMIZERS = ('Adafactor', 'Lamb', 'Muon')


def has_any(
  optimizer: keras.optimizers.Optimizer, options: Iterable[str]
) -> bool:
  """Returns whether an optimizer uses one of some options."""
  return any(getattr(optimizer, option, None) is not None for option in options)


# Decorates each wrapper. Keras's other options belong to the inner optimizer.
has_options = functools.partial(
  option_checks.has_options,
  fix='set options such as clipnorm on the inner optimizer',
)


def inner(name: str):
  """Returns a method that calls the inner optimizer's method of that name."""

  def method(self, *args, **kwargs):
    return getattr(self.inner_optimizer, name)(*args, **kwargs)

  method.__name__ = name
  method.__doc__ = f"The inner optimizer's `{name}`."
  return method


def _setting(name: str):
  """Returns a property that is the inner optimizer's of that name."""
  return property(
    operator.attrgetter(f'inner_optimizer.{name}'),
    lambda self, value: setattr(self.inner_optimizer, name, value),
    doc=f"The inner optimizer's `{name}`.",
  )


def optimizer_of(argument: str, optimizer, fix: str):
  """Returns a Keras optimizer, given the optimizer, its name or configuration.

  Raises:
    UnsupportedOptionError: if the argument does not describe an optimizer.
  """
  what = f'{argument}={optimizer!r}'
  expected = 'a Keras optimizer, its name or its configuration'
  is_one = isinstance(optimizer, str | dict | keras.optimizers.Optimizer)
  option_checks.check(is_one and optimizer, what, expected, fix)
  try:
    return keras.optimizers.get(optimizer)
  except ValueError as e:
    raise errors.UnsupportedOptionError(f'{what} ({e})', expected, fix) from e


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


class OptimizerWrapper(keras.optimizers.Optimizer):
  """Behaves like the inner optimizer, except for the methods that a subclass
  changes.

  Args:
    optimizer: optimizer to wrap, or its name or configuration.
    name: name of the wrapper.

  Raises:
    UnsupportedOptionError: if `optimizer` is not an optimizer, or wraps another.
  """

  def __init__(self, optimizer, name: str):
    kind = type(self).__name__
    optimizer = optimizer_of(
      'optimizer', optimizer, f"write for instance {kind}('adam')"
    )
    option_checks.check(
      not hasattr(optimizer, 'inner_optimizer'),
      f'{kind}({type(optimizer).__name__}(...))',
      'an optimizer that wraps no other',
      'pass the inner optimizer. To scale the loss, write '
      f'LossScaleOptimizer({kind}(optimizer))',
    )
    option_checks.check(
      isinstance(name, str) and name and '/' not in name,
      f'name={name!r} of {kind}',
      'a string without /',
      'leave it out',
    )
    _keras_internal.allow_attributes(self)
    self.inner_optimizer = optimizer
    super().__init__(
      learning_rate=0.0,
      name=name,
      loss_scale_factor=optimizer.loss_scale_factor,
    )

  iterations = property(operator.attrgetter('inner_optimizer.iterations'))

  learning_rate = _setting('learning_rate')
  loss_scale_factor = _setting('loss_scale_factor')

  def build(self, variables):
    """Creates the inner optimizer's variables."""
    if not self.inner_optimizer.built:
      self.inner_optimizer.build(variables)
    # The wrapper has no slots, but every optimizer must know its variables.
    super().build(variables)
    _keras_internal.show_averages(self)

  def built_on(self, variables) -> list | None:
    """Returns the variables passed to `apply`, if any, and builds the optimizer."""
    if variables is None:
      return None
    variables = list(variables)
    if not self.built:
      self.build(variables)
    return variables

  scale_loss = inner('scale_loss')
  update_step = inner('update_step')
  finalize_variable_values = inner('finalize_variable_values')
  exclude_from_weight_decay = inner('exclude_from_weight_decay')

  def __dir__(self):
    # Keras would save every attribute listed here. These optimizers are already
    # saved, with the wrapper's variables.
    saved = 'inner_optimizer', 'outer'
    return [name for name in super().__dir__() if name not in saved]

  def get_config(self):
    """Returns the configuration, including the inner optimizer's."""
    return {
      'name': self.name,
      'optimizer': keras.saving.serialize_keras_object(self.inner_optimizer),
    }
