"""Which function runs how often, with which seeds."""

import random
import time

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from examples import datasets
from tests.data import formula
from tf_strategies import data as data_lib
from tf_strategies import errors

_N = 20
_SOURCES = ('arrays', 'files')


class Calls:
  """Functions that count the rows that they are given."""

  def __init__(self):
    self.rows = {'prepare': 0, 'augment': 0, 'map': 0}

  def _count(self, name, labels):
    def add(values):
      self.rows[name] += len(values)
      return values

    return tf.ensure_shape(
      tf.numpy_function(add, [labels], tf.int64), labels.shape
    )

  def prepare(self, images, labels):
    return images, self._count('prepare', labels)

  def augment(self, images, labels, seed):
    self.seed_spec = (seed.dtype, tuple(seed.shape))
    return images, self._count('augment', labels)

  def map(self, images, labels):
    return images, self._count('map', labels)


class TransformTestCase(tf.test.TestCase, parameterized.TestCase):
  def make(
    self, source, training=True, functions=None, context=None, **changes
  ):
    options = data_lib.PipelineOptions(
      **({'global_batch_size': 8, 'seed': 3} | changes)
    )
    if source == 'arrays':
      return data_lib.make_dataset(
        formula.arrays(_N),
        options,
        training,
        input_context=context,
        **(functions or {}),
      )
    directory = self.create_tempdir().full_path
    datasets.write_tfrecords(formula.numbered(_N, 3), directory, 3)
    return data_lib.make_tfrecord_dataset(
      directory,
      'train',
      options,
      training,
      input_context=context,
      **(functions or {}),
    )


