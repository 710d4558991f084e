"""Under mode='sync' every step is one device's, or its rows are not shared out.

Two workers, and a last batch of 5 rows that they would share unevenly.
"""

import tempfile

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from keras import ops

import tf_strategies as tfs
from tests import parameter_servers, tiers
from tests.conformance import harness

layers = keras.layers
_ROWS = 37
_BATCH = 16


def _data():
  rng = np.random.default_rng(5)
  x = rng.normal(size=[_ROWS, 6]).astype(np.float32)
  return x, np.eye(3, dtype=np.float32)[np.arange(_ROWS) * 7 % 3]


def _dense_model(make=keras.Model, **options):
  inputs = layers.Input([6])
  hidden = layers.Dense(5, activation='tanh')(inputs)
  outputs = layers.Dense(3, activation='softmax')(hidden)
  return make(inputs=inputs, outputs=outputs, **options)


class Guide(keras.Model):
  """The `train_step` of Keras's guide, with metrics of its own."""

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
    # Of other names than the metrics: Keras takes what the last step returned.
    return {'worst': self.loss_tracker.result(), 'mean': self.mae.result()}

  @property
  def metrics(self):
    return [self.loss_tracker, self.mae]


class TwoOptimizers(keras.Model):
  """As a GAN: the second loss is of what the first update made."""

  def __init__(self):
    super().__init__()
    self.first, self.second = layers.Dense(4), layers.Dense(3)

  def compile(self, first_optimizer, second_optimizer):
    super().compile()
    self.first_optimizer = first_optimizer
    self.second_optimizer = second_optimizer

  def call(self, x):
    return self.second(self.first(x))

  def test_step(self, data):
    return {'largest': ops.max(self(data[0]))}

  def train_step(self, data):
    x, y = data
    found = {}
    for name in ('first', 'second'):
      with tf.GradientTape() as tape:
        found[name] = ops.mean((self(x) - y) ** 2)
      weights = getattr(self, name).trainable_weights
      gradients = tape.gradient(found[name], weights)
      getattr(self, f'{name}_optimizer').apply(gradients, weights)
    return found


class Largest(keras.metrics.Metric):
  """A metric that is no sum over rows."""

  def __init__(self):
    super().__init__(name='largest')
    self.value = self.add_weight(shape=[], initializer='zeros', name='value')

  def update_state(self, y_true, y_pred, sample_weight=None):
    self.value.assign(ops.maximum(self.value, ops.max(y_pred)))

  def result(self):
    return self.value + 0.0


def _fit(strategy, make_model, compile_options=None, data=None):
  keras.backend.clear_session()
  keras.utils.set_random_seed(4)
  with harness.scope_of(strategy):
    model = make_model()
    options = {
      'optimizer': keras.optimizers.Adam(0.03),
      'loss': 'categorical_crossentropy',
    }
    model.compile(**(options if compile_options is None else compile_options()))
  x, y = (data or _data)()
  history = model.fit(x, y, _BATCH, epochs=2, shuffle=False, verbose=0)
  evaluation = model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
  return {
    'history': {**history.history, 'evaluation': list(evaluation.values())},
    'weights': model.get_weights(),
  }


def guide(strategy):
  return _fit(strategy, lambda: _dense_model(Guide))


def two_optimizers(strategy):
  return _fit(
    strategy,
    TwoOptimizers,
    lambda: {
      'first_optimizer': keras.optimizers.Adam(0.02),
      'second_optimizer': keras.optimizers.SGD(0.1, momentum=0.9),
    },
  )


def f1_score(strategy):
  return _fit(
    strategy,
    _dense_model,
    lambda: {
      'optimizer': keras.optimizers.Adam(0.03),
      'loss': 'categorical_crossentropy',
      'metrics': [keras.metrics.F1Score(), 'accuracy'],
      'steps_per_execution': 2,
    },
  )


def sum_reduction(strategy):
  return _fit(
    strategy,
    _dense_model,
    lambda: {
      'optimizer': keras.optimizers.Adam(0.03, global_clipnorm=0.5),
      'loss': keras.losses.MeanSquaredError(reduction='sum'),
    },
  )


