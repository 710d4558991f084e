"""Shards that `extract` left: every value comes back, and damage is named."""

import os

import pytest
import tensorflow as tf
from absl.testing import parameterized

from examples import datasets
from examples.datasets import tfrecord
from tests.data import formula
from tf_strategies import errors


def _example(**changes):
  values = {'image_raw': bytes(784), 'label': 1, 'height': 28, 'width': 28}
  feature = {}
  for name, value in (values | changes).items():
    if isinstance(value, bytes):
      feature[name] = tf.train.Feature(
        bytes_list=tf.train.BytesList(value=[value])
      )
    elif value is not None:
      feature[name] = tf.train.Feature(
        int64_list=tf.train.Int64List(value=[value])
      )
  return tf.train.Example(features=tf.train.Features(feature=feature))


class TFRecordTest(formula.DataTestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.directory = os.path.join(self.new_dir(), 'out')

  def extract(self):
    path = formula.write_npz(os.path.join(self.new_dir(), 'mnist.npz'))
    datasets.extract(path, self.directory, examples_per_shard=8)
    return datasets.tfrecords(self.directory, 'train').paths

  def assert_unreadable(self, *fragments):
    self.assert_data_error(fragments, datasets.load_tfrecords, self.directory)

  @pytest.mark.smoke
  def test_every_value_comes_back(self):
    paths = self.extract()
    self.assertLen(paths, 3)
    record = next(iter(tf.data.TFRecordDataset(paths[0]))).numpy()
    feature = tf.train.Example.FromString(record).features.feature
    self.assertCountEqual(feature, ['image_raw', 'label', 'height', 'width'])
    loaded = datasets.load_tfrecords(self.directory)
    self.assertEqual(loaded.name, 'mnist')
    self.assert_same_data(loaded, formula.dataset())
    source = datasets.tfrecords(self.directory, 'test')
    self.assertEqual(source.counts, (8, 1))

  @parameterized.named_parameters(
    ('missing', os.remove, 'missing'),
    ('truncated', lambda path: os.truncate(path, 100), '100 bytes'),
  )
  def test_damage_is_found_before_the_first_step(self, damage, fragment):
    path = self.extract()[1]
    damage(path)
    self.assert_unreadable(path, fragment, 'extract')
    self.assert_data_error(
      [path, fragment], datasets.tfrecords, self.directory, 'train'
    )

  @parameterized.parameters(7, 9, 100, -2)
  def test_flipped_bit(self, position):
    path = self.extract()[1]
    with open(path, 'r+b') as f:
      f.seek(position, os.SEEK_SET if position > 0 else os.SEEK_END)
      byte = f.read(1)[0]
      f.seek(-1, os.SEEK_CUR)
      f.write(bytes([byte ^ 0x10]))
    self.assert_unreadable(path, 'unreadable record', 'extract again')

  @parameterized.named_parameters(
    ('no_example', [b'\xff\xff'], 'unreadable record'),
    ('no_image', [_example(image_raw=None)], 'image_raw'),
    ('short_image', [_example(image_raw=bytes(783))], '784 bytes'),
    ('later_image', [_example(), _example(image_raw=None)], 'image_raw'),
    ('no_test_split', [_example()], 'no shard of test'),
  )
  def test_other_records(self, records, fragment):
    source = self.create_tempfile().full_path
    datasets.extract(source, self.directory, lambda path: records)
    self.assert_unreadable(self.directory, 'expected', fragment)

  def test_image_of_twice_the_size(self):
    # As many bytes as two images: a reshape to [-1, 28, 28, 1] would take one
    # record for two images.
    record = _example(image_raw=bytes(1568)).SerializeToString()
    with self.assertRaises(tf.errors.InvalidArgumentError):
      tfrecord.parse_examples(tf.constant([record] * 3))

  def test_missing_directory_and_split(self):
    self.assert_data_error(
      [self.directory, 'not a manifest', 'extract'],
      datasets.tfrecords,
      self.directory,
      'train',
    )
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, "split='validation'"
    ):
      datasets.tfrecords(self.directory, 'validation')


if __name__ == '__main__':
  tf.test.main()
