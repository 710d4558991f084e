import sys
from unittest import mock

import numpy as np
import tensorflow as tf

from examples import datasets
from examples.datasets import digits
from tests.data import formula

try:
  from sklearn import datasets as sklearn_datasets
except ImportError:
  sklearn_datasets = None


class LoadDigitsTest(formula.DataTestCase):
  def setUp(self):
    super().setUp()
    if sklearn_datasets is None:
      self.skipTest('scikit-learn is not installed')

  def test_pixels_are_the_originals_interpolated(self):
    data = datasets.load_digits()
    bunch = sklearn_datasets.load_digits()
    train, test = digits.stratified_split(bunch.target)
    for split, indices in ((data.train, train), (data.test, test)):
      self.assertAllEqual(split.labels, bunch.target[indices])
      expected = tf.image.resize(
        bunch.images[indices][..., np.newaxis] * 255 / 16, [28, 28]
      )
      np.testing.assert_allclose(split.images, expected, atol=0.5 + 1e-3)
    # The grey levels use the whole range of a byte.
    self.assertGreater(data.train.images.max(), 245)


class WithoutScikitLearnTest(formula.DataTestCase):
  def test_names_the_extra(self):
    with mock.patch.dict(sys.modules, {'sklearn': None}):
      self.assert_data_error(
        ['digits', 'scikit-learn', "pip install '.[examples]'"],
        datasets.load_digits,
      )


if __name__ == '__main__':
  tf.test.main()
