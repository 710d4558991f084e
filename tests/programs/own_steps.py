"""Steps, losses and metrics whose rows can or cannot be shared among workers.

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
  x = np.random.default_rng(5).normal(size=[_ROWS, 6]).astype(np.float32)
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


class OwnMean(keras.Model):
  """A `train_step` whose rows can be shared: it reads no metric."""

  def train_step(self, data):
    x, y = data
    with tf.GradientTape() as tape:
      loss = ops.mean((self(x, training=True) - y) ** 2)
    weights = self.trainable_weights
    self.optimizer.apply(tape.gradient(loss, weights), weights)
    return {'loss': loss}


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
    model = _model(hidden=layers.TFSMLayer(path, call_endpoint='serve'))
    # Keras gives the slots of such variables names that TensorFlow rejects.
    model.compile(keras.optimizers.SGD(0.3), 'categorical_crossentropy')
  return common.fit(model, x, y, batch_size=16), model.get_weights()


def _results(step, optimizers, rows):
  """Returns the results of a loop's steps. Reads them after the loop.

  Asynchronous servers return the newest results, so it reads them after each step.
  """
  strategy = tf.distribute.get_strategy()
  run, found = tf.function(step), []
  if tf.distribute.has_strategy():
    run = strategy.step(step, optimizers)
  mode = getattr(getattr(strategy, 'options', None), 'mode', 'sync')
  data = tf.data.Dataset.from_tensor_slices(rows).batch(16)
  for batch in strategy.experimental_distribute_dataset(data):
    found.append(run(batch))
    if mode != 'sync':
      strategy.join()
      found[-1] = tf.nest.map_structure(np.asarray, found[-1])
  return tf.nest.map_structure(np.asarray, found)


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

    return _results(step, optimizers, x), first.numpy(), second.numpy()

  return program


def _mean(rows, x, y, model):
  return tf.reduce_mean(rows)


def _mean_and_l2(rows, x, y, model):
  squares = [tf.nn.l2_loss(weight) for weight in model.trainable_variables]
  return tf.reduce_mean(rows) + 0.01 * tf.add_n(squares)


def _weighted_mean(rows, x, y, model):
  weights = tf.abs(x[:, 0])
  return tf.reduce_sum(weights * rows) / tf.reduce_sum(weights)


def _branching(rows, x, y, model):
  loss = tf.reduce_max(rows)
  if loss > 1.5:  # AutoGraph converts it.
    loss = tf.reduce_mean(rows)
  return loss


def _loop(
  loss_of=_mean,
  hidden=None,
  clip=list,
  measured=None,
  written=None,
  added=None,
  result_of=lambda rows, loss: loss,
  **options,
):
  """Returns a program that trains in a loop, and reads its results after the loop.

  The rows of a batch differ in size.

  Args:
    loss_of: function of the losses of rows, the batch, and the model.
    hidden: function that returns the hidden layers.
    clip: function of the gradients.
    measured: function of the losses of rows and their total loss, for a metric.
    written: function of these and a variable. Returns the new value of the variable.
    added: function of these. Returns the value to add to the variable.
    result_of: function of the losses of rows and their total loss.
    **options: arguments of the optimizer.
  """

  def program():
    x, y = _data()
    x *= np.linspace(0.1, 3.0, _ROWS, dtype=np.float32)[:, None]
    model = _model(hidden=hidden and keras.Sequential(hidden()))
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9, **options)
    weights = model.trainable_variables
    optimizer.build(weights)
    metric, number = keras.metrics.Mean(), keras.Variable(0.0, trainable=False)

    def step(batch):
      x, y = batch
      with tf.GradientTape() as tape:
        predicted = model(x, training=True)
        rows = keras.losses.categorical_crossentropy(y, predicted)
        loss = loss_of(rows, x, y, model)
      optimizer.apply(clip(tape.gradient(loss, weights)), weights)
      if measured:
        metric.update_state(*measured(rows, loss))
      if written:
        number.assign(written(rows, loss, number))
      if added:
        number.assign_add(added(rows, loss))
      return result_of(rows, loss)

    found = _results(step, [optimizer], (x, y))
    variables = *model.variables, *optimizer.variables, *metric.variables
    return found, [variable.numpy() for variable in (*variables, number)]

  return program


PROGRAMS = {
  'guide': _fit(lambda: _model(Guide)),
  'nested': _fit(lambda: _model(Nested)),
  'own_mean': _fit(lambda: _model(OwnMean)),
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
_LOOPS = {
  'mean': _loop(),
  'mean_and_l2': _loop(_mean_and_l2),
  'keras_loss': _loop(
    lambda rows, x, y, model: keras.losses.CategoricalCrossentropy()(
      y, model(x)
    )
  ),
  'mean_by_rows': _loop(
    lambda rows, x, *_: (
      tf.reduce_sum(rows) / tf.cast(tf.shape(x)[0], tf.float32)
    )
  ),
  'lstm': _loop(hidden=lambda: [layers.Reshape([3, 2]), layers.LSTM(5)]),
  'conv': _loop(
    hidden=lambda: [
      layers.Reshape([2, 3, 1]),
      layers.Conv2D(4, 2, activation='relu'),
      layers.MaxPooling2D([1, 2]),
      layers.Flatten(),
    ]
  ),
  'embedding': _loop(
    hidden=lambda: [layers.ReLU(9), layers.Embedding(10, 4), layers.Flatten()]
  ),
  'sum': _loop(lambda rows, *_: tf.reduce_sum(rows)),
  'weighted_mean': _loop(_weighted_mean),
  'root': _loop(lambda rows, *_: tf.sqrt(tf.reduce_mean(rows))),
  'dropout': _loop(hidden=lambda: [layers.Dropout(0.5, seed=3)]),
  'batch_normalization': _loop(hidden=lambda: [layers.BatchNormalization()]),
  'clipped': _loop(
    clip=lambda gradients: tf.clip_by_global_norm(gradients, 0.1)[0]
  ),
  'clipped_by_optimizer': _loop(global_clipnorm=0.1),
  'accumulated': _loop(gradient_accumulation_steps=2, clipnorm=0.1),
  'branching': _loop(_branching),
  'metric_of_loss': _loop(measured=lambda rows, loss: [loss]),
  'metric_of_rows': _loop(measured=lambda rows, loss: [rows]),
  'metric_of_weighted_rows': _loop(measured=lambda rows, loss: [rows, rows]),
  'written_mean': _loop(
    written=lambda rows, loss, number: tf.reduce_mean(rows)
  ),
  'written_sum': _loop(written=lambda rows, loss, number: tf.reduce_sum(rows)),
  'written_average': _loop(
    written=lambda rows, loss, number: 0.9 * number + loss
  ),
  'added_mean': _loop(added=lambda rows, loss: loss),
  'added_one': _loop(added=lambda rows, loss: 1.0),
  'added_sum': _loop(added=lambda rows, loss: tf.reduce_sum(rows)),
  'returned_sum': _loop(result_of=lambda rows, _: tf.reduce_sum(rows)),
  'returned_maximum': _loop(result_of=lambda rows, _: tf.reduce_max(rows)),
  'returned_rows': _loop(result_of=lambda rows, _: rows),
}
LOOPS = {
  'two_players': _two_players(is_in_turns=True),
  'two_players_at_once': _two_players(is_in_turns=False),
  **{f'own_loop_{name}': program for name, program in _LOOPS.items()},
}
# Whether synchronous workers each compute a part of every batch.
_SHARED = (
  'own_mean',
  'metric_of_one_number',
  'loaded_model',
  'two_players_at_once',
  'own_loop_mean',
  'own_loop_mean_and_l2',
  'own_loop_keras_loss',
  'own_loop_mean_by_rows',
  'own_loop_lstm',
  'own_loop_conv',
  'own_loop_embedding',
)
_NOT_SHARED = (
  'guide',
  'nested',
  'loss_of_one_number',
  'add_loss',
  'two_players',
  'two_optimizers',
  'own_loop_weighted_mean',
  'own_loop_root',
  'own_loop_dropout',
  'own_loop_batch_normalization',
)
ARE_SHARED = dict.fromkeys(_SHARED, True) | dict.fromkeys(_NOT_SHARED, False)
