"""Features of recommenders as they are: files, words, lists of ids of any length."""

import os
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import parameter_servers, tiers
from tests.conformance import harness

pytestmark = pytest.mark.multi_process

layers = keras.layers
_ROWS = 21
_BATCH = 8
_WORDS = ('red', 'green', 'blue', 'grün')


def write_files(directory):
  """The same rows as CSV and as TFRecord files."""
  rng = np.random.default_rng(7)
  with (
    open(os.path.join(directory, 'rows.csv'), 'w') as csv,
    tf.io.TFRecordWriter(os.path.join(directory, 'rows.tfrecord')) as records,
  ):
    csv.write('user,word,label\n')
    for row in range(_ROWS):
      user, word = int(rng.integers(0, 30)), _WORDS[rng.integers(0, 4)]
      label = float(np.float32(rng.normal()))
      csv.write(f'{user},{word},{label!r}\n')
      items = rng.integers(0, 40, row % 4)
      feature = {
        'user': tf.train.Feature(int64_list=tf.train.Int64List(value=[user])),
        'items': tf.train.Feature(int64_list=tf.train.Int64List(value=items)),
        'word': tf.train.Feature(
          bytes_list=tf.train.BytesList(value=[word.encode()])
        ),
        'label': tf.train.Feature(float_list=tf.train.FloatList(value=[label])),
      }
      example = tf.train.Example(features=tf.train.Features(feature=feature))
      records.write(example.SerializeToString())


def _csv(directory, batch):
  data = tf.data.experimental.CsvDataset(
    os.path.join(directory, 'rows.csv'),
    [tf.int64, tf.string, tf.float32],
    header=True,
  )
  return data.map(lambda u, w, y: ({'user': u, 'word': w}, y)).batch(batch)


def _records(directory, batch, items):
  """Rows of a TFRecord file; `items` says how ids of any number are read."""
  features = {
    'user': tf.io.FixedLenFeature([], tf.int64),
    'word': tf.io.FixedLenFeature([], tf.string),
    'label': tf.io.FixedLenFeature([], tf.float32),
    'items': items,
  }

  def parse(examples):
    found = tf.io.parse_example(examples, features)
    label = found.pop('label')
    return found, label

  path = os.path.join(directory, 'rows.tfrecord')
  return tf.data.TFRecordDataset(path).batch(batch).map(parse)


def _ragged(directory, batch):
  return _records(directory, batch, tf.io.RaggedFeature(tf.int64))


def _sparse(directory, batch):
  return _records(directory, batch, tf.io.VarLenFeature(tf.int64))


def _looked_up(directory, batch):
  """Words and ids become numbers in the pipeline."""
  words = layers.StringLookup(vocabulary=list(_WORDS[:3]))
  hashed = layers.Hashing(8)

  def look_up(x, y):
    return {'user': hashed(x['user']), 'word': words(x['word'])}, y

  return _csv(directory, batch).map(look_up)


class Scores(keras.Model):
  """Embeds what there is; words by a lookup of its own."""

  def __init__(self):
    super().__init__()
    self.users = layers.Embedding(30, 4)
    self.hashing = layers.Hashing(16)
    self.hashed = layers.Embedding(16, 4)
    self.items = layers.Embedding(40, 4)
    self.lookup = layers.StringLookup(vocabulary=list(_WORDS[:3]))
    self.words = layers.Embedding(5, 4)
    self.dense = layers.Dense(1)

  def call(self, x):
    words, found = x['word'], [self.users(x['user'])]
    if words.dtype == tf.string:
      found.append(self.hashed(self.hashing(words)))
      words = self.lookup(words)
    found.append(self.words(words))
    items = x.get('items')
    if isinstance(items, tf.SparseTensor):
      items = tf.RaggedTensor.from_sparse(items)
    if items is not None:
      found.append(tf.reduce_sum(self.items(items), 1))
    return self.dense(tf.concat(found, -1))


_PIPELINES = {
  'csv': _csv,
  'ragged': _ragged,
  'sparse': _sparse,
  'looked_up': _looked_up,
}


def train(pipeline, directory, strategy=None, by_workers=False, batch=_BATCH):
  """Weights, history, evaluation and predictions."""
  keras.backend.clear_session()
  keras.utils.set_random_seed(3)
  with harness.scope_of(strategy):
    model = Scores()
    model.compile(
      tfs.keras.LazyRows(keras.optimizers.Adam(0.05)), 'mse', metrics=['mae']
    )

  def make_dataset(context=None):
    data = _PIPELINES[pipeline](directory, batch)
    if context is None:
      # Of data without an end in sight one device counts a step too many.
      count = tf.data.experimental.assert_cardinality(-(-_ROWS // batch))
      return data.apply(count)
    return data.shard(context.num_input_pipelines, context.input_pipeline_id)

  data = make_dataset()
  if by_workers and strategy is not None:
    data = strategy.distribute_datasets_from_function(make_dataset)
  history = model.fit(data, epochs=2, verbose=0).history
  return {
    'weights': model.get_weights(),
    'history': history,
    'evaluation': model.evaluate(data, verbose=0, return_dict=True),
    'predictions': model.predict(data, verbose=0),
  }


def train_on_servers(directory, options, by_workers):
  """The same of each pipeline, with variables on servers."""
  found = {}
  for pipeline in _PIPELINES:
    strategy = tfs.create_strategy('parameter_server', **options)
    try:
      found[pipeline] = train(pipeline, directory, strategy, by_workers)
    finally:
      strategy.close()
  return found


class FeaturesTest(tf.test.TestCase, parameterized.TestCase):
  @tiers.named_parameters(
    tiers.soak('read_by_the_worker', {'mode': 'async'}, True, 1),
    ('shared_by_workers', {'mode': 'sync'}, False, 2),
    tiers.soak('read_by_two_workers', {'mode': 'sync'}, True, 2),
    tiers.soak('bounded', {'mode': 'bounded'}, True, 1),
    tiers.soak('one_of_two', {'mode': 'sync', 'backup_workers': 1}, False, 2),
    tiers.soak(
      'one_that_reads', {'mode': 'sync', 'backup_workers': 1}, True, 2
    ),
  )
  def test_pipelines(self, options, by_workers, num_workers):
    with tempfile.TemporaryDirectory() as directory:
      write_files(directory)
      with parameter_servers.Job(num_workers=num_workers, num_ps=2) as job:
        found = job.run(train_on_servers, (directory, options, by_workers))
      for pipeline, result in found.items():
        # Workers that read take a batch each in a step.
        batch = _BATCH * (num_workers if by_workers else 1)
        want = train(pipeline, directory, batch=batch)
        with self.subTest(pipeline):
          self.assertLen(want['predictions'], _ROWS)
          tf.nest.assert_same_structure(want, result)
          if 'backup_workers' in options:
            continue  # What is dropped is chance.
          for part in want:
            self.assertAllClose(want[part], result[part], 1e-6, 2e-6, part)


if __name__ == '__main__':
  tf.test.main()
