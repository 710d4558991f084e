import os
import random
import shutil
import struct
import time

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from examples import datasets
from tests.data import formula
from tf_strategies import data as data_lib
from tf_strategies import errors
from tf_strategies.data import files

_TRAIN = 61
_TEST = 23


def _options(**changes):
  return data_lib.PipelineOptions(**({'global_batch_size': 8} | changes))


def _order(dataset) -> list[int]:
  return [int(y) for _, labels in dataset for y in labels]


def _context(pipeline, num_pipelines):
  return tf.distribute.InputContext(
    num_input_pipelines=num_pipelines,
    input_pipeline_id=pipeline,
    num_replicas_in_sync=num_pipelines,
  )


class TFRecordTestCase(formula.DataTestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.directory = self.new_dir()
    self.paths = datasets.write_tfrecords(
      formula.numbered(_TRAIN, _TEST), self.directory, 4
    )

  def make(self, split='train', training=True, **changes):
    return data_lib.make_dataset(
      datasets.tfrecords(self.directory, split),
      _options(**changes),
      training=training,
    )


class ElementsTest(TFRecordTestCase):
  @parameterized.product(
    split_and_count=(('train', _TRAIN), ('test', _TEST)),
    training=(True, False),
    changes=(
      {'shuffle_buffer': 5, 'num_parallel_calls': 1, 'prefetch': 0},
      {'cache': 'memory', 'num_parallel_calls': 9},
      {},
      {'shuffle_buffer': 0},
      {'deterministic': False},
    ),
  )
  def test_every_example_once_with_its_own_pixels(
    self, split_and_count, training, changes
  ):
    split, n = split_and_count
    dataset = self.make(split, training, **changes)
    self.assertEqual(
      dataset.element_spec,
      (
        tf.TensorSpec([None, 28, 28, 1], tf.float32),
        tf.TensorSpec([None], tf.int64),
      ),
    )
    self.assertEqual(int(dataset.cardinality()), -(-n // 8))
    for _ in range(2):
      batches = list(dataset.as_numpy_iterator())
      images = np.concatenate([x for x, _ in batches])
      labels = np.concatenate([y for _, y in batches])
      self.assertLen(batches, -(-n // 8))
      self.assertEqual(sorted(labels), list(range(n)))
      expected = formula.images(n)[labels].astype(np.float32) / 255
      np.testing.assert_allclose(images, expected, rtol=2e-7)

  @parameterized.parameters('none', 'memory')
  def test_evaluation_keeps_the_written_order(self, cache):
    dataset = self.make('test', False, cache=cache, seed=1)
    self.assertEqual(_order(dataset), list(range(_TEST)))
    self.assertEqual(_order(dataset), list(range(_TEST)))

  def test_drop_remainder_and_map_fn(self):
    options = _options(drop_remainder=True)
    dataset = data_lib.make_dataset(
      datasets.tfrecords(self.directory, 'train'),
      options,
      training=True,
      map_fn=lambda x, y: (x - 1, y + 100),
    )
    self.assertEqual(dataset.element_spec[1].shape, [8])
    batches = list(dataset.as_numpy_iterator())
    self.assertLen(batches, 7)
    for images, labels in batches:
      expected = formula.images(_TRAIN)[labels - 100] / np.float32(255) - 1
      np.testing.assert_allclose(images, expected, atol=1e-6)

  def test_damage_is_found_before_the_first_step(self):
    size = os.path.getsize(self.paths[1])
    os.truncate(self.paths[1], size - 1)
    self.assert_data_error([self.paths[1], 'truncated'], self.make)
    os.remove(self.paths[1])
    self.assert_data_error(
      ['3 of 4', os.path.basename(self.paths[1])], self.make
    )

  def test_failed_checksum_stops_the_epoch(self):
    with open(self.paths[3], 'r+b') as f:
      f.seek(-100, os.SEEK_END)
      f.write(b'\xff')
    with self.assertRaises(tf.errors.DataLossError):
      _order(self.make())
    self.assert_data_error(
      [self.paths[3], 'corrupt record'],
      datasets.load_tfrecords,
      self.directory,
      num_classes=_TRAIN,
    )

  @parameterized.parameters('auto', 'data', 'file', 'off')
  def test_options_reach_tensorflow(self, autoshard):
    options = self.make(autoshard=autoshard, deterministic=False).options()
    self.assertEqual(
      options.experimental_distribute.auto_shard_policy,
      tf.data.experimental.AutoShardPolicy[autoshard.upper()],
    )
    self.assertIs(options.deterministic, False)


class OrderTest(TFRecordTestCase):
  @parameterized.parameters(('memory', 10), ('none', None))
  def test_seed_decides_whatever_the_parallelism(self, cache, shuffle_buffer):
    fixed = {'cache': cache, 'shuffle_buffer': shuffle_buffer}
    one = self.make(seed=3, num_parallel_calls=1, **fixed)
    other = self.make(seed=3, num_parallel_calls=4, **fixed)
    epochs = [_order(one) for _ in range(3)]
    self.assertEqual([_order(other) for _ in range(3)], epochs)
    self.assertLen({tuple(epoch) for epoch in epochs}, 3)
    self.assertNotEqual(_order(self.make(seed=4, **fixed)), epochs[0])

  @parameterized.parameters('none', 'memory')
  def test_whole_split_is_shuffled(self, cache):
    # Training reads blocks of 16, which is all of a file here: a buffer of 20
    # would fill the first batch from two of the four files at most.
    dataset = self.make(seed=1, cache=cache)
    files = [
      len({y % 4 for y in next(iter(dataset))[1].numpy()}) for _ in range(8)
    ]
    self.assertEqual(max(files), 4)

  @pytest.mark.smoke
  def test_small_buffer_shuffles_files_too(self):
    # The first example comes from the first ten of the interleaved records,
    # and over the epochs these come from every file.
    dataset = self.make(shuffle_buffer=1, seed=3)
    first = {next(iter(dataset))[1].numpy()[0] % 4 for _ in range(20)}
    self.assertEqual(first, {0, 1, 2, 3})

  def test_repeat(self):
    dataset = self.make(seed=3, repeat=True)
    self.assertEqual(int(dataset.cardinality()), tf.data.INFINITE_CARDINALITY)
    once = self.make(seed=3)
    self.assertEqual(_order(dataset.take(16)), _order(once) + _order(once))


class CacheTest(TFRecordTestCase):
  def remove_source(self):
    shutil.rmtree(self.directory)

  def test_without_a_cache_the_files_are_read_again(self):
    dataset = self.make()
    _order(dataset)
    self.remove_source()
    with self.assertRaises(tf.errors.NotFoundError):
      _order(dataset)

  @pytest.mark.smoke
  def test_later_epochs_come_from_the_cache(self):
    dataset = self.make('test', False, cache='memory')
    first = list(dataset.as_numpy_iterator())
    self.remove_source()
    second = list(dataset.as_numpy_iterator())
    self.assertLen(first, 3)
    for one, other in zip(first, second, strict=True):
      np.testing.assert_array_equal(one[0], other[0])
      np.testing.assert_array_equal(one[1], other[1])

  def test_cache_stands_before_the_shuffle(self):
    dataset = self.make(seed=1, cache='memory')
    first = _order(dataset)
    self.remove_source()
    second = _order(dataset)
    self.assertEqual(sorted(first), list(range(_TRAIN)))
    self.assertEqual(sorted(second), list(range(_TRAIN)))
    self.assertNotEqual(first, second)
    # Batches are made anew as well.
    self.assertNotEqual(set(first[:8]), set(second[:8]))


class PipelinesTest(TFRecordTestCase):
  def shares(self, num_pipelines, training=True, **changes):
    return [
      data_lib.make_dataset(
        datasets.tfrecords(self.directory, 'train'),
        _options(global_batch_size=12, **changes),
        training=training,
        input_context=_context(i, num_pipelines),
      )
      for i in range(num_pipelines)
    ]

  @parameterized.parameters(('auto', 2), ('file', 2), ('file', 3))
  def test_files(self, autoshard, num_pipelines):
    for i, share in enumerate(self.shares(num_pipelines, autoshard=autoshard)):
      files = set(range(i, 4, num_pipelines))
      expected = [y for y in range(_TRAIN) if y % 4 in files]
      self.assertEqual(sorted(_order(share)), expected)
      per_replica = 12 // num_pipelines
      self.assertEqual(
        int(share.cardinality()), -(-len(expected) // per_replica)
      )

  @parameterized.parameters(
    ('auto', 3, 'none'), ('data', 2, 'none'), ('data', 2, 'memory')
  )
  def test_examples(self, autoshard, num_pipelines, cache):
    shares = self.shares(
      num_pipelines, autoshard=autoshard, cache=cache, seed=5
    )
    alone = self.make(seed=5, cache=cache, global_batch_size=12)
    size = 12 // num_pipelines
    expected = [sorted(y.tolist()) for _, y in alone.as_numpy_iterator()]
    orders = [_order(share) for share in shares]
    actual = [
      sorted(y for order in orders for y in order[i : i + size])
      for i in range(0, len(orders[0]), size)
    ]
    self.assertEqual(actual, expected)
    self.assertEqual(
      [int(s.cardinality()) for s in shares],
      [-(-len(order) // size) for order in orders],
    )

  def test_refuses_fewer_files_than_pipelines(self):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, "autoshard='file' with 4 files for 6"
    ):
      self.shares(6, autoshard='file')

  def test_refuses_to_share_examples_without_a_seed(self):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'seed=None'):
      self.shares(2, autoshard='data')
    self.shares(2, autoshard='file')

  @parameterized.parameters('auto', 'file', 'data')
  def test_shard_by_tensorflow(self, autoshard):
    orders = []
    for index in range(2):
      # Each worker makes its own: iterating one twice would be two epochs.
      dataset = self.make(autoshard=autoshard, seed=4)
      variant = tf.raw_ops.AutoShardDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        num_workers=2,
        index=index,
        output_types=[tf.float32, tf.int64],
        output_shapes=[[None, 28, 28, 1], [None]],
      )
      shard = tf.data.experimental.from_variant(variant, dataset.element_spec)
      orders.append(_order(shard))
    self.assertEqual(sorted(orders[0] + orders[1]), list(range(_TRAIN)))
    by_file = {y % 4 for y in orders[0]}
    self.assertLen(by_file, 4 if autoshard == 'data' else 2)


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
    pattern = f'{self.directory}/*.rec'
    parse_fn = parse_fn or self.parse
    source = data_lib.TFRecords(pattern, parse_fn)
    if late:
      source = data_lib.Files(pattern, self.read_late, parse_fn, self.counts)
    dataset = data_lib.make_dataset(source, options, training=training)
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
    {'training': True, 'cache': 'memory', 'shuffle_buffer': 7},
    {'training': True},
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
    with_parser = {'schema': self.parse}
    for make, paths, kwargs, error, message in (
      (
        data_lib.TFRecords,
        f'{self.directory}/*.none',
        with_parser,
        errors.DataError,
        'no such file',
      ),
      (
        data_lib.TFRecords,
        self.directory,
        with_parser,
        errors.DataError,
        'a directory',
      ),
      (data_lib.TFRecords, [], with_parser, errors.DataError, 'empty list'),
      (
        data_lib.TFRecords,
        ['nowhere'],
        with_parser,
        errors.DataError,
        'nowhere: no such',
      ),
      (
        data_lib.Files,
        self.paths,
        {
          'read_fn': tf.data.TFRecordDataset,
          'parse_fn': self.parse,
          'counts': None,
        },
        errors.UnsupportedOptionError,
        'read_fn without counts',
      ),
      (
        data_lib.TFRecords,
        self.paths,
        {'schema': self.parse, 'counts': [1]},
        errors.UnsupportedOptionError,
        '1 counts for 20 files',
      ),
    ):
      with self.assertRaisesRegex(error, message):
        make(paths, **kwargs)

  def test_schema_as_a_dict(self):
    path = f'{self.directory}/examples.tfrecord'
    with tf.io.TFRecordWriter(path) as writer:
      for key in range(5):
        feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[key]))
        features = tf.train.Features(feature={'key': feature})
        writer.write(tf.train.Example(features=features).SerializeToString())
    source = data_lib.TFRecords(
      path, {'key': tf.io.FixedLenFeature([], tf.int64)}
    )
    self.assertLen(source, 5)
    dataset = data_lib.make_dataset(
      source, data_lib.PipelineOptions(3), training=False
    )
    keys = [batch['key'].tolist() for batch in dataset.as_numpy_iterator()]
    self.assertEqual(keys, [[0, 1, 2], [3, 4]])


class FramingTest(formula.DataTestCase):
  def test_length_that_reaches_beyond_any_file(self):
    path = os.path.join(self.new_dir(), 'x')
    with open(path, 'wb') as f:
      f.write(struct.pack('<QI', 2**64 - 1, 0) + bytes(100))
    self.assert_data_error(
      [path, 'record 0 at byte 0'], files.count_records, path
    )

  def test_unreadable(self):
    path = os.path.join(self.new_dir(), 'x')
    self.assert_data_error([path, 'cannot be read'], files.count_records, path)

  def test_count_equals_what_tensorflow_reads(self):
    path = os.path.join(self.new_dir(), 'other')
    with tf.io.TFRecordWriter(path) as writer:
      for n in range(1, 3000, 7):
        writer.write(b'x' * n)
    count = sum(1 for _ in tf.data.TFRecordDataset(path))
    self.assertEqual(files.count_records(path), count)
    with tf.io.TFRecordWriter(path):
      pass
    self.assertEqual(files.count_records(path), 0)


if __name__ == '__main__':
  tf.test.main()
