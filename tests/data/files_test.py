"""Files and arrays of any structure and dtype can be a source."""

import os
import random
import struct
import time

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests.data import formula
from tf_strategies import data as data_lib
from tf_strategies import errors
from tf_strategies.data import files


class FilesOfAnySchemaTest(formula.DataTestCase):
  def setUp(self):
    super().setUp()
    # More files than can be open at once, and one without records.
    self.counts = [0, 5, 17, 1, 9, 3, 16] + 13 * [2]
    number = iter(range(sum(self.counts)))
    self.paths = []
    for i, count in enumerate(self.counts):
      self.paths.append(self.path(f'{i:02d}.rec'))
      with tf.io.TFRecordWriter(self.paths[-1]) as writer:
        for _ in range(count):
          writer.write(b'%d' % next(number))

  def parse(self, records):
    return {'key': tf.strings.to_number(records, tf.int64), 'text': records}

  def read_late(self, path):
    def wait(path):
      time.sleep(random.uniform(0, 0.03))
      return path

    late = tf.numpy_function(wait, [path], tf.string)
    return tf.data.TFRecordDataset(tf.ensure_shape(late, []))

  def keys(self, late=False, **given):
    pattern = f'{self.directory}/*.rec'
    source = data_lib.TFRecords(pattern, self.parse)
    if late:
      source = data_lib.Files(pattern, self.read_late, self.parse, self.counts)
    dataset = self.make(source, seed=2, **given)
    self.assertEqual(int(dataset.cardinality()), -(-sum(self.counts) // 8))
    batches = list(dataset.as_numpy_iterator())
    for batch in batches:
      self.assertEqual(
        batch['text'].tolist(), [b'%d' % k for k in batch['key']]
      )
    return np.concatenate([batch['key'] for batch in batches]).tolist()

  @parameterized.parameters(
    {'training': True, 'cache': 'memory', 'shuffle_buffer': 7},
    {'training': True},
    {'training': False},
  )
  def test_every_record_once_even_if_files_are_late(self, **given):
    keys = self.keys(**given)
    n = sum(self.counts)
    self.assertCountEqual(keys, range(n))
    self.assertEqual(keys == list(range(n)), not given['training'])
    self.assertEqual(self.keys(late=True, **given), keys)

  def test_invalid_paths_and_counts_are_refused(self):
    for paths, message in (
      (f'{self.directory}/*.none', 'none.*got none'),
      (self.directory, 'a directory'),
      (['nowhere'], 'nowhere.*No such file'),
    ):
      with self.assertRaisesRegex(errors.DataError, message):
        data_lib.TFRecords(paths, self.parse)
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, '1 counts for 20 files'
    ):
      data_lib.TFRecords(self.paths, self.parse, counts=[1])

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
    dataset = self.make(source, global_batch_size=3, training=False)
    keys = [batch['key'].tolist() for batch in dataset.as_numpy_iterator()]
    self.assertEqual(keys, [[0, 1, 2], [3, 4]])


class FramingTest(formula.DataTestCase):
  def test_damaged_files_raise(self):
    path = self.path('x')
    self.assert_data_error([path, 'cannot be read'], files.count_records, path)
    source = formula.write_records(self.new_dir(), 9, 3)
    os.truncate(source.paths[1], os.path.getsize(source.paths[1]) - 1)
    self.assert_data_error(
      [source.paths[1], 'truncated', 'record 2'],
      data_lib.TFRecords,
      source.paths,
      source.parse_fn,
    )
    # A length beyond the end of any file.
    with open(path, 'wb') as f:
      f.write(struct.pack('<QI', 2**64 - 1, 0) + bytes(100))
    self.assert_data_error(
      [path, 'record 0 at byte 0'], files.count_records, path
    )

  def test_count_equals_records_that_tensorflow_wrote(self):
    path = self.path('other')
    for sizes in (range(1, 3000, 7), ()):
      with tf.io.TFRecordWriter(path) as writer:
        for n in sizes:
          writer.write(b'x' * n)
      self.assertEqual(files.count_records(path), len(sizes))


class ArraysTest(formula.DataTestCase):
  @parameterized.named_parameters(
    ('list', [np.arange(5) * 10, np.arange(5)], lambda b: b[0].tolist()),
    (
      'dict',
      {'a': np.arange(5) * 10, 'b': np.array(list('abcde'))},
      lambda b: b['a'].tolist(),
    ),
  )
  def test_source_of_any_structure_is_read(self, components, read):
    for training in (False, True):
      dataset = self.make(
        components, global_batch_size=3, seed=1, training=training
      )
      found = [row for b in dataset.as_numpy_iterator() for row in read(b)]
      if not training:
        self.assertEqual(found, [0, 10, 20, 30, 40])
      self.assertCountEqual(found, [0, 10, 20, 30, 40])

  @parameterized.named_parameters(
    ('lengths', (np.arange(3), np.arange(2)), r'\[3, 2\]'),
    ('no_rows', np.zeros([0, 2]), r'\[0\]'),
    ('scalar', np.zeros([]), r'\[None\]'),
  )
  def test_invalid_arrays_are_refused(self, components, message):
    with self.assertRaisesRegex(errors.DataError, message):
      data_lib.Arrays(components)


if __name__ == '__main__':
  tf.test.main()
