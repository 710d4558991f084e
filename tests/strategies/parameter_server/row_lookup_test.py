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
partitioners = tf.distribute.experimental.partitioners

_TOKENS = 23
_ROWS = 21
_BATCH = 8  # The last batch has 5 rows: two workers share them unevenly.

# `programs/recommender.py` has them all.
_OPTIMIZERS = {
  # Not larger: what diverges makes any rounding large.
  'sgd': lambda: optimizers.SGD(0.01),
  'adagrad': lambda: optimizers.Adagrad(0.1),
  'adam': lambda: optimizers.Adam(0.05),
  'lazy_adam': lambda: tfs.keras.LazyRows(optimizers.Adam(0.05, amsgrad=True)),
  'lazy_ftrl': lambda: tfs.keras.LazyRows(optimizers.Ftrl(0.1)),
}


def _multi():
  """Returns an optimizer with one part for tables and one for dense variables."""
  tables = tfs.keras.LazyRows(optimizers.Nadam(0.05))
  others = optimizers.Adam(0.05)
  return optimizers.MultiOptimizer(
    lambda v: tables if 'embeddings' in v.path else others
  )


# Their updates are in a branch.
_IN_A_BRANCH = {
  'scaled_adagrad': lambda: optimizers.LossScaleOptimizer(
    optimizers.Adagrad(0.1)
  ),
  'scaled_lazy_adam': lambda: optimizers.LossScaleOptimizer(
    tfs.keras.LazyRows(optimizers.Adam(0.05))
  ),
  'scaled_multi': lambda: optimizers.LossScaleOptimizer(_multi()),
  'accumulated': lambda: optimizers.Adam(0.05, gradient_accumulation_steps=2),
}


def _towers():
  """Two towers with one table, which is called twice in one of them."""
  user, items = (
    layers.Input([], dtype='int32'),
    layers.Input([4], dtype='int64'),
  )
  table = layers.Embedding(_TOKENS, 4, name='table')
  # Ids that are no ids yet: 1000 is the first of them.
  places = layers.IntegerLookup(vocabulary=list(range(1000, 1000 + _TOKENS)))
  own = layers.Embedding(_TOKENS + 1, 4, name='own')
  query = layers.Dense(4, activation='tanh')(table(user))
  words = layers.Flatten()(table(items % _TOKENS))
  other = layers.Flatten()(own(places(items + 1000)))
  answer = layers.Dense(4)(layers.Concatenate()([words, other]))
  score = layers.Dot(1)([query, answer])
  return keras.Model([user, items], layers.Dense(1)(score))


def _towers_rows():
  rng = np.random.default_rng(5)
  # Many rows have an id twice; some ids are in no row.
  return (
    rng.integers(0, 7, [_ROWS], dtype=np.int32),
    rng.integers(0, 2 * _TOKENS, [_ROWS, 4]),
  )


def _masked():
  inputs = layers.Input([5], dtype='int32')
  hidden = layers.Embedding(_TOKENS, 4, mask_zero=True)(inputs)
  hidden = layers.LSTM(3)(hidden)
  return keras.Model(inputs, layers.Dense(1)(hidden))


def _masked_rows():
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


_MODELS = {
  'towers': (_towers, _towers_rows),
  'masked': (_masked, _masked_rows),
  'tied': (Tied, _masked_rows),
  'own': (_own, _masked_rows),
}
_MODELS_WITH_BRANCHES = {'branch': (Branch, _masked_rows)}


def train(kind, optimizer, strategy=None):
  """Weights, state of the optimizer, history, evaluation and predictions."""
  make_model, make_rows = (_MODELS | _MODELS_WITH_BRANCHES)[kind]
  keras.backend.clear_session()
  keras.utils.set_random_seed(3)
  with common.scope_of(strategy):
    model = make_model()
    make_optimizer = (_OPTIMIZERS | _IN_A_BRANCH)[optimizer]
    model.compile(make_optimizer(), 'mse', metrics=['mae'])
  rows = make_rows()
  targets = np.random.default_rng(1).normal(size=[_ROWS, 1]).astype(np.float32)
  data = tf.data.Dataset.from_tensor_slices((rows, targets)).batch(_BATCH)
  history = model.fit(data, epochs=3, verbose=0).history
  return {
    'weights': model.get_weights(),
    'state': [v.numpy() for v in model.optimizer.variables],
    'history': history,
    'evaluation': model.evaluate(data, verbose=0, return_dict=True),
    'predictions': model.predict(data.map(lambda x, y: (x,)), verbose=0),
  }


def train_all(pairs, options, parts=1):
  """Returns the training results of each pair of model and optimizer."""
  found = {}
  for pair in pairs:
    strategy = tfs.ParameterServerStrategy(
      variable_partitioner=partitioners.FixedShardsPartitioner(parts)
      if parts > 1
      else None,
      **options,
    )
    try:
      found[pair] = train(*pair, strategy)
    finally:
      strategy.close()
  return found


_SOME = (
  ('towers', 'adagrad'),
  ('masked', 'lazy_adam'),
  ('towers', 'lazy_adam'),
  ('tied', 'adam'),
  ('own', 'sgd'),
)


class EqualityTest(tf.test.TestCase, parameterized.TestCase):
  def assert_equal_in(self, pairs, mode, num_workers, parts):
    with parameter_servers.Job(
      num_workers=num_workers, num_ps=2, deadline=600
    ) as job:
      found = job.run(train_all, (pairs, {'mode': mode}, parts))
    self.assertCountEqual(found, pairs)
    for pair, result in found.items():
      want = train(*pair)
      with self.subTest(str(pair)):
        tf.nest.assert_same_structure(want, result)
        for part in want:
          self.assertAllClose(want[part], result[part], 1e-6, 2e-6, part)

  @tiers.parameters(
    tiers.soak('async', 1, 1), ('sync', 2, 2), tiers.soak('bounded', 1, 2)
  )
  def test_training_equals_one_device(self, mode, num_workers, parts):
    self.assert_equal_in(_SOME, mode, num_workers, parts)

  @tiers.named_parameters(
    tiers.soak('few', 'async', 1, ('scaled_adagrad', 'accumulated')),
    tiers.soak('async', 'async', 1, ('scaled_lazy_adam', 'scaled_multi')),
    tiers.soak('sync', 'sync', 2, tuple(_IN_A_BRANCH)),
  )
  def test_in_a_branch_of_a_step(self, mode, num_workers, names):
    pairs = [('towers', name) for name in names]
    self.assert_equal_in(pairs, mode, num_workers, 2)

  @parameterized.parameters(('async', 1), ('sync', 2))
  def test_in_a_branch_of_the_users(self, mode, num_workers):
    pairs = ('branch', 'lazy_adam'), ('branch', 'adagrad')
    self.assert_equal_in(pairs, mode, num_workers, 2)


if __name__ == '__main__':
  tf.test.main()
