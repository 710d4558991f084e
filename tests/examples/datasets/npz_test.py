import os

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from examples import datasets
from tests.data import formula


class LoadNpzTest(formula.DataTestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.path = os.path.join(self.new_dir(), 'mnist.npz')

  def test_every_value_comes_back(self):
    data = datasets.load_npz(formula.write_npz(self.path))
    self.assertEqual(data.name, 'mnist')
    self.assert_same_data(data, formula.dataset())

  def test_images_may_have_their_channel(self):
    expected = formula.dataset()
    formula.write_npz(
      self.path, x_train=expected.train.images, y_test=expected.test.labels
    )
    self.assert_same_data(datasets.load_npz(self.path), expected)

  def test_missing_file(self):
    self.assert_data_error(
      [self.path, 'no such file', 'x_train', 'tf-keras-datasets/mnist.npz'],
      datasets.load_npz,
      self.path,
    )

  def test_missing_key(self):
    formula.write_npz(self.path, y_train=None)
    self.assert_data_error(
      [self.path, 'lacks y_train (', 'expected x_train, y_train'],
      datasets.load_npz,
      self.path,
    )

  @parameterized.named_parameters(
    ('features', {'x_train': np.zeros([23, 4])}, ['train', '[23, 4]']),
    (
      'floats',
      {'x_test': np.zeros([9, 28, 28], np.float32)},
      ['test', 'float32'],
    ),
    ('scalar', {'x_train': np.uint8(3)}, ['train', 'images']),
    ('float_labels', {'y_train': np.zeros([23])}, ['train', 'float64']),
    ('count', {'y_test': np.zeros([8], np.uint8)}, ['9 images', '8 labels']),
    (
      'label',
      {'y_test': np.full([9], 10, np.uint8)},
      ['test', 'label 10', '0 to 9'],
    ),
    ('empty', {'x_train': np.zeros([0, 28, 28], np.uint8)}, ['train', '0']),
  )
  def test_other_content(self, changes, fragments):
    formula.write_npz(self.path, **changes)
    self.assert_data_error(
      [self.path, 'expected', *fragments], datasets.load_npz, self.path
    )

  @parameterized.named_parameters(
    ('empty', lambda content: b''),
    ('cut', lambda content: content[: len(content) // 2]),
    ('flipped', lambda c: c[:5000] + bytes([c[5000] ^ 1]) + c[5001:]),
    ('text', lambda content: b'label,pixel0\n1,2\n' * 40),
    ('pickle', lambda content: b'\x80\x04N.'),
  )
  def test_other_files(self, change):
    with open(formula.write_npz(self.path), 'rb') as f:
      content = f.read()
    with open(self.path, 'wb') as f:
      f.write(change(content))
    self.assert_data_error(
      [self.path, 'not a readable .npz', 'mnist.npz'],
      datasets.load_npz,
      self.path,
    )

  def test_pickled_objects_are_not_loaded(self):
    formula.write_npz(self.path, x_train=np.array([{}, []], dtype=object))
    self.assert_data_error(
      [self.path, 'not a readable .npz'], datasets.load_npz, self.path
    )


if __name__ == '__main__':
  tf.test.main()
