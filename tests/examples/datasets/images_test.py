import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from examples import datasets
from tests.data import formula


class ImagesTest(formula.DataTestCase, parameterized.TestCase):
  def test_keeps_values_without_a_copy(self):
    images, labels = formula.images(5), np.arange(5)
    arrays = datasets.Images(images, labels)
    np.testing.assert_array_equal(arrays.images, images)
    np.testing.assert_array_equal(arrays.labels, labels)
    self.assertTrue(np.shares_memory(arrays.images, images))
    self.assertEqual(arrays.num_examples, 5)
    self.assertLen(arrays, 5)

  def test_is_read_only_but_leaves_the_callers_array_writable(self):
    images = formula.images(2)
    arrays = datasets.Images(images, np.arange(2))
    with self.assertRaisesRegex(ValueError, 'read-only'):
      arrays.images[0] = 0
    with self.assertRaisesRegex(ValueError, 'read-only'):
      arrays.labels[0] = 1
    with self.assertRaises(AttributeError):
      arrays.labels = np.arange(2)
    images[0] = 0

  def test_take(self):
    arrays = formula.arrays(7)
    np.testing.assert_array_equal(arrays.take(3).images, formula.images(3))
    self.assertEqual(arrays.take(3).labels.tolist(), [0, 1, 2])
    self.assertLen(arrays.take(70), 7)
    self.assert_data_error(['count=0', 'at least 1'], arrays.take, 0)

  @parameterized.named_parameters(
    ('float', np.zeros([3, 28, 28, 1], np.float32), 'float32 [3, 28, 28, 1]'),
    ('no_channel', np.zeros([3, 28, 28], np.uint8), 'uint8 [3, 28, 28]'),
    ('colour', np.zeros([3, 28, 28, 3], np.uint8), '[3, 28, 28, 3]'),
    ('size', np.zeros([3, 32, 32, 1], np.uint8), '[3, 32, 32, 1]'),
    ('scalar', np.uint8(3) + np.zeros([], np.uint8), 'uint'),
    ('list', [[0]], 'list'),
  )
  def test_refuses_images(self, images, received):
    self.assert_data_error(
      ['images', received, 'uint8 [n, 28, 28, 1]'],
      datasets.Images,
      images,
      np.arange(3),
    )

  @parameterized.named_parameters(
    ('dtype', np.arange(3, dtype=np.int32), 'int32 [3]'),
    ('float', np.arange(3.0), 'float64 [3]'),
    ('one_hot', np.eye(3, dtype=np.int64), 'int64 [3, 3]'),
    ('list', [0, 1, 2], 'list'),
  )
  def test_refuses_labels(self, labels, received):
    self.assert_data_error(
      ['labels', received, 'int64 [n]'],
      datasets.Images,
      formula.images(3),
      labels,
    )

  def test_refuses_lengths_that_differ(self):
    self.assert_data_error(
      ['3 images', '2 labels'], datasets.Images, formula.images(3), np.arange(2)
    )

  def test_refuses_nothing(self):
    self.assert_data_error(
      ['no examples'], datasets.Images, formula.images(0), np.arange(0)
    )

  def test_names_the_negative_label(self):
    self.assert_data_error(
      ['label -4 of example 1', 'at least 0'],
      datasets.Images,
      formula.images(3),
      np.array([0, -4, -5]),
    )


class ImageClassificationDataTest(formula.DataTestCase, parameterized.TestCase):
  @parameterized.parameters('train', 'test')
  def test_names_the_label_out_of_range(self, split):
    splits = {'train': formula.arrays(3), 'test': formula.arrays(3)}
    splits[split] = formula.arrays(7)
    self.assert_data_error(
      [split, 'label 5 of example 5', '0 to 4', 'num_classes=5'],
      datasets.ImageClassificationData,
      'mnist',
      num_classes=5,
      **splits,
    )

  def test_accepts_the_largest_label(self):
    arrays = formula.arrays(5)
    data = datasets.ImageClassificationData('mnist', arrays, arrays, 5)
    self.assertEqual(data.num_classes, 5)

  @parameterized.parameters('', 'a-b', 'a/b', 'a b', None)
  def test_refuses_name(self, name):
    arrays = formula.arrays(2)
    self.assert_data_error(
      [f'name={name!r}', 'letters'],
      datasets.ImageClassificationData,
      name,
      arrays,
      arrays,
      10,
    )

  def test_refuses_one_class(self):
    arrays = formula.arrays(1)
    self.assert_data_error(
      ['num_classes=1', 'at least 2'],
      datasets.ImageClassificationData,
      'mnist',
      arrays,
      arrays,
      1,
    )


if __name__ == '__main__':
  tf.test.main()
