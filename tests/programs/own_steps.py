"""Steps, losses and metrics whose rows can, or cannot, be divided among workers.

Batches have 16 rows; the last has 5.
"""

import tempfile

import keras
import numpy as np
import tensorflow as tf

from tests.programs import common

layers, ops = keras.layers, keras.ops
_ROWS = 37


def _data():
  rng = np.random.default_rng(5)
  x = rng.normal(size=[_ROWS, 6]).astype(np.float32)
  return x, np.eye(3, dtype=np.float32)[np.arange(_ROWS) * 7 % 3]


def _model(make=keras.Model, hidden=None):
  inputs = layers.Input([6])
  hidden = (hidden or layers.Dense(5, 'tanh'))(inputs)
  return make(inputs=inputs, outputs=layers.Dense(3, 'softmax')(hidden))


def _fit(make_model=_model, loss='categorical_crossentropy', **options):
  """Returns a program. `options` are passed to `compile`."""

  def program():
    model = make_model()
    model.compile(keras.optimizers.Adam(0.03), loss, **options)
    x, y = _data()
    found = common.fitted(model, x, y, batch_size=16, validation_data=(x, y))
    return found, model.evaluate(x, y, batch_size=4, verbose=0)

  return program


class Guide(keras.Model):
  """The `train_step` of Keras's guide, with its own metrics."""

  def __init__(self, **options):
    super().__init__(**options)
    self.loss_tracker = keras.metrics.Mean(name='loss')
    self.mae = keras.metrics.MeanAbsoluteError(name='mae')

  def train_step(self, data):
    x, y = data
    with tf.GradientTape() as tape:
      predicted = self(x, training=True)
      loss = ops.sqrt(ops.mean(keras.losses.mean_squared_error(y, predicted)))
    weights = self.trainable_weights
    self.optimizer.apply(tape.gradient(loss, weights), weights)
    self.loss_tracker.update_state(loss)
    self.mae.update_state(y, predicted)
    return {'loss': self.loss_tracker.result(), 'mae': self.mae.result()}

  def test_step(self, data):
    x, y = data
    predicted = self(x)
    self.loss_tracker.update_state(ops.max(ops.abs(y - predicted)))
    self.mae.update_state(y, predicted)
    # Keras reports the results of the last step, whatever their names.
    return {'worst': self.loss_tracker.result(), 'mean': self.mae.result()}

  @property
  def metrics(self):
    return [self.loss_tracker, self.mae]


class Nested(Guide):
  """Returns nested dicts, which Keras reads after evaluation."""

  def train_step(self, data):
    return {'inner': super().train_step(data)}


class Penalty(layers.Layer):
  def call(self, x):
    self.add_loss(ops.sqrt(ops.sum(x**2)))
    return x


def _mean_error(y, outputs):
  return ops.mean(ops.abs(y - outputs))


def _loaded_model():
  """Trains a loaded model, whose functions hold handles of its variables."""
  x, y = _data()
  inner = keras.Sequential([keras.Input(x.shape[1:]), layers.Dense(6, 'tanh')])
  with tempfile.TemporaryDirectory() as path:
    inner.export(path, verbose=False)
    layer = layers.TFSMLayer(path, call_endpoint='serve')
    model = _model(hidden=layer)
    # Keras gives the slots of such variables names that TensorFlow rejects.
    model.compile(keras.optimizers.SGD(0.3), 'categorical_crossentropy')
  history = common.fit(model, x, y, batch_size=16)
  return history, model.get_weights()


def _two_players(is_in_turns):
  """Returns a program in which each of two players trains against the other."""

  def program():
    x, _ = _data()
    first, second = (
      keras.Variable(np.linspace(low, 1.0, x.shape[1], dtype=np.float32))
      for low in (-1.0, 0.5)
    )
    optimizers = common.momentum(), common.momentum()
    optimizers[0].build([first])
    optimizers[1].build([second])

    def gradient_of(x, variable):
      with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.tanh(tf.linalg.matvec(x, first * second)))
      return tape.gradient(loss, variable.value), loss

    def step(x):
      gradient, loss = gradient_of(x, first)
      if not is_in_turns:
        other, after = gradient_of(x, second)
      optimizers[0].apply([gradient], [first])
      if is_in_turns:
        other, after = gradient_of(x, second)
      optimizers[1].apply([-other], [second])
      return loss, after

    strategy = tf.distribute.get_strategy()
    run = tf.function(step)
    if tf.distribute.has_strategy():
      run = strategy.step(step, optimizers)
    found = []
    for i in range(0, _ROWS, 16):
      losses = run(x[i : i + 16])
      if tf.distribute.has_strategy():
        strategy.join()
      found.append([float(loss) for loss in losses])
    return found, first.numpy(), second.numpy()

  return program


PROGRAMS = {
  'guide': _fit(lambda: _model(Guide)),
  'nested': _fit(lambda: _model(Nested)),
  'loss_of_one_number': _fit(
    loss=lambda y, p: ops.sqrt(ops.mean((y - p) ** 2)), metrics=[_mean_error]
  ),
  'metric_of_one_number': _fit(
    loss=lambda y, p: ops.mean((y - p) ** 2, axis=-1), metrics=[_mean_error]
  ),
  'add_loss': _fit(
    lambda: _model(hidden=keras.Sequential([layers.Dense(4), Penalty()]))
  ),
  'loaded_model': _loaded_model,
}
# Custom loops on parameter servers.
ON_SERVERS = {
  'two_players': _two_players(is_in_turns=True),
  'two_players_at_once': _two_players(is_in_turns=False),
}
# Whether synchronous workers each compute a part of every batch.
ARE_SHARED = {
  'guide': False,
  'nested': False,
  'loss_of_one_number': False,
  'metric_of_one_number': True,
  'add_loss': False,
  'loaded_model': True,
  'two_players': False,
  'two_players_at_once': True,
  'two_optimizers': False,
}
