"""Steps read and write those rows of a table that their batch has."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import parameter_servers, tiers
from tests.programs import common

layers = keras.layers
optimizers = keras.optimizers

_TOKENS = 23
_ROWS = 21
_BATCH = 8  # The last batch has 5 rows: two workers share them unevenly.

# `programs/recommender.py` has them all.
_OPTIMIZERS = {
  'adagrad': lambda: optimizers.Adagrad(0.1),
  'adam': lambda: optimizers.Adam(0.05),
  'lazy_adam': lambda: tfs.keras.LazyRows(optimizers.Adam(0.05, amsgrad=True)),
}


def _ids():
  ids = np.random.default_rng(6).integers(1, _TOKENS, [_ROWS, 5])
  return (ids * (np.arange(5) < np.arange(1, _ROWS + 1)[:, None] % 6)).astype(
    np.int32
  )


class Tied(keras.Model):
  """Reads all of its table too, as the output's weights."""

  def __init__(self):
    super().__init__()
    self.table = layers.ReversibleEmbedding(_TOKENS, 4)
    self.dense = layers.Dense(1)

  def call(self, x):
    hidden = keras.ops.mean(self.table(x), 1)
    return self.dense(self.table(hidden, reverse=True))


class Own(keras.layers.Layer):
  """Takes rows in its own ways; negative ids count from the end."""

  def build(self, shape):
    self.table = self.add_weight(shape=[_TOKENS, 4], name='table')
    self.other = self.add_weight(shape=[_TOKENS, 4], name='other')

  @tf.function
  def call(self, x):
    rows = keras.ops.take(self.table, x - 3, axis=0)
    rows += keras.ops.take(self.other.value, x, axis=0)
    # Whole: of its columns; and in a branch.
    columns = keras.ops.take(self.table, [2, 0], axis=1)
    branch = keras.ops.cond(
      keras.ops.sum(x) > 0,
      lambda: keras.ops.take(self.other, x, axis=0),
      lambda: keras.ops.zeros_like(rows),
    )
    return keras.ops.mean(rows + branch, 1) * keras.ops.sum(columns)


def _own():
  return keras.Sequential(
    [layers.Input([5], dtype='int32'), Own(), layers.Dense(1)]
  )


class Branch(keras.Model):
  """Its step updates in a branch of its own."""

  def __init__(self):
    super().__init__()
    self.table = layers.Embedding(_TOKENS, 4)
    self.dense = layers.Dense(1)

  def call(self, x):
    return self.dense(keras.ops.mean(self.table(x), 1))

  def train_step(self, data):
    x, y = data
    with tf.GradientTape() as tape:
      predictions = self(x, training=True)
      loss = self.compute_loss(x, y, predictions)
    variables = self.trainable_variables
    gradients = tape.gradient(loss, variables)
    keras.ops.cond(
      loss >= 0,
      lambda: self.optimizer.apply(gradients, variables),
      lambda: None,
    )
    return self.compute_metrics(x, y, predictions)


_MODELS = {'tied': Tied, 'own': _own, 'branch': Branch}
_PAIRS = ('tied', 'adam'), ('own', 'lazy_adam'), ('branch', 'adagrad')


def train(model, optimizer, strategy=None):
  """Weights, state of the optimizer, history, evaluation and predictions."""
  keras.backend.clear_session()
  keras.utils.set_random_seed(3)
  with common.scope_of(strategy):
    model = _MODELS[model]()
    model.compile(_OPTIMIZERS[optimizer](), 'mse', metrics=['mae'])
  targets = np.random.default_rng(1).normal(size=[_ROWS, 1]).astype(np.float32)
  data = tf.data.Dataset.from_tensor_slices((_ids(), targets)).batch(_BATCH)
  history = model.fit(data, epochs=2, verbose=0).history
  return {
    'weights': model.get_weights(),
    'state': [v.numpy() for v in model.optimizer.variables],
    'history': history,
    'evaluation': model.evaluate(data, verbose=0, return_dict=True),
    'predictions': model.predict(data.map(lambda x, y: (x,)), verbose=0),
  }


def train_all(mode, parts):
  """Returns the training results of each pair of model and optimizer."""
  found = {}
  for pair in _PAIRS:
    strategy = tfs.ParameterServerStrategy(
      mode=mode,
      variable_partitioner=lambda shape, dtype: (
        [min(parts, shape[0]), *[1] * (len(shape) - 1)]
      ),
    )
    try:
      found[pair] = train(*pair, strategy)
    finally:
      strategy.close()
  return found


class EqualityTest(tf.test.TestCase, parameterized.TestCase):
  @tiers.parameters(
    tiers.soak('async', 1, 1), ('sync', 2, 2), tiers.soak('bounded', 1, 2)
  )
  def test_training_equals_one_device(self, mode, num_workers, parts):
    with parameter_servers.Job(num_workers, 2, deadline=600) as job:
      found = job.run(train_all, (mode, parts))
    for pair in _PAIRS:
      want = train(*pair)
      with self.subTest(str(pair)):
        tf.nest.assert_same_structure(want, found[pair])
        for part in want:
          self.assertAllClose(want[part], found[pair][part], 1e-6, 2e-6, part)


if __name__ == '__main__':
  tf.test.main()
