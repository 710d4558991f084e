"""`LazyRows`: an optimizer that updates only the rows that a batch looks up."""

import functools
import operator

import keras

from tf_strategies import _tf_internal, errors
from tf_strategies.keras import optimizer_wrapper
from tf_strategies.keras.tables import row_updates


@keras.saving.register_keras_serializable(package='tf_strategies')
@optimizer_wrapper.has_options
class LazyRows(
  _tf_internal.TrackedAsAnother, optimizer_wrapper.OptimizerWrapper
):
  """Makes a Keras optimizer update only the rows of a table that have a gradient.

  Keras's Adam, and every optimizer with a momentum or an average, changes all rows of a
  table in every step: rows that the batch did not look up still move by their momentum.
  The time of a step then grows with the table. With this wrapper, the weights and the
  state of such rows do not change until they are looked up. This is like the "lazy" Adam
  of TensorFlow Addons and PyTorch's sparse Adam. It is a different algorithm, so it is
  never chosen for you. It gives the same results on one device and under every strategy.

  The gradients of a row that occurs several times in a batch are added first. Keras
  squares each. So Adagrad, too, gives different results if a batch repeats a row.
  Workers send fewer bytes to parameter servers. Dense gradients are not affected.

  Weight decay and moving averages of weights (`use_ema`) still update all rows.

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
    optimizer: optimizer to wrap, or its name or configuration. It must update each
      element independently. For mixed precision put
      `keras.optimizers.LossScaleOptimizer` outside, as `compile` does.
    name: name of this optimizer.

  Raises:
    UnsupportedOptionError: if the optimizer wraps another one, needs a variable as a
      whole, or accumulates gradients, which makes them dense.
  """

  def __init__(
    self,
    optimizer: keras.optimizers.Optimizer | str | dict,
    name: str | None = None,
  ):
    name = 'lazy_rows' if name is None else name
    super().__init__(optimizer, name)
    inner = self.inner_optimizer
    kind = type(inner).__name__
    optimizer_wrapper.check_has_one_rule(inner, f'LazyRows({kind}(...))')
    if kind in optimizer_wrapper.WHOLE_VARIABLE_OPTIMIZERS:
      raise errors.UnsupportedOptionError(
        f'LazyRows({kind}(...))',
        'an optimizer that updates each element by itself, such as Adam',
        'use another optimizer, or leave out LazyRows',
      )
    if inner.gradient_accumulation_steps:
      raise errors.UnsupportedOptionError(
        f'LazyRows({kind}(gradient_accumulation_steps='
        f'{inner.gradient_accumulation_steps}))',
        'LazyRows without gradient accumulation',
        'leave one of them out: what Keras accumulates is dense',
      )
    # Keras would track what is set otherwise.
    vars(inner)['update_step'] = functools.partial(
      row_updates.update_lazily, inner
    )

  # The wrapper has no variables. A file saved with it loads without it, and the
  # other way round.
  variables = property(operator.attrgetter('inner_optimizer.variables'))
  set_weights = optimizer_wrapper.inner('set_weights')
  save_own_variables = optimizer_wrapper.inner('save_own_variables')
  load_own_variables = optimizer_wrapper.inner('load_own_variables')

  def _tracked(self):
    return vars(self).get('inner_optimizer')

  def apply(self, grads, trainable_variables=None):
    """Updates the variables. If a gradient is sparse, only its rows are updated."""
    variables = self.built_on(trainable_variables)
    self.inner_optimizer.apply(list(grads), variables)
