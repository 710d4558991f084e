"""`DistributedOptimizer`: replicas count by their rows in a loop of one's own.

Every optimizer reduces before Keras clips, accumulates and unscales (see
`_keras_internal.py`). In a loop that calls `strategy.run` a replica with five rows
would still count as much as one with sixteen; the wrapper weighs its loss.
"""

from __future__ import annotations

import functools
import threading

import keras
import tensorflow as tf

from tf_strategies import _keras_internal, option_checks
from tf_strategies.keras import gradient_reducer, optimizer_wrapper

_WEIGHTINGS = ('rows', 'none')


@keras.saving.register_keras_serializable(package='tf_strategies')
class DistributedOptimizer(optimizer_wrapper.StatelessWrapper):
  """Wraps a Keras optimizer whose gradients count by each replica's rows.

  For a loop of your own, which calls `strategy.run`: there batches that give the
  replicas uneven rows (or none) equal one device's with it. In the steps of a
  Keras model (`fit`, a `train_step`) it changes nothing: they equal one device's
  anyway. Outside of a strategy, and with one replica, it is the inner optimizer.

  For mixed precision, put `keras.optimizers.LossScaleOptimizer` outside (what
  `compile` does by itself under `mixed_float16`), or inside in a loop of your
  own.

  Example:

    >>> optimizer = DistributedOptimizer(
    ...   keras.optimizers.Adam(1e-3, global_clipnorm=1.0))
    >>> float(optimizer.learning_rate)
    0.0010000000474974513

  Args:
    optimizer: the Keras optimizer to wrap; also its name or its configuration.
    weighting: what each replica's loss is. 'rows': a mean over its own rows
      divided by the number of replicas N, as `fit` and Keras's loss objects compute
      it (`tf.reduce_mean` has to be divided by N: with it alone gradients are N
      times as large); the gradient of a replica with n_i rows then counts
      N * n_i / sum(n). 'none': a sum over its
      rows divided by the global batch size, as `tf.nn.compute_average_loss`
      computes it; gradients are just added.
    name: of this optimizer.

  Raises:
    UnsupportedOptionError: `optimizer` is wrapped already or `weighting` is
      unknown; at the first step, a strategy that is not one of tf_strategies.
  """

  def __init__(
    self,
    optimizer: keras.optimizers.Optimizer | str | dict,
    weighting: str = 'rows',
    name: str | None = None,
    **kwargs,
  ):
    name = 'distributed_optimizer' if name is None else name
    super().__init__(optimizer, name, **kwargs)
    option_checks.check_choice(
      'weighting',
      weighting,
      _WEIGHTINGS,
      "use 'rows' with fit, 'none' with tf.nn.compute_average_loss",
    )
    self.weighting = weighting

  def apply(self, grads, trainable_variables=None):
    """Reduces this replica's gradients over replicas and applies them.

    Raises:
      UnsupportedOptionError: called outside of replica context, or under a
        strategy that is not one of tf_strategies.
    """
    grads = list(grads)
    trainable_variables = self.built_on(trainable_variables)
    variables = trainable_variables or _keras_internal.trainable_variables(self)
    self.check_applies(variables)
    gradient_reducer.current().check()
    if not self._pop_loss_weighed():
      weight = self._weight()
      if weight is not None:
        grads = [None if g is None else _multiply(g, weight) for g in grads]
    self.inner_optimizer.apply(grads, trainable_variables)

  def _weight(self):
    """What a mean over this replica's rows counts; None for 1."""
    if self.weighting == 'none':
      return None
    return gradient_reducer.current().row_weight()

  def scale_loss(self, loss):
    """Weighs the loss by this replica's rows, and scales it as the inner does.

    `fit` calls this before it takes gradients; call it in a loop of your own as
    well. Otherwise `apply` weighs the gradients, which is inexact for layers that
    synchronise in the forward pass (`BatchNormalization(synchronized=True)`):
    they carry gradients from replica to replica before `apply` sees them.
    """
    loss = self.inner_optimizer.scale_loss(loss)
    in_replica = not tf.distribute.in_cross_replica_context()
    weight = self._weight() if in_replica else None
    if weight is not None:
      loss = loss * tf.cast(weight, loss.dtype)
      _weighed.optimizers = _weighed.optimizers | {id(self)}
    return loss

  def _pop_loss_weighed(self) -> bool:
    """Returns whether `scale_loss` weighed the loss that these gradients come from."""
    before = _weighed.optimizers
    _weighed.optimizers = before - {id(self)}
    return id(self) in before

  def get_config(self):
    """The configuration, with the inner optimizer's in it."""
    return {**super().get_config(), 'weighting': self.weighting}


class _Weighed(threading.local):
  """The optimizers that weighed a loss in this thread; a replica has its own."""

  optimizers: frozenset[int] = frozenset()


_weighed = _Weighed()


def _multiply(gradient, weight):
  if isinstance(gradient, tf.IndexedSlices):
    return tf.IndexedSlices(
      _multiply(gradient.values, weight),
      gradient.indices,
      gradient.dense_shape,
    )
  gradient = tf.convert_to_tensor(gradient)
  return gradient * tf.cast(weight, gradient.dtype)


def _save_unwrapped(get_compile_config):
  """Saves a model's optimizer without a wrapper that is nothing by itself.

  The file then loads where this package is not imported.
  """

  @functools.wraps(get_compile_config)
  def get_config(self):
    config = get_compile_config(self)
    return config and _unwrapped(config)

  return get_config


def _unwrapped(config):
  if isinstance(config, list):
    return [_unwrapped(part) for part in config]
  if not isinstance(config, dict):
    return config
  if config.get('registered_name') == 'tf_strategies>DistributedOptimizer':
    options = config['config']
    if options['weighting'] == 'rows':
      return _unwrapped(options['optimizer'])
  return {key: _unwrapped(value) for key, value in config.items()}


keras.Model.get_compile_config = _save_unwrapped(keras.Model.get_compile_config)