def one_number(strategy):
  """A loss and a metric that are functions which return one number."""
  return _fit(
    strategy,
    _dense_model,
    lambda: {
      'optimizer': keras.optimizers.Adam(0.03),
      'loss': lambda y, p: ops.sqrt(ops.mean((y - p) ** 2)),
      'metrics': [lambda y, p: ops.mean(ops.abs(y - p))],
    },
  )


def metric_of_one_number(strategy):
  return _fit(
    strategy,
    _dense_model,
    lambda: {
      'optimizer': keras.optimizers.Adam(0.03),
      'loss': lambda y, p: ops.mean((y - p) ** 2, axis=-1),
      'metrics': [lambda y, p: ops.mean(ops.abs(y - p))],
    },
  )


def largest(strategy):
  return _fit(
    strategy,
    _dense_model,
    lambda: {
      'optimizer': keras.optimizers.Adam(0.03),
      'loss': 'mse',
      'metrics': [Largest()],
    },
  )


class _Penalty(layers.Layer):
  def call(self, x):
    self.add_loss(ops.sqrt(ops.sum(x**2)))
    return x


def add_loss(strategy):
  def make():
    inputs = layers.Input([6])
    hidden = _Penalty()(layers.Dense(4)(inputs))
    return keras.Model(inputs, layers.Dense(3, activation='softmax')(hidden))

  return _fit(strategy, make)


def mask(strategy):
  def data():
    ids = np.random.default_rng(0).integers(0, 4, [_ROWS, 7])
    return ids, (ids[..., None] * 0.25).astype(np.float32)

  def make():
    table = layers.Embedding(4, 3, mask_zero=True)
    return keras.Sequential([layers.Input([7]), table, layers.Dense(1)])

  def options():
    return {'optimizer': harness.momentum(), 'loss': 'mse'}

  return _fit(strategy, make, options, data)


def two_outputs(strategy):
  def make():
    inputs = layers.Input([6])
    return keras.Model(
      inputs, [layers.Dense(3)(inputs), layers.Dense(3)(inputs)]
    )

  def data():
    x, y = _data()
    return x, [y, 2 * y]

  def options():
    return {
      'optimizer': harness.momentum(),
      'loss': ['mse', 'mae'],
      'metrics': [['mae'], ['mse']],
    }

  return _fit(strategy, make, options, data)


def rows_of_others(strategy):
  """A loss of a number a row, each of which is beside all the others."""

  def loss(y, outputs):
    alike = ops.matmul(outputs, ops.transpose(outputs))
    return ops.logsumexp(alike, 1) - ops.sum(outputs * y, 1)

  def options():
    return {'optimizer': harness.momentum(), 'loss': loss}

  return _fit(strategy, _dense_model, options)


def dropout(strategy):
  def make():
    return keras.Sequential(
      [layers.Input([6]), layers.Dropout(0.3), layers.Dense(3, 'softmax')]
    )

  return _fit(strategy, make)


def seeded_shuffle(strategy):
  """Keras opens the data set at the end of each epoch, for nothing."""
  keras.backend.clear_session()
  keras.utils.set_random_seed(4)
  dataset = tf.data.Dataset.from_tensor_slices(_data())
  dataset = dataset.shuffle(_ROWS, seed=3).batch(_BATCH)
  with harness.scope_of(strategy):
    model = _dense_model()
    model.compile(harness.momentum(), 'categorical_crossentropy')
  history = model.fit(dataset, epochs=3, validation_data=dataset, verbose=0)
  return {'history': history.history, 'weights': model.get_weights()}


class Nested(Guide):
  """Returns a dict in a dict, which Keras reads when it has evaluated."""

  def train_step(self, data):
    return {'inner': super().train_step(data)}


def nested(strategy):
  keras.backend.clear_session()
  keras.utils.set_random_seed(4)
  x, y = _data()
  with harness.scope_of(strategy):
    model = _dense_model(Nested)
    model.compile(harness.momentum())
  options = {'batch_size': _BATCH, 'shuffle': False, 'verbose': 0}
  data = {'x': x, 'y': y, 'validation_data': (x, y)}
  history = model.fit(**data, **options, epochs=2)
  return {'history': history.history, 'weights': model.get_weights()}


