"""Losses and training steps without a strategy, as users write them.

Each gives the same results as on one device. The last batch is too small to
divide evenly.
"""

import keras
import numpy as np
import tensorflow as tf

from tests.programs import common

layers, losses, ops = keras.layers, keras.losses, keras.ops
_ROWS = 78  # Two batches of 32, and one of 14.
_CLASSES = 4


def _data():
  rng = np.random.default_rng(3)
  x = rng.normal(size=(_ROWS, 6)).astype('f4')
  return x, rng.integers(0, _CLASSES, _ROWS), rng.random(_ROWS).astype('f4')


def _tokens():
  """Returns token rows of different lengths, so token counts differ by replica."""
  rng = np.random.default_rng(4)
  tokens = rng.integers(1, 9, (_ROWS, 7))
  tokens[np.arange(7) >= rng.integers(1, 8, (_ROWS, 1))] = 0
  return tokens, rng.integers(0, _CLASSES, (_ROWS, 7))


def _dense_model():
  return keras.Sequential(
    [
      layers.Input([6]),
      layers.Dense(8, 'tanh', kernel_regularizer='l2'),
      layers.Dense(_CLASSES),
    ]
  )


def _adam(**options):
  return keras.optimizers.Adam(1e-2, **options)


def _fit(reduction='sum_over_batch_size', weighted=False, **options):
  """Returns a program. `options` are passed to the optimizer."""

  def program():
    x, y, weights = _data()
    return common.train(
      _dense_model(),
      x,
      y,
      _adam(**options),
      common.crossentropy(reduction=reduction),
      ['accuracy'],
      shuffle=False,
      sample_weight=weights if weighted else None,
    )

  return program


def _positions():
  return common.Positions(9, 7, 4)


def _of_tokens(embedding, optimizer):
  def program():
    x, y = _tokens()
    model = keras.Sequential(
      [
        layers.Input([7], dtype='int32'),
        embedding(),
        layers.Dense(_CLASSES),
      ]
    )
    return common.train(model, x, y, optimizer(), shuffle=False)

  return program


class _Own(keras.Model):
  """A typical `train_step`. Its loss is `loss_of(model, x, y, outputs)`."""

  def __init__(self, loss_of):
    super().__init__(name='own')
    self.net = _dense_model()
    self.loss_of = loss_of
    self.tracker = keras.metrics.Mean(name='loss')
    self.accuracy = keras.metrics.SparseCategoricalAccuracy(name='accuracy')

  @property
  def metrics(self):
    return [self.tracker, self.accuracy]

  def call(self, x):
    return self.net(x)

  def train_step(self, data):
    x, y = data
    with tf.GradientTape() as tape:
      outputs = self(x, training=True)
      loss = self.loss_of(self, x, y, outputs)
    common.descend(self.optimizer, tape, loss, self.trainable_variables)
    self.tracker.update_state(loss)
    self.accuracy.update_state(y, outputs)
    return {m.name: m.result() for m in self.metrics}


def per_row(y, outputs):
  return losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)


def with_own_step(loss_of):
  def program():
    x, y, _ = _data()
    model = _Own(loss_of)
    model.compile(_adam(global_clipnorm=0.1), common.crossentropy())
    return common.fit(model, x, y, shuffle=False), model.get_weights()

  return program


def _several_outputs():
  x, y, _ = _data()
  inputs = layers.Input([6])
  hidden = layers.Dense(8, 'tanh')(inputs)
  outputs = {
    'kind': layers.Dense(_CLASSES, name='kind')(hidden),
    'sum': layers.Dense(1, name='sum')(hidden),
  }
  model = keras.Model(inputs, outputs)
  model.compile(
    _adam(),
    {'kind': common.crossentropy(), 'sum': 'mse'},
    loss_weights={'kind': 1.0, 'sum': 0.3},
    metrics={'sum': ['mae']},
  )
  y = {'kind': y, 'sum': x.sum(1)}
  return common.results(model, x, y, shuffle=False)


def _divided(model, x, y, outputs):
  """Divides the loss by the number of replicas, as programs for tf.distribute do."""
  replicas = tf.distribute.get_strategy().num_replicas_in_sync
  return ops.mean(per_row(y, outputs)) / replicas


def _of_rows(function):
  """Returns a program whose loss is a function of the losses of rows."""
  return with_own_step(
    lambda model, x, y, outputs: function(per_row(y, outputs))
  )


def _average_of_all_replicas(model, x, y, outputs):
  """Asks for the number of replicas, as programs for tf.distribute do."""
  replicas = tf.distribute.get_strategy().num_replicas_in_sync
  rows = ops.shape(outputs)[0] * replicas
  return tf.nn.compute_average_loss(per_row(y, outputs), global_batch_size=rows)


def _average_and_regularization(model, x, y, outputs):
  loss = tf.nn.compute_average_loss(per_row(y, outputs))
  return loss + tf.nn.scale_regularization_loss(model.net.losses)


def _gradient_penalty(model, x, y, outputs):
  with tf.GradientTape() as tape:
    tape.watch(x)
    total = ops.sum(model.net(x))
  slope = ops.sqrt(ops.sum(ops.square(tape.gradient(total, x)), 1) + 1e-6)
  return ops.mean(per_row(y, outputs)) + ops.mean(ops.square(slope - 1.0))


def _quotient(model, x, y, outputs):
  mask = ops.cast(x[:, 0] > 0, 'float32')
  return ops.sum(per_row(y, outputs) * mask) / (ops.sum(mask) + 1e-6)


def _root(model, x, y, outputs):
  square = ops.square(outputs - ops.one_hot(y, _CLASSES))
  return ops.sqrt(ops.mean(square)) + 1e-3 * ops.sum(
    ops.square(model.net.layers[-1].kernel)
  )


