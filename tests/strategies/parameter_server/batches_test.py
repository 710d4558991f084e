"""Ragged, sparse and text batches train as they do on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import parameter_servers
from tests.conformance import harness
from tests.strategies.parameter_server import chief

layers = keras.layers
_ROWS = 21
_BATCH = 8  # The last batch has 5 rows: two workers share them unevenly.
_WORDS = ('red', 'green', 'blue\0', 'gr\u00fcn', '')


class MeanOfRagged(keras.Model):
  """Takes the mean of the embeddings of as many tokens as a row has."""

  def __init__(self):
    super().__init__()
    self.table = layers.Embedding(50, 4)
    self.dense = layers.Dense(1)

  def call(self, x):
    tokens = self.table(x.to_tensor())
    mask = tf.sequence_mask(x.row_lengths(), dtype=tf.float32)[..., None]
    count = tf.maximum(tf.reduce_sum(mask, 1), 1.0)
    return self.dense(tf.reduce_sum(tokens * mask, 1) / count)


class OfStrings(keras.Model):
  """Looks words up, and the number of bytes in each."""

  def __init__(self):
    super().__init__()
    self.lookup = layers.StringLookup(vocabulary=list(_WORDS[:3]))
    self.table = layers.Embedding(5, 3)
    self.dense = layers.Dense(1)

  def call(self, x):
    words = self.table(self.lookup(x['words']))
    sizes = tf.cast(tf.strings.length(x['words']), tf.float32)
    return self.dense(
      tf.concat([tf.reduce_mean(words, 1), sizes, x['numbers']], -1)
    )


def _sparse_model():
  inputs = layers.Input([12], sparse=True)
  hidden = layers.Dense(6, activation='tanh')(inputs)
  return keras.Model(inputs, layers.Dense(1)(hidden))


def _targets():
  return np.random.default_rng(1).normal(size=[_ROWS, 1]).astype(np.float32)


def _ragged_rows():
  lengths = np.arange(_ROWS) * 7 % 5  # Some rows are empty.
  ids = np.random.default_rng(0).integers(0, 50, lengths.sum())
  return tf.RaggedTensor.from_row_lengths(ids, lengths)


def _string_rows():
  rng = np.random.default_rng(2)
  words = np.array(_WORDS, object)[rng.integers(0, len(_WORDS), [_ROWS, 2])]
  numbers = rng.normal(size=[_ROWS, 2]).astype(np.float32)
  return {'words': tf.constant(words), 'numbers': tf.constant(numbers)}


def _sparse_rows():
  rng = np.random.default_rng(3)
  dense = rng.normal(size=[_ROWS, 12]) * (rng.random([_ROWS, 12]) > 0.7)
  return tf.sparse.from_dense(dense.astype(np.float32))


class Positions(keras.Model):
  """As in Keras's mini-GPT: every row looks up the same positions."""

  def __init__(self):
    super().__init__()
    self.tokens = layers.Embedding(30, 4)
    self.places = layers.Embedding(5, 4)
    self.dense = layers.Dense(1)

  def call(self, x):
    found = self.tokens(x) + self.places(keras.ops.arange(x.shape[1]))
    return self.dense(tf.reshape(found, [-1, 20]))


def _token_rows():
  return np.random.default_rng(4).integers(0, 30, [_ROWS, 5])


def _adam():
  return keras.optimizers.Adam(0.05)


_KINDS = {
  # Rows that are padded with zeros count in Adam, and a share has its own.
  'ragged': (MeanOfRagged, _ragged_rows, harness.momentum),
  'strings': (OfStrings, _string_rows, _adam),
  'sparse': (_sparse_model, _sparse_rows, _adam),
  'positions': (Positions, _token_rows, _adam),
}


def train(kind, strategy=None, steps_per_execution=1, by_workers=False):
  """Weights, history, evaluation and predictions."""
  make_model, make_rows, make_optimizer = _KINDS[kind]
  keras.backend.clear_session()
  keras.utils.set_random_seed(3)
  with harness.scope_of(strategy):
    model = make_model()
    model.compile(
      make_optimizer(),
      'mse',
      metrics=['mae'],
      steps_per_execution=steps_per_execution,
    )

  def make_dataset(context=None):
    rows = tf.data.Dataset.from_tensor_slices((make_rows(), _targets()))
    batches = rows.batch(_BATCH)
    if context is None:
      return batches
    return batches.shard(context.num_input_pipelines, context.input_pipeline_id)

  dataset = data = make_dataset()
  if by_workers and strategy is not None:
    data = strategy.distribute_datasets_from_function(make_dataset)
  history = model.fit(data, epochs=2, verbose=0).history
  evaluation = model.evaluate(dataset, verbose=0, return_dict=True)
  predictions = model.predict(dataset.map(lambda x, y: x), verbose=0)
  return {
    'weights': model.get_weights(),
    'history': history,
    'evaluation': evaluation,
    'predictions': predictions,
  }


def of_servers(kind, options, *args):
  strategy = tfs.create_strategy('parameter_server', **options)
  try:
    return train(kind, strategy, *args)
  finally:
    strategy.close()


def sync(kind):
  return of_servers(kind, {'mode': 'sync'})


def one_worker(kind):
  return of_servers(kind, {'mode': 'async'})


def one_worker_in_groups(kind):
  return of_servers(kind, {'mode': 'async'}, 2)


def read_by_the_worker(kind):
  return of_servers(kind, {'mode': 'async'}, 1, True)


def outer_data_set():
  """The error of a function that returns what was made outside of it."""
  dataset = tf.data.Dataset.from_tensor_slices([1.0, 2.0]).batch(2)
  strategy = tfs.create_strategy('parameter_server')
  try:
    data = strategy.distribute_datasets_from_function(lambda context: dataset)
    step = strategy.step(tf.reduce_sum)
    with strategy.scope():
      for batch in data:
        step(batch)
      strategy.join()
  except tfs.errors.UnsupportedOptionError as e:
    return str(e)
  finally:
    strategy.close()


class BatchesTest(tf.test.TestCase, parameterized.TestCase):
  def assert_equal(self, kind, found, steps_per_execution=1):
    want = train(kind, None, steps_per_execution)
    tf.nest.assert_same_structure(want, found)
    for part in want:
      self.assertAllClose(want[part], found[part], 1e-6, 2e-6, part)

  def test_rows_that_two_workers_share(self):
    with parameter_servers.Job(num_workers=2, num_ps=1) as job:
      for kind in _KINDS:
        with self.subTest(kind):
          found = chief.Programs(job, {'sync': sync}, (kind,))
          self.assert_equal(kind, found['sync'])

  @pytest.mark.soak
  def test_one_worker(self):
    programs = {
      p.__name__: p
      for p in (one_worker, one_worker_in_groups, read_by_the_worker)
    }
    with parameter_servers.Job(num_workers=1, num_ps=1) as job:
      self.assertRegex(
        job.run(outer_data_set), 'made outside of the function.*move all'
      )
      for kind in _KINDS:
        found = chief.Programs(job, programs, (kind,))
        for name in programs:
          with self.subTest(f'{kind} {name}'):
            self.assert_equal(kind, found[name], 2 if 'groups' in name else 1)


if __name__ == '__main__':
  tf.test.main()