class CallsTest(TransformTestCase):
  @parameterized.parameters(
    ('arrays', 'none', True),
    ('arrays', 'memory', True),
    ('arrays', 'memory', False),
    ('files', 'none', True),
    ('files', 'memory', True),
    ('files', 'disk', False),
  )
  def test_what_runs_how_often(self, source, cache, training):
    changes = {'cache': cache}
    if cache == 'disk':
      changes['cache_path'] = self.create_tempdir().full_path + '/c'
    calls = Calls()
    dataset = self.make(
      source,
      training,
      {
        'prepare_fn': calls.prepare,
        'augment_fn': calls.augment,
        'map_fn': calls.map,
      },
      **changes,
    )
    for _ in range(3):
      labels = [int(y) for _, batch in dataset for y in batch]
      self.assertCountEqual(labels, range(_N))
    prepared = 3 * _N if cache == 'none' else _N
    augmented = 3 * _N if training else 0
    self.assertEqual(
      calls.rows, {'prepare': prepared, 'augment': augmented, 'map': 3 * _N}
    )
    if training:
      self.assertEqual(calls.seed_spec, (tf.int64, (2,)))

  @parameterized.parameters(('arrays', 'none'), ('files', 'memory'))
  def test_order_of_the_functions(self, source, cache):
    seen = {}

    def prepare(images, labels):
      seen['prepare'] = images.dtype
      return images // 2, labels + 1

    def augment(images, labels, seed):
      seen['augment'] = images.dtype
      return images, labels * 10

    dataset = self.make(
      source,
      True,
      {
        'prepare_fn': prepare,
        'augment_fn': augment,
        'map_fn': lambda x, y: {'x': x, 'y': y + 3},
      },
      cache=cache,
    )
    self.assertEqual(seen, {'prepare': tf.uint8, 'augment': tf.float32})
    for batch in dataset.as_numpy_iterator():
      numbers = (batch['y'] - 3) // 10 - 1
      expected = (formula.images(_N)[numbers] // 2) / np.float32(255)
      np.testing.assert_allclose(batch['x'], expected, rtol=1e-6)


class SeedsTest(TransformTestCase):
  def seeds(self, source, epochs=2, context=None, **changes):
    functions = {'augment_fn': lambda x, y, seed: seed}
    dataset = self.make(source, True, functions, context, **changes)
    return [
      tuple(seed) for _ in range(epochs) for seed in dataset.as_numpy_iterator()
    ]

  @parameterized.parameters(*_SOURCES)
  def test_one_a_batch_and_epoch_from_the_seed_alone(self, source):
    one = self.seeds(source)
    self.assertLen(set(one), 2 * 3)
    tf.random.set_seed(9)
    self.assertEqual(self.seeds(source), one)
    self.assertEmpty(set(self.seeds(source, seed=4)) & set(one))
    self.assertLen(set(self.seeds(source, seed=None)), 2 * 3)
    repeated = self.seeds(source, epochs=1, repeat=False)
    self.assertEqual(one[:3], repeated)

  def test_pipelines_draw_numbers_of_their_own(self):
    contexts = [tf.distribute.InputContext(2, i, 2) for i in range(2)]
    one, other = (self.seeds('arrays', context=c) for c in contexts)
    self.assertEmpty(set(one) & set(other))

  def test_epochs_that_resume_augment_alike(self):
    def stream(epoch, step):
      return [
        seed.tolist()
        for seed in data_lib.make_epochs(
          formula.arrays(_N),
          data_lib.PipelineOptions(8, seed=3),
          epoch,
          3,
          steps_per_epoch=5,
          first_step=step,
          augment_fn=lambda x, y, seed: seed,
        ).as_numpy_iterator()
      ]

    whole = stream(0, 0)
    self.assertLen({tuple(seed) for seed in whole}, 15)
    for epoch, step in ((0, 2), (1, 0), (2, 4)):
      self.assertEqual(stream(epoch, step), whole[5 * epoch + step :])


class FilesOfAnySchemaTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    # More files than are open at once, and one without a record.
    self.counts = [0, 5, 17, 1, 9, 3, 16] + 13 * [2]
    number = iter(range(sum(self.counts)))
    self.paths = []
    for i, count in enumerate(self.counts):
      self.paths.append(f'{self.directory}/{i:02d}.rec')
      with tf.io.TFRecordWriter(self.paths[-1]) as writer:
        for _ in range(count):
          writer.write(b'%d' % next(number))

  def parse(self, records):
    key = tf.strings.to_number(records, tf.int64)
    return {'key': key, 'text': records}

  def read_late(self, path):
    def wait(path):
      time.sleep(random.uniform(0, 0.03))
      return path

    late = tf.numpy_function(wait, [path], tf.string)
    return tf.data.TFRecordDataset(tf.ensure_shape(late, []))

  def keys(self, training, late=False, parse_fn=None, **changes):
    options = data_lib.PipelineOptions(
      **({'global_batch_size': 6, 'seed': 2} | changes)
    )
    dataset = data_lib.make_file_dataset(
      f'{self.directory}/*.rec',
      parse_fn or self.parse,
      options,
      training,
      read_fn=self.read_late if late else None,
      counts=self.counts if late else None,
    )
    self.assertEqual(int(dataset.cardinality()), -(-sum(self.counts) // 6))
    batches = list(dataset.as_numpy_iterator())
    for batch in batches:
      self.assertEqual(
        batch['text'].tolist(), [b'%d' % k for k in batch['key']]
      )
    return np.concatenate([batch['key'] for batch in batches]).tolist()

  @parameterized.parameters('none', 'memory')
  def test_every_record_once_and_evaluation_in_order(self, cache):
    n = sum(self.counts)
    self.assertEqual(self.keys(False, cache=cache), list(range(n)))
    order = self.keys(True, cache=cache)
    self.assertCountEqual(order, range(n))
    self.assertNotEqual(order, list(range(n)))

  @parameterized.parameters(
    {'training': True},
    {'training': True, 'cache': 'memory', 'shuffle_buffer': 7},
    {'training': False},
  )
  def test_same_order_whichever_file_is_late(self, training, **changes):
    expected = self.keys(training, num_parallel_calls=1, **changes)
    order = self.keys(training, late=True, num_parallel_calls=7, **changes)
    self.assertEqual(order, expected)

  def test_same_order_whichever_batch_is_late(self):
    def parse(records):
      def wait(records):
        time.sleep(random.uniform(0, 0.03))
        return records

      late = tf.ensure_shape(
        tf.numpy_function(wait, [records], tf.string), records.shape
      )
      return self.parse(late)

    for cache in ('none', 'memory'):
      one, other = (
        self.keys(True, parse_fn=parse, num_parallel_calls=8, cache=cache)
        for _ in range(2)
      )
      self.assertEqual(one, other)

  def test_refusals(self):
    options = data_lib.PipelineOptions(6)
    for paths, kwargs, error, message in (
      (f'{self.directory}/*.none', {}, errors.DataError, 'no such file'),
      (self.directory, {}, errors.DataError, 'a directory'),
      ([], {}, errors.DataError, 'empty list'),
      (['nowhere'], {}, errors.DataError, 'nowhere: no such'),
      (
        self.paths,
        {'read_fn': tf.data.TFRecordDataset},
        errors.UnsupportedOptionError,
        'read_fn without counts',
      ),
      (
        self.paths,
        {'counts': [1]},
        errors.UnsupportedOptionError,
        '1 counts for 20 files',
      ),
    ):
      with self.assertRaisesRegex(error, message):
        data_lib.make_file_dataset(paths, self.parse, options, True, **kwargs)


if __name__ == '__main__':
  tf.test.main()
