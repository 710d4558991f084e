"""Steps read and write those rows of a table that their batch has."""

import time
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from absl.testing import parameterized

import tf_strategies as tfs
from tests import parameter_servers, tiers
from tests.conformance import harness
from tests.strategies.parameter_server import wire
from tf_strategies.strategies.parameter_server import variables

pytestmark = pytest.mark.multi_process

layers = keras.layers
optimizers = keras.optimizers
partitioners = tf.distribute.experimental.partitioners

_TOKENS = 23
_ROWS = 21
_BATCH = 8  # The last batch has 5 rows: two workers share them unevenly.

# `conformance/recommender_test.py` has them all.
_OPTIMIZERS = {
  # Not larger: what diverges makes any rounding large.
  'sgd': lambda: optimizers.SGD(0.01),
  'adagrad': lambda: optimizers.Adagrad(0.1),
  'adam': lambda: optimizers.Adam(0.05),
  'lazy_adam': lambda: tfs.keras.LazyRows(optimizers.Adam(0.05, amsgrad=True)),
  'lazy_ftrl': lambda: tfs.keras.LazyRows(optimizers.Ftrl(0.1)),
}


def _multi():
  """One optimizer for tables, another for what is dense."""
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


def _cloned():
  """A model that comes from another one's description."""
  return keras.models.model_from_json(_towers().to_json())


_MODELS = {
  'towers': (_towers, _towers_rows),
  'cloned': (_cloned, _towers_rows),
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
  with harness.scope_of(strategy):
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
  """What came of each pair of model and optimizer."""
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
  ('towers', 'lazy_adam'),
  ('tied', 'adam'),
  ('own', 'sgd'),
)
_PAIRS = [(name, o) for name in _MODELS for o in ('adam', 'lazy_adam')]
# Each for one test, which has five minutes.
_GROUPS = [_PAIRS[i : i + 4] for i in range(0, len(_PAIRS), 4)]


_WIDTH = 64
_IDS = 1024


class _InFunction(layers.Embedding):
  """Looks its rows up in a function, of which TensorFlow keeps the graph."""

  @tf.function
  def call(self, x):
    return super().call(x)


def _wide_model(rows, optimizer, strategy):
  """A table, of None without a vocabulary, and as little as there can be besides."""
  keras.backend.clear_session()
  with strategy.scope():
    inputs = layers.Input([], dtype='int32')
    if rows is None:
      table = tfs.keras.DynamicEmbedding(_WIDTH, name='table')
    else:
      kind = _InFunction if optimizer == 'sgd' else layers.Embedding
      table = kind(rows, _WIDTH, name='table')
    found = table(inputs)
    outputs = layers.Dense(1)(found)
    model = keras.Model(inputs, outputs)
    model.compile(_OPTIMIZERS[optimizer](), 'mse')
  return model


def _bytes_a_step(counted, model, ids, call):
  """Bytes to servers and from them, of one of ten steps."""
  steps = 10
  targets = np.ones([steps * _IDS, 1], np.float32)
  data = tf.data.Dataset.from_tensor_slices((np.tile(ids, steps), targets))
  data = data.batch(_IDS, drop_remainder=True)
  call(model, data)  # Traces.
  before = wire.sent(counted)
  call(model, data)
  return np.subtract(wire.sent(counted), before) / steps


def _fit(model, data):
  model.fit(data, verbose=0)


def _evaluate(model, data):
  model.evaluate(data, verbose=0)


def _predict(model, data):
  model.predict(data.map(lambda x, y: x), verbose=0)


