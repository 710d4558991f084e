import contextlib
import importlib
import io
import os
import pathlib
import runpy
import types
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from absl.testing import parameterized

from benchmarks import processes
from examples import datasets
from examples.datasets import tfrecord
from tests.data import formula
from tf_strategies import errors


def _example(**changes):
  values = {'image_raw': bytes(784), 'label': 1, 'height': 28, 'width': 28}
  values.update(changes)
  feature = {}
  for name, value in values.items():
    if isinstance(value, bytes):
      feature[name] = tf.train.Feature(
        bytes_list=tf.train.BytesList(value=[value])
      )
    elif value is not None:
      feature[name] = tf.train.Feature(
        int64_list=tf.train.Int64List(value=[value])
      )
  return tf.train.Example(
    features=tf.train.Features(feature=feature)
  ).SerializeToString()


def _write(path, records):
  with tf.io.TFRecordWriter(path) as writer:
    for record in records:
      writer.write(record)
  return path


class RoundTripTest(formula.DataTestCase, parameterized.TestCase):
  @parameterized.parameters(1, 2, 9, 4)
  def test_every_value_and_the_order_come_back(self, num_shards):
    directory = self.new_dir()
    expected = formula.dataset(num_train=23, num_test=9)
    paths = datasets.write_tfrecords(expected, directory, num_shards)
    self.assertLen(paths, 2 * num_shards)
    self.assertCountEqual(
      os.listdir(directory), [os.path.basename(path) for path in paths]
    )
    actual = datasets.load_tfrecords(directory)
    self.assertEqual(actual.name, 'mnist')
    self.assert_same_data(actual, expected)
    self.assertEqual(datasets.tfrecords(directory, 'train').num_examples, 23)
    self.assertEqual(datasets.tfrecords(directory, 'test').num_examples, 9)

  def test_example_i_is_in_shard_i_modulo_the_count(self):
    directory = self.new_dir()
    datasets.write_tfrecords(formula.numbered(11, 4), directory, 3)
    for shard in range(3):
      path = os.path.join(
        directory, f'mnist-train-{shard:05d}-of-00003.tfrecord'
      )
      labels = []
      for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
        feature = tf.train.Example.FromString(record).features.feature
        label = feature['label'].int64_list.value[0]
        labels.append(label)
        self.assertEqual(
          feature['image_raw'].bytes_list.value[0],
          formula.images(1, label).tobytes(),
        )
        self.assertEqual(feature['height'].int64_list.value, [28])
        self.assertEqual(feature['width'].int64_list.value, [28])
      self.assertEqual(labels, list(range(shard, 11, 3)))

  def test_more_records_than_one_read(self):
    directory = self.new_dir()
    with mock.patch.object(tfrecord, '_READ_BATCH', 4):
      datasets.write_tfrecords(formula.dataset(), directory, 2)
      self.assert_same_data(
        datasets.load_tfrecords(directory), formula.dataset()
      )

  def test_name_and_classes(self):
    directory = pathlib.Path(self.new_dir()) / 'deep' / 'er'
    data = datasets.make_synthetic(num_train=30, num_test=20, num_classes=15)
    datasets.write_tfrecords(data, directory, 2)
    actual = datasets.load_tfrecords(directory, num_classes=15)
    self.assertEqual(actual.name, 'synthetic')
    self.assert_same_data(actual, data)
    self.assert_data_error(
      [str(directory), 'label 10'], datasets.load_tfrecords, directory
    )


