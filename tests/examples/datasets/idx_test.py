import gzip
import os
import struct

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from examples import datasets
from examples.datasets import idx
from tests.data import formula

_NAMES = [name for pair in formula.IDX_NAMES.values() for name in pair]


class LoadIdxTest(formula.DataTestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.directory = self.new_dir()

  def path(self, name):
    return os.path.join(self.directory, name)

  def write(self, name, content):
    with open(self.path(name), 'wb') as f:
      f.write(content)
    return self.path(name)

  @parameterized.parameters(True, False)
  def test_every_value_comes_back(self, compressed):
    data = datasets.load_idx(formula.write_idx(self.directory, compressed))
    self.assert_same_data(data, formula.dataset())

  @parameterized.parameters(_NAMES)
  def test_missing_and_truncated_file(self, name):
    formula.write_idx(self.directory)
    path = self.path(name + '.gz')
    os.truncate(path, os.path.getsize(path) - 1)
    self.assert_data_error(
      [path, 'truncated or damaged gzip'], datasets.load_idx, self.directory
    )
    os.remove(path)
    self.assert_data_error(
      [self.directory, f'lacks {name}.gz', 'expected the four'],
      datasets.load_idx,
      self.directory,
    )
    self.assertTrue(idx.is_idx_directory(self.directory))

  def test_not_gzip(self):
    formula.write_idx(self.directory)
    path = self.path(_NAMES[1] + '.gz')
    with open(path, 'rb') as f:
      flipped = bytearray(f.read())
    flipped[-6] ^= 1  # In the checksum that ends the stream.
    for content in (flipped, b'<html>404</html>'):
      self.write(_NAMES[1] + '.gz', content)
      self.assert_data_error(
        [path, 'damaged gzip', 'expected a complete'],
        datasets.load_idx,
        self.directory,
      )

  @parameterized.parameters(0x00000D03, 0x00000801)
  def test_wrong_magic(self, magic):
    path = self.write('x', struct.pack('>4I', magic, 1, 28, 28) + bytes(784))
    self.assert_data_error(
      [path, f'0x{magic:08x}', 'expected 0x00000803'],
      idx.read_idx,
      path,
      num_dims=3,
    )

  @parameterized.parameters(0, 15)
  def test_header_cut_short(self, size):
    path = self.write('x', formula.idx_bytes(np.zeros([1, 28, 28]))[:size])
    self.assert_data_error(
      [path, f'{size} bytes', 'header of 16'], idx.read_idx, path, num_dims=3
    )

  @parameterized.parameters(-1, 784)
  def test_size_differs_from_header(self, difference):
    content = formula.idx_bytes(formula.images(2)[..., 0]) + bytes(1000)
    path = self.write('x', content[: 16 + 2 * 784 + difference])
    self.assert_data_error(
      [path, f'{1568 + difference} bytes', 'expected 1568', '[2, 28, 28]'],
      idx.read_idx,
      path,
      num_dims=3,
    )

  def test_header_of_absurd_size(self):
    path = self.write('x', struct.pack('>4I', 0x803, *[2**32 - 1] * 3))
    self.assert_data_error(
      [path, '0 bytes', str((2**32 - 1) ** 3)], idx.read_idx, path, num_dims=3
    )

  @parameterized.named_parameters(
    ('count', _NAMES[1], np.zeros([22]), ['23 images', '22 labels']),
    ('label', _NAMES[3], np.full([9], 10), ['test', 'label 10']),
    ('shape', _NAMES[2], np.zeros([9, 8, 8]), ['test', '[9, 8, 8, 1]']),
    ('empty', _NAMES[0], np.zeros([0, 28, 28]), ['train', '0 images']),
  )
  def test_other_content(self, name, values, fragments):
    formula.write_idx(self.directory)
    self.write(name + '.gz', gzip.compress(formula.idx_bytes(values)))
    self.assert_data_error(
      [self.directory, 'expected', *fragments],
      datasets.load_idx,
      self.directory,
    )

  def test_uncompressed_wins(self):
    formula.write_idx(self.directory)
    self.write(_NAMES[3], formula.idx_bytes(np.full([9], 8)))
    data = datasets.load_idx(self.directory)
    self.assertEqual(data.test.labels.tolist(), [8] * 9)

  def test_missing_path(self):
    path = self.path('nothing')
    self.assert_data_error([path, 'cannot be read'], idx.read_idx, path, 1)


if __name__ == '__main__':
  tf.test.main()