def byte_counts(counted, options, optimizer, parts=1, rows=20_000):
  """Of a step of each call: bytes with one row; and for each one more. Each way."""
  strategy = tfs.ParameterServerStrategy(
    variable_partitioner=partitioners.FixedShardsPartitioner(parts)
    if parts > 1
    else None,
    **options,
  )
  # As many ids in one batch as in the other. Each is there twice in a share.
  half = np.random.default_rng(0).permutation(20_000)[: _IDS // 2]
  many = np.repeat(half, 2).astype(np.int32)
  one = np.zeros([_IDS], np.int32)
  found = {}
  try:
    model = _wide_model(rows, optimizer, strategy)
    for call in (_fit, _evaluate, _predict):
      few, all_rows = (
        _bytes_a_step(counted, model, ids, call) for ids in (one, many)
      )
      found[call.__name__] = few, (all_rows - few) / (_IDS // 2 - 1)
  finally:
    strategy.close()
  return found


def byte_counts_of_whole_tables(*args):
  """The same if Keras reads the table as it does on one device."""
  with mock.patch.object(variables, 'gives_rows', lambda: False):
    return byte_counts(*args)


def untouched_rows(optimizer):
  """Of a table and its slots before and after, those that no batch has."""
  strategy = tfs.create_strategy('parameter_server', mode='async')
  model = _wide_model(100, optimizer, strategy)
  ids = np.arange(0, 40, 2, dtype=np.int32)
  table = model.layers[1].embeddings
  before = table.numpy()
  model.fit(ids, np.ones([20, 1], np.float32), 5, epochs=3, verbose=0)
  slots = [
    v.numpy() for v in model.optimizer.variables if v.shape == table.shape
  ]
  found = before, table.numpy(), slots
  strategy.close()
  return found


def warnings_of(names):
  """What is logged of tables that are updated whole, by optimizer."""
  found = {}
  for name in names:
    strategy = tfs.create_strategy('parameter_server', mode='async')
    with mock.patch.object(logging, 'warning') as warn:
      model = _wide_model(70_000, name, strategy)
      model.fit(np.arange(8), np.ones([8, 1]), epochs=2, verbose=0)
    texts = [call.args[0] % call.args[1:] for call in warn.call_args_list]
    found[name] = [t for t in texts if 'updates all 70000 rows (18 MB)' in t]
    strategy.close()
  return found


def step_seconds(optimizer):
  """Of a step, with tables of few and of many rows: the least of some medians."""
  strategy = tfs.create_strategy('parameter_server', mode='async')
  models = [
    _wide_model(rows, optimizer, strategy) for rows in (10_000, 1_000_000)
  ]
  ids = np.random.default_rng(0).integers(0, 10_000, [20, 256], dtype=np.int32)
  targets = np.ones([256, 1], np.float32)
  found = [], []
  for _ in range(4):
    for model, seconds in zip(models, found, strict=True):
      for batch in ids:
        began = time.monotonic()
        model.train_on_batch(batch, targets)
        strategy.join()
        seconds.append(time.monotonic() - began)
  strategy.close()
  # Without those that are traced.
  return [float(np.median(seconds[len(ids) :])) for seconds in found]


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

  @tiers.parameters(tiers.soak('async', 1, 1), ('sync', 2, 2))
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

  def test_in_a_branch_of_the_users(self):
    pairs = ('branch', 'lazy_adam'), ('branch', 'adagrad')
    self.assert_equal_in(pairs, 'async', 1, 2)

  @tiers.parameters(*[tiers.soak(*group) for group in _GROUPS])
  def test_every_model(self, *pairs):
    self.assert_equal_in(pairs, 'sync', 2, 1)

  @parameterized.product(
    where=(('async', 1, 2), ('sync', 2, 2), ('bounded', 1, 1)), pairs=_GROUPS
  )
  @pytest.mark.soak
  def test_in_other_modes_and_in_parts(self, where, pairs):
    self.assert_equal_in(pairs, *where)


def _more_than_rows(found):
  """Calls in which more is sent than the rows of a batch, and little besides."""
  wrong = []
  for name, (with_one, each) in found.items():
    gradients, rows = each / (_WIDTH * 4)
    # Without gradients workers send the ids.
    least, most = (0.99, 1.1) if name == '_fit' else (0, 0.1)
    is_right = (
      0.99 <= rows <= 1.1
      and least <= gradients <= most
      and max(with_one) < 16_000
    )
    if not is_right:
      wrong.append((name, with_one, gradients, rows))
  return wrong


class RowsTest(tf.test.TestCase, parameterized.TestCase):
  @tiers.parameters(
    ('async', 'sgd', 2),
    tiers.soak('sync', 'lazy_adam', 1),
  )
  def test_each_row_of_a_batch_is_sent_once(self, mode, optimizer, parts):
    options = {'mode': mode}
    with wire.CountedJob(num_workers=2, num_ps=2) as job:
      args = job.counts_address, options, optimizer, parts
      self.assertEmpty(_more_than_rows(job.run(byte_counts, args)))
      found = job.run(byte_counts_of_whole_tables, args)
      self.assertLen(_more_than_rows(found), 3)
      # The rows of the table, to one worker at least.
      self.assertGreater(found['_fit'][0][1], 20_000 * _WIDTH * 4)

  @tiers.parameters(tiers.soak('async', 'sgd'), tiers.soak('sync', 'lazy_adam'))
  def test_a_table_without_a_vocabulary_is_sent_sums(self, mode, optimizer):
    """Where Keras squares equal rows one by one it is sent each of them."""
    least = []
    with wire.CountedJob(num_workers=2, num_ps=2) as job:
      for name in (optimizer, 'adagrad'):
        args = job.counts_address, {'mode': mode}, name, 1, None
        with_one, each = job.run(byte_counts, args)['_fit']
        least.append(with_one[0] / (_IDS * _WIDTH * 4))
        # Of each id more.
        gradients = each[0] / (_WIDTH * 4)
        self.assertBetween(
          gradients, *((0.99, 1.1) if name == optimizer else (-0.1, 0.1))
        )
    summed, apart = least
    self.assertLess(summed, 0.1)
    self.assertGreater(apart, 0.99)

  @tiers.parameters(
    tiers.soak('sgd'),
    tiers.soak('adagrad'),
    'lazy_adam',
    tiers.soak('lazy_ftrl'),
  )
  def test_other_rows_stay_as_they_are(self, optimizer):
    with parameter_servers.Job(num_workers=1, num_ps=1) as job:
      before, after, slots = job.run(untouched_rows, (optimizer,))
    is_used = np.arange(100) % 2 + np.arange(100) // 40 == 0
    self.assertGreater(np.abs(before - after)[is_used].min(), 0)
    self.assertAllEqual(before[~is_used], after[~is_used])
    for slot in slots:
      self.assertLen(np.unique(slot[~is_used]), 1)
      self.assertNotAllClose(slot[is_used], slot[:1] * 0 + slot[1, 0])

  @tiers.parameters(tiers.soak('sgd'), tiers.soak('adagrad'), 'lazy_adam')
  def test_a_step_takes_no_longer_with_more_rows(self, optimizer):
    with parameter_servers.Job(num_workers=1, num_ps=1) as job:
      few, many = job.run(step_seconds, (optimizer,))
    self.assertLess(many, 3 * few)

  def test_a_large_table_that_is_updated_whole_is_named(self):
    with parameter_servers.Job(num_workers=1, num_ps=1) as job:
      warned = job.run(warnings_of, (('adam', 'sgd', 'adagrad', 'lazy_adam'),))
    self.assertLen(warned.pop('adam'), 1)
    self.assertEqual(warned, {'sgd': [], 'adagrad': [], 'lazy_adam': []})


if __name__ == '__main__':
  tf.test.main()