def _sparsity(model, x, y, outputs):
  used = ops.mean(ops.sigmoid(model.net.layers[0](x)), axis=0)
  divergence = 0.1 * ops.log(0.1 / used) + 0.9 * ops.log(0.9 / (1.0 - used))
  return ops.mean(per_row(y, outputs)) + ops.sum(divergence)


def _scaled(model, x, y, outputs):
  scale = ops.sqrt(ops.mean(ops.square(outputs), axis=0) + 1e-3)
  return ops.mean(per_row(y, outputs / scale))


def _saliency(model, x, y, outputs):
  with tf.GradientTape() as tape:
    tape.watch(x)
    loss = ops.mean(per_row(y, model.net(x)))
  adversarial = x + 3.0 * tape.gradient(loss, x)
  return ops.mean(per_row(y, model.net(adversarial)))


def _activity():
  x, y, _ = _data()
  model = keras.Sequential(
    [
      layers.Input([6]),
      layers.Dense(8, activity_regularizer='l2'),
      layers.ActivityRegularization(l1=0.1),
      layers.Dense(_CLASSES),
    ]
  )
  return common.train(model, x, y, _adam(), shuffle=False)


class _Adversarial(keras.Model):
  """A model with two networks, two optimizers and two tapes."""

  def __init__(self):
    super().__init__(name='adversarial')
    self.maker = common.linear(6, 6)
    self.critic = common.linear(6, 1)
    self.maker_loss = keras.metrics.Mean(name='maker_loss')
    self.critic_loss = keras.metrics.Mean(name='critic_loss')

  def compile(self, maker_optimizer, critic_optimizer):
    super().compile()
    self.maker_optimizer = maker_optimizer
    self.critic_optimizer = critic_optimizer

  def call(self, x):
    return self.critic(self.maker(x))

  def train_step(self, x):
    with tf.GradientTape() as tape:
      loss = ops.mean(self.critic(self.maker(x))) - ops.mean(self.critic(x))
    weights = self.critic.trainable_weights
    self.critic_optimizer.apply(tape.gradient(loss, weights), weights)
    self.critic_loss.update_state(loss)
    with tf.GradientTape() as tape:
      loss = -ops.mean(self.critic(self.maker(x)))
    weights = self.maker.trainable_weights
    self.maker_optimizer.apply(tape.gradient(loss, weights), weights)
    self.maker_loss.update_state(loss)
    return {m.name: m.result() for m in self.metrics}


def _two_optimizers():
  x, _, _ = _data()
  model = _Adversarial()
  model.compile(_adam(clipnorm=0.01), _adam(clipnorm=0.01))
  return common.fitted(model, common.batches(x))


def _compiled():
  """Trains a model that XLA compiles, which changes its random numbers."""
  x, y, _ = _data()
  model = keras.Sequential(
    [layers.Input([6]), layers.Dropout(0.3, seed=5), layers.Dense(_CLASSES)]
  )
  model.compile(_adam(clipnorm=0.1), common.crossentropy(), jit_compile=True)
  # All rows are in one batch, so XLA compiles one shape.
  return common.fitted(model, x, y, shuffle=False, batch_size=_ROWS)


PROGRAMS = {
  'clipped': _fit(global_clipnorm=0.1),
  'compiled': _compiled,
  'accumulated': _fit(gradient_accumulation_steps=2, clipnorm=0.1),
  'decayed_and_averaged': _fit(
    weight_decay=0.1, use_ema=True, ema_overwrite_frequency=2
  ),
  'sum': _fit('sum', weighted=True),
  'mean_with_sample_weight': _fit('mean_with_sample_weight', weighted=True),
  'masked': _of_tokens(
    lambda: layers.Embedding(9, 4, mask_zero=True),
    lambda: keras.optimizers.SGD(0.1),
  ),
  'positions_adam': _of_tokens(_positions, _adam),
  'positions_rmsprop': _of_tokens(
    _positions, lambda: keras.optimizers.RMSprop(1e-2)
  ),
  'positions_sgd_clipped': _of_tokens(
    _positions, lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1)
  ),
  'several_outputs': _several_outputs,
  'mean': _of_rows(ops.mean),
  'row_by_row': _of_rows(lambda rows: rows),
  'compute_loss': with_own_step(
    lambda model, x, y, outputs: model.compute_loss(x, y, outputs)
  ),
  'average': with_own_step(_average_and_regularization),
  'average_of_all_replicas': with_own_step(_average_of_all_replicas),
  'average_of_32': _of_rows(
    lambda rows: tf.nn.compute_average_loss(rows, global_batch_size=32)
  ),
  'divided_by_own_rows': _of_rows(
    lambda rows: ops.sum(rows) / ops.cast(ops.shape(rows)[0], 'float32')
  ),
  'logsumexp': _of_rows(ops.logsumexp),
  'root_of_compute_loss': with_own_step(
    lambda model, x, y, outputs: ops.sqrt(model.compute_loss(x, y, outputs))
  ),
  'sum_of_rows': _of_rows(ops.sum),
  'divided': with_own_step(_divided),
  'sum_by_batch_size': _of_rows(lambda rows: tf.reduce_sum(rows) * (1.0 / 32)),
  'quotient': with_own_step(_quotient),
  'root': with_own_step(_root),
  'sparsity': with_own_step(_sparsity),
  'scaled': with_own_step(_scaled),
  'saliency': with_own_step(_saliency),
  'activity_regularizer': _activity,
  'gradient_penalty': with_own_step(_gradient_penalty),
  'two_optimizers': _two_optimizers,
}
