import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from examples import datasets
from tests.data import formula


class ImagesTest(formula.DataTestCase, parameterized.TestCase):
  def test_refuses_images(self):
    self.assert_data_error(
      ['images', 'uint8 [3, 28, 28]', 'uint8 [n, 28, 28, 1]'],
      datasets.Images,
      np.zeros([3, 28, 28], np.uint8),
      np.arange(3),
    )

  @parameterized.named_parameters(
    ('dtype', np.arange(3.0), ['labels', 'float64 [3]', 'int64 [n]']),
    ('length', np.arange(2), ['3 images', '2 labels']),
    (
      'negative',
      np.array([0, -4, -5]),
      ['label -4 of example 1', 'at least 0'],
    ),
  )
  def test_refuses_labels(self, labels, fragments):
    self.assert_data_error(
      fragments, datasets.Images, formula.images(3), labels
    )


if __name__ == '__main__':
  tf.test.main()
