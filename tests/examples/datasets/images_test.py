import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from examples import datasets
from tests.data import formula


class ImagesTest(formula.DataTestCase, parameterized.TestCase):
  def test_take(self):
    arrays = formula.arrays(7)
    np.testing.assert_array_equal(arrays.take(3).images, formula.images(3))
    self.assertEqual(arrays.take(3).labels.tolist(), [0, 1, 2])
    self.assertLen(arrays.take(70), 7)
    self.assert_data_error(['count=0', 'at least 1'], arrays.take, 0)

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

  def test_refuses_nothing(self):
    self.assert_data_error(
      ['no examples'], datasets.Images, formula.images(0), np.arange(0)
    )


class ImageClassificationDataTest(formula.DataTestCase, parameterized.TestCase):
  @parameterized.parameters(
    ('mnist', 5, ['test', 'label 5 of example 5', '0 to 4', 'num_classes=5']),
    ('a-b', 10, ['letters']),
    ('mnist', 1, ['at least 2']),
  )
  def test_refuses(self, name, num_classes, fragments):
    self.assert_data_error(
      fragments,
      datasets.ImageClassificationData,
      name,
      formula.arrays(1),
      formula.arrays(7),
      num_classes,
    )


if __name__ == '__main__':
  tf.test.main()