class WriteTest(formula.DataTestCase, parameterized.TestCase):
  @parameterized.parameters(0, -1, 10)
  def test_refuses_number_of_shards(self, num_shards):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, f'num_shards={num_shards}.*1 to 9'
    ):
      datasets.write_tfrecords(formula.dataset(), self.new_dir(), num_shards)

  def test_never_mixes_with_old_shards(self):
    directory = self.new_dir()
    datasets.write_tfrecords(formula.dataset(), directory, 2)
    before = sorted(os.listdir(directory))
    self.assert_data_error(
      [directory, 'already'],
      datasets.write_tfrecords,
      formula.dataset(),
      directory,
      4,
    )
    self.assertEqual(sorted(os.listdir(directory)), before)

  def test_cut_short_leaves_nothing_that_looks_like_data(self):
    directory = self.new_dir()

    def fail_late(line):
      self.assertFalse(tfrecord.is_tfrecord_directory(directory), line)
      self.assertNotEmpty(os.listdir(directory))
      if 'test-00001' in line:
        raise KeyboardInterrupt

    with self.assertRaises(KeyboardInterrupt):
      datasets.write_tfrecords(formula.dataset(), directory, 2, fail_late)
    self.assertEmpty(os.listdir(directory))

  def test_unwritable(self):
    path = os.path.join(self.new_dir(), 'file')
    pathlib.Path(path).write_text('in the way')
    self.assert_data_error(
      [path, 'cannot be written'],
      datasets.write_tfrecords,
      formula.dataset(),
      path,
      2,
    )

  def test_reports_each_shard(self):
    lines = []
    datasets.write_tfrecords(
      formula.dataset(23, 9), self.new_dir(), 2, lines.append
    )
    self.assertEqual(
      lines,
      [
        'mnist-train-00000-of-00002.tfrecord: 12 examples',
        'mnist-train-00001-of-00002.tfrecord: 11 examples',
        'mnist-test-00000-of-00002.tfrecord: 5 examples',
        'mnist-test-00001-of-00002.tfrecord: 4 examples',
      ],
    )


class DamageTest(formula.DataTestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.directory = self.new_dir()
    self.paths = datasets.write_tfrecords(formula.dataset(), self.directory, 4)

  def assert_unreadable(self, *fragments):
    self.assert_data_error(fragments, datasets.load_tfrecords, self.directory)

  @parameterized.parameters(0, 3, 5, 7)
  def test_missing_shard(self, index):
    os.remove(self.paths[index])
    name = os.path.basename(self.paths[index])
    self.assert_unreadable(self.directory, '3 of 4 shards', name, 'missing')

  def test_shard_beyond_the_count(self):
    extra = os.path.join(self.directory, 'mnist-test-00004-of-00004.tfrecord')
    _write(extra, [_example()])
    self.assert_unreadable(self.directory, '5 of 4', 'out of range')

  def test_unfinished_shard_is_not_taken_for_data(self):
    os.replace(self.paths[1], self.paths[1] + '.tmp-123')
    self.assert_unreadable('3 of 4 shards', os.path.basename(self.paths[1]))

  def test_no_shard_of_a_split(self):
    for path in self.paths[4:]:
      os.remove(path)
    self.assert_unreadable(
      self.directory, 'no TFRecord shard of test', 'mnist-test-00000-of-00004'
    )

  def test_two_sets(self):
    _write(
      os.path.join(self.directory, 'mnist-train-00000-of-00001.tfrecord'),
      [_example()],
    )
    self.assert_unreadable(
      'several sets', 'mnist-train-*-of-00001', 'mnist-train-*-of-00004'
    )

  def test_splits_of_different_sets(self):
    for path in self.paths[4:]:
      os.replace(path, path.replace('mnist-test', 'digits-test'))
    self.assert_unreadable('train is mnist', 'test is digits')

  @parameterized.parameters(1, 4, 843, 400)
  def test_truncated(self, missing):
    size = os.path.getsize(self.paths[2])
    os.truncate(self.paths[2], size - missing)
    self.assert_unreadable(self.paths[2], 'truncated or corrupt', 'record 5')
    self.assert_data_error(
      [self.paths[2]], datasets.tfrecords, self.directory, 'train'
    )

  def test_empty(self):
    os.truncate(self.paths[1], 0)
    expected = [self.paths[1], 'no record', 'write it again']
    self.assert_unreadable(*expected)
    self.assert_data_error(
      expected, datasets.tfrecords, self.directory, 'train'
    )

  @parameterized.named_parameters(
    ('pixel', 100, 'corrupt record'),
    ('payload_checksum', -2, 'corrupt record'),
    ('length_checksum', 9, 'corrupt record'),
    ('length', 7, 'truncated or corrupt'),
  )
  def test_corrupted(self, position, fragment):
    with open(self.paths[6], 'rb') as f:
      content = bytearray(f.read())
    content[position] ^= 0x10
    with open(self.paths[6], 'wb') as f:
      f.write(content)
    self.assert_unreadable(self.paths[6], fragment, 'write it again')

  def test_other_bytes(self):
    with open(self.paths[0], 'wb') as f:
      f.write(b'train-images-idx3-ubyte' * 50)
    self.assert_unreadable(self.paths[0], 'truncated or corrupt')

  @parameterized.named_parameters(
    ('no_example', [b'\xff\xff'], ['no tf.train.Example']),
    ('no_label', [_example(label=None)], ['lacks label']),
    (
      'no_image_in_a_later_record',
      [_example(), _example(image_raw=None)],
      ['unreadable record', 'image_raw'],
    ),
    ('height', [_example(height=14)], ['height [14]', '28']),
    ('short_image', [_example(image_raw=bytes(783))], ['[783]', '784']),
    (
      'short_image_in_a_later_record',
      [_example(), _example(image_raw=bytes(783))],
      ['unreadable record', '784'],
    ),
    (
      'label_out_of_range',
      [_example(), _example(label=10)],
      ['label 10', '0 to 9'],
    ),
  )
  def test_other_records(self, records, fragments):
    _write(self.paths[4], records)
    where = self.directory if 'label 10' in fragments else self.paths[4]
    self.assert_unreadable(where, 'expected', *fragments)

  def test_all_images_of_twice_the_size(self):
    # As many bytes as twice the images: a reshape to [-1, 28, 28, 1] would
    # take one record for two images.
    records = tf.constant([_example(image_raw=bytes(1568))] * 3)
    with self.assertRaises(tf.errors.InvalidArgumentError):
      tfrecord.parse_examples(records)

  def test_missing_directory_and_split(self):
    path = os.path.join(self.directory, 'nothing')
    self.assert_data_error(
      [path, 'no such directory'], tfrecord.find_shards, path, 'train'
    )
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, "split='validation'"
    ):
      tfrecord.find_shards(self.directory, 'validation')


