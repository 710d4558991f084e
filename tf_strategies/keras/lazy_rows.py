"""`LazyRows`: an optimizer that updates only the rows which a batch looks up."""

from __future__ import annotations

import operator

import keras

from tf_strategies import _keras_internal, _tf_internal, errors
from tf_strategies.keras import (
  optimizer_checks,
  optimizer_wrapper,
  row_updates,
)


@keras.saving.register_keras_serializable(package='tf_strategies')
class LazyRows(
  _tf_internal.TrackedAsAnother, optimizer_wrapper.OptimizerWrapper
):
  """Has a Keras optimizer update only those rows of a table that have a gradient.

  To Keras's Adam, and to whatever keeps a momentum or an average, all rows of a table
  change in every step: those that no example of the batch looked up by what they
  remember. A step then takes as long as the table is large. With this wrapper such
  rows stay as they are, weights and state, until they are looked up (the "lazy" Adam
  of TensorFlow Addons, the sparse one of PyTorch). That is another algorithm, so it
  is never chosen for you; it is the same on one device and under every strategy.

  The gradients of one row in a batch are added up first. Keras squares them one by
  one: so Adagrad too gives another result in it, if a batch has a row twice, and on
  parameter servers sends less. Dense gradients are as ever.

  Weight decay and moving averages of weights (`use_ema`) still go over all rows.

  Example:

    >>> import tensorflow as tf
    >>> table = keras.Variable([[1.0], [2.0], [3.0]])
    >>> optimizer = LazyRows(keras.optimizers.SGD(1.0, momentum=0.5))
    >>> for row in (0, 2):
    ...   gradient = tf.IndexedSlices(
    ...     tf.constant([[0.25]]), tf.constant([row]), tf.constant([3, 1]))
    ...   optimizer.apply([gradient], [table])
    >>> table.numpy().tolist()
    [[0.75], [2.0], [2.75]]

  Args:
    optimizer: to wrap, one that treats each element by itself; also its name or its
      configuration. For mixed precision put `keras.optimizers.LossScaleOptimizer`
      outside, as `compile` does.
    name: of this optimizer.

  Raises:
    UnsupportedOptionError: an optimizer that wraps another, or looks at a variable
      as a whole, or accumulates gradients, which makes them dense.
  """

  def __init__(
    self,
    optimizer: keras.optimizers.Optimizer | str | dict,
    name: str | None = None,
    **kwargs,
  ):
    name = 'lazy_rows' if name is None else name
    super().__init__(optimizer, name, **kwargs)
    inner = self.inner_optimizer
    kind = type(inner).__name__
    if hasattr(inner, 'inner_optimizer'):
      raise errors.UnsupportedOptionError(
        f'LazyRows({kind}(...))',
        'an optimizer that wraps no other',
        f'write {kind}(LazyRows(optimizer))',
      )
    optimizer_checks.check_has_one_rule(inner, f'LazyRows({kind}(...))')
    if kind in optimizer_checks.WHOLE_VARIABLE_OPTIMIZERS:
      raise errors.UnsupportedOptionError(
        f'LazyRows({kind}(...))',
        'an optimizer that updates each element by itself, such as Adam',
        'use another optimizer, or leave out LazyRows',
      )
    if inner.gradient_accumulation_steps:
      raise errors.UnsupportedOptionError(
        f'LazyRows({kind}(gradient_accumulation_steps='
        f'{inner.gradient_accumulation_steps}))',
        'gradients of rows; what Keras accumulates is dense',
        'leave one of them out',
      )
    _keras_internal.replace_update(inner, row_updates.update_lazily)

  # It has no variables of its own: a file that was saved with the wrapper loads
  # without it, and the reverse.
  variables = property(operator.attrgetter('inner_optimizer.variables'))
  set_weights = optimizer_wrapper.inner('set_weights')
  save_own_variables = optimizer_wrapper.inner('save_own_variables')
  load_own_variables = optimizer_wrapper.inner('load_own_variables')

  def _tracked(self):
    return vars(self).get('inner_optimizer')

  def apply(self, grads, trainable_variables=None):
    """Updates the variables, of those with sparse gradients the rows in them."""
    variables = self.built_on(trainable_variables)
    self.inner_optimizer.apply(list(grads), variables)