def loaded_model(strategy):
  """The functions of a loaded model have handles of its variables."""
  keras.backend.clear_session()
  keras.utils.set_random_seed(4)
  x, y = _data()
  inner = keras.Sequential([keras.Input(x.shape[1:]), layers.Dense(6, 'tanh')])
  with tempfile.TemporaryDirectory() as path:
    inner.export(path, verbose=False)
    with harness.scope_of(strategy):
      layer = layers.TFSMLayer(path, call_endpoint='serve')
      outer = layers.Dense(y.shape[1], 'softmax')
      model = keras.Sequential([keras.Input(x.shape[1:]), layer, outer])
      # Keras gives slots of such variables names that TensorFlow refuses.
      model.compile(keras.optimizers.SGD(0.3), 'categorical_crossentropy')
  history = model.fit(
    x, y, batch_size=_BATCH, epochs=2, shuffle=False, verbose=0
  )
  return {'history': history.history, 'weights': model.get_weights()}


def two_players(strategy, is_in_turns=True):
  """The second one plays against what the first one has become."""
  keras.backend.clear_session()
  x, _ = _data()
  with harness.scope_of(strategy):
    first, second = (
      keras.Variable(np.linspace(low, 1.0, x.shape[1], dtype=np.float32))
      for low in (-1.0, 0.5)
    )
    optimizers = harness.momentum(), harness.momentum()
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
    return {'loss': loss, 'after': after}

  run = strategy.step if strategy else lambda fn, _: tf.function(fn)
  run = run(step, optimizers)
  history = {'loss': [], 'after': []}
  for i in range(0, _ROWS, _BATCH):
    found = run(x[i : i + _BATCH])
    if strategy:
      strategy.join()
    for key, value in found.items():
      history[key].append(float(value))
  return {'history': history, 'weights': [first.numpy(), second.numpy()]}


def two_players_at_once(strategy):
  return two_players(strategy, False)


_PROGRAMS = {
  p.__name__: p
  for p in (
    guide,
    two_optimizers,
    f1_score,
    sum_reduction,
    one_number,
    metric_of_one_number,
    largest,
    add_loss,
    mask,
    two_outputs,
    rows_of_others,
    dropout,
    seeded_shuffle,
    nested,
    loaded_model,
    two_players,
    two_players_at_once,
  )
}
# In these all workers compute a share of each batch.
_SHARED = (
  'f1_score',
  'loaded_model',
  'metric_of_one_number',
  'seeded_shuffle',
  'two_outputs',
  'two_players_at_once',
)


def under_sync(name):
  strategy = tfs.create_strategy('parameter_server', mode='sync')
  try:
    found = _PROGRAMS[name](strategy)
    # A whole batch is no microbatch, for which there would be slots.
    return found, bool(strategy.engine._free_slots)
  finally:
    strategy.close()


class CustomStepsTest(tf.test.TestCase, parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.job = parameter_servers.Job(num_workers=2, num_ps=1)
    cls.addClassCleanup(cls.job.__exit__)

  @tiers.named_parameters(
    *tiers.few(
      [
        tiers.smoke(name, name) if name == 'guide' else (name, name)
        for name in _PROGRAMS
      ],
      'guide',
      'two_optimizers',
      'f1_score',
      'loaded_model',
      'two_players',
      'two_players_at_once',
    )
  )
  def test_equals_one_device(self, name):
    found, is_shared = self.job.run(under_sync, (name,))
    want = _PROGRAMS[name](None)
    self.assertEqual(set(want['history']), set(found['history']))
    for key, values in want['history'].items():
      self.assertAllClose(values, found['history'][key], 2e-6, 1e-6, key)
    for i, weight in enumerate(want['weights']):
      self.assertAllClose(weight, found['weights'][i], 1e-6, 2e-6, f'{i}')
    self.assertEqual(is_shared, name in _SHARED)


if __name__ == '__main__':
  tf.test.main()