class CommandTest(formula.DataTestCase):
  def run_command(self, *arguments):
    return processes.run_python(
      '-m', 'examples.datasets.write_tfrecords', *arguments
    )

  @pytest.mark.soak
  def test_writes_what_load_reads(self):
    source, target = self.new_dir(), self.new_dir()
    path = formula.write_npz(os.path.join(source, 'mnist.npz'))
    result = self.run_command(
      f'--data_path={path}', f'--output_dir={target}', '--num_shards=3'
    )
    self.assertEqual(result.returncode, 0, result.stderr)
    self.assertIn('mnist-test-00002-of-00003.tfrecord: 3', result.stdout)
    self.assertIn('Wrote 23 + 9 examples of mnist to 6 files', result.stdout)
    self.assertNotIn('RuntimeWarning', result.stderr)
    self.assert_same_data(datasets.load('mnist', target), formula.dataset())

  def test_says_what_is_wrong_without_a_traceback(self):
    path = os.path.join(self.new_dir(), 'none.npz')
    command = importlib.import_module(
      'examples.datasets.write_tfrecords.__main__'
    )
    args = types.SimpleNamespace(
      dataset='mnist', data_path=path, output_dir='unused', num_shards=4
    )
    stderr = io.StringIO()
    with (
      mock.patch.object(flags, 'FLAGS', args),
      contextlib.redirect_stderr(stderr),
    ):
      self.assertEqual(command.main(['write_tfrecords']), 1)
    self.assertIn(f'{path}: no such file', stderr.getvalue())
    self.assertFalse(os.path.exists('unused'))

  def test_importing_defines_no_flag_and_keeps_the_function(self):
    module = 'examples.datasets.write_tfrecords.__main__'
    self.assertIn('main', runpy.run_module(module))
    importlib.import_module(module)
    self.assertNotIn('output_dir', flags.FLAGS)
    self.assertTrue(callable(datasets.write_tfrecords))


class UnequalShardsTest(formula.DataTestCase):
  def test_order_of_shards_of_unequal_lengths(self):
    directory = self.new_dir()
    for shard, labels in enumerate(([0, 3, 5], [1], [2, 4])):
      for split in ('train', 'test'):
        _write(
          os.path.join(
            directory, tfrecord.shard_name('mnist', split, shard, 3)
          ),
          [_example(label=label) for label in labels],
        )
    data = datasets.load_tfrecords(directory)
    self.assertEqual(data.train.labels.tolist(), [0, 1, 2, 3, 4, 5])
    self.assertEqual(np.sum(data.train.images), 0)


if __name__ == '__main__':
  tf.test.main()
