"""Datasets of each file format return every value, and errors name any damage."""

import gzip
import os
import pathlib
import struct
import sys
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from examples import datasets
from examples.datasets import user_function
from tests import tiers
from tests.data import formula
from tf_strategies import errors

_URL = 'storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz'
_IMAGES, _LABELS = formula.IDX_NAMES['train']


def _npz(**changes):
  """Returns a function that damages an archive by changing its arrays."""
  return lambda path: formula.write_npz(path, **changes)


def _bytes(change, name=''):
  """Returns a function that changes the bytes of a file, or of the file named
  `name`.
  """

  def damage(path):
    files = [path] if not name else sorted(pathlib.Path(path).iterdir())
    file = next(pathlib.Path(f) for f in files if name in str(f))
    file.write_bytes(change(file.read_bytes()))

  return damage


def _flip(position):
  def change(content):
    changed = bytearray(content)
    changed[position] ^= 0x10
    return bytes(changed)

  return change


# The first shard, which has eight examples.
_SHARD = '-train-mnist-'
_DAMAGE = (
  ('npz', 'key', _npz(y_train=None), 'lacks y_train (', 'expected x_train'),
  ('npz', 'label', _npz(y_test=np.full([9], 10)), 'test', 'label 10', '0 to 9'),
  ('npz', 'flipped', _bytes(_flip(5000)), 'not a readable .npz'),
  (
    'idx',
    'missing',
    lambda path: os.remove(f'{path}/{_LABELS}.gz'),
    f'lacks {_LABELS}.gz',
    'the four',
  ),
  (
    'idx',
    'size',
    lambda path: pathlib.Path(path, f'{_LABELS}.gz').write_bytes(
      gzip.compress(struct.pack('>2I', 0x801, 2**32 - 1))
    ),
    '0 bytes',
    str(2**32 - 1),
  ),
  ('shards', 'cut', _bytes(lambda c: c[:100], _SHARD), '100 bytes', _SHARD),
  ('shards', 'pixel', _bytes(_flip(100), _SHARD), 'unreadable', _SHARD),
)


class FormatsTest(formula.DataTestCase):
  def write(self, kind):
    """Writes `formula.dataset()` and returns the file or the directory."""
    directory = self.new_dir()
    if kind == 'idx':
      return formula.write_idx(directory)
    path = formula.write_npz(os.path.join(directory, 'mnist.npz'))
    if kind == 'npz':
      return path
    datasets.extract(path, f'{directory}/out', examples_per_shard=8)
    return f'{directory}/out'

  def assert_refused(self, path, *fragments):
    self.assert_data_error([path, *fragments], datasets.load, 'mnist', path)

  @tiers.parameters('npz', 'idx', tiers.smoke('shards'))
  def test_every_value_is_read_back(self, kind):
    loaded = datasets.load('mnist', pathlib.Path(self.write(kind)))
    self.assertEqual(loaded.name, 'mnist')
    self.assert_same_data(loaded, formula.dataset())

  @parameterized.named_parameters(
    (f'{kind}_{name}', kind, damage, fragments)
    for kind, name, damage, *fragments in _DAMAGE
  )
  def test_damage_is_named(self, kind, damage, fragments):
    path = self.write(kind)
    damage(path)
    self.assert_refused(path, 'expected', *fragments)


class LoadTest(formula.DataTestCase):
  def assert_refused(self, path, *fragments):
    self.assert_data_error(
      [f'data_path={path}', *fragments], datasets.load, 'mnist', path
    )

  def test_missing_dataset_is_refused(self):
    directory, path = self.directory, self.path('mnist.npz')
    self.assert_refused(
      path, 'no such file', 'expected an .npz', _URL, 'train-images-idx3-ubyte'
    )
    self.assert_refused(directory, 'empty directory', _URL, 'extract')
    other = self.path('train.csv')
    pathlib.Path(other).write_text('label,pixel0')
    self.assert_refused(other, 'not an .npz file', _URL)
    self.assert_refused(directory, 'no data set in this directory', _URL)
    formula.write_npz(path)
    self.assert_refused(directory, f'pass the file itself: {path}')
    mixed = formula.write_idx(self.new_dir())
    datasets.extract(path, mixed)
    self.assert_refused(mixed, 'both IDX files and TFRecord')

  @parameterized.parameters(
    ('digits', '/tmp/x', "dataset='digits' with data_path='/tmp/x'"),
    ('cifar10', None, "'mnist', 'digits', 'synthetic'"),
  )
  def test_invalid_dataset_is_refused(self, dataset, path, message):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, message):
      datasets.load(dataset, path)

  def test_mnist_from_keras(self):
    expected = formula.dataset()
    splits = tuple(
      (s.images[..., 0], s.labels.astype(np.uint8))
      for s in (expected.train, expected.test)
    )
    failure = Exception(f'URL fetch failure on https://{_URL}: None')
    load = mock.Mock(side_effect=[splits, failure])
    with mock.patch.object(keras.datasets.mnist, 'load_data', load):
      self.assert_same_data(datasets.load('mnist'), expected)
      self.assert_data_error(
        ['Keras cache', 'URL fetch failure', '--data_path', '--dataset=digits'],
        datasets.load,
        'mnist',
      )


_PIXELS = formula.images(3)


class ImagesTest(formula.DataTestCase):
  @parameterized.named_parameters(
    (
      'shape',
      _PIXELS[..., 0],
      np.arange(3),
      ['images', 'uint8 [3, 28, 28]', 'uint8 [n, 28, 28, 1]'],
    ),
    ('dtype', _PIXELS, np.arange(3.0), ['float64 [3]', 'int64 [n]']),
    ('length', _PIXELS, np.arange(2), ['3 images', '2 labels']),
    ('negative', _PIXELS, -np.arange(3), ['label -1 of example 1', 'least 0']),
  )
  def test_invalid_images_are_refused(self, images, labels, fragments):
    self.assert_data_error(fragments, datasets.Images, images, labels)


class UserFunctionTest(parameterized.TestCase):
  @parameterized.parameters(
    ('convert', 'write --convert='),
    ('no_such_module_here:convert', 'cannot import no_such_module_here'),
    ('os:sep', 'os has no function sep'),
  )
  def test_invalid_function_is_refused(self, name, words):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, f'convert={name!r}.*{words}'
    ):
      user_function.find('convert', name)


class LoadDigitsTest(formula.DataTestCase):
  def test_missing_scikit_learn_names_the_extra(self):
    with mock.patch.dict(sys.modules, {'sklearn': None}):
      self.assert_data_error(
        ['digits', 'scikit-learn', "pip install '.[examples]'"],
        datasets.load_digits,
      )


if __name__ == '__main__':
  tf.test.main()
