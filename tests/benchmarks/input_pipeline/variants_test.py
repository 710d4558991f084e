"""Every variant yields each example once, with the same pixels."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from benchmarks.input_pipeline import variants
from examples import datasets
from tests.data import formula

_NUM_EXAMPLES = 22
_ONCE = [name for name in variants.NAMES if name != 'constant']


def _records_of(path):
  return tf.data.TFRecordDataset(path).as_numpy_iterator()


class VariantsTest(formula.DataTestCase):
  def source(self):
    directory = self.path('out')
    source = formula.write_records(self.new_dir(), _NUM_EXAMPLES, 4)
    datasets.extract(source.paths, directory, _records_of)
    return variants.Source(formula.arrays(_NUM_EXAMPLES), 8, directory)

  @parameterized.parameters(*_ONCE)
  def test_each_example_occurs_once_per_epoch(self, name):
    dataset = variants.build(name, self.source())
    for _ in range(2):
      images, labels = zip(*dataset.as_numpy_iterator(), strict=True)
      self.assertEqual([len(part) for part in labels], [8, 8, 6])
      images, labels = np.concatenate(images), np.concatenate(labels)
      self.assertEqual(images.dtype, np.float32)
      self.assertCountEqual(labels, range(_NUM_EXAMPLES))
      expected = formula.images(_NUM_EXAMPLES)[labels] / np.float32(255)
      self.assertAllClose(images, expected, atol=1e-6)


if __name__ == '__main__':
  tf.test.main()
