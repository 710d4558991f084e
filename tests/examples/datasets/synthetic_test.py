import numpy as np
import tensorflow as tf

from examples import datasets
from tests.data import formula


class MakeSyntheticTest(formula.DataTestCase):
  def test_seed_decides(self):
    make = datasets.make_synthetic
    self.assert_same_data(make(50, 20, seed=4), make(50, 20, seed=4))
    one, other = make(50, 20, seed=4), make(50, 20, seed=5)
    self.assertNotAllEqual(one.train.images, other.train.images)

  def test_test_is_learned_from_train(self):
    data = datasets.make_synthetic(num_train=500, num_test=200)
    flat = data.train.images.reshape([500, -1]).astype(np.float32)
    means = np.stack(
      [flat[data.train.labels == c].mean(axis=0) for c in range(10)]
    )
    test = data.test.images.reshape([200, -1]).astype(np.float32)
    distances = ((test[:, np.newaxis] - means) ** 2).sum(axis=-1)
    predicted = distances.argmin(axis=1)
    self.assertGreater(np.mean(predicted == data.test.labels), 0.99)

  def test_refuses(self):
    self.assert_data_error(
      ['num_classes=1', 'at least'], datasets.make_synthetic, num_classes=1
    )


if __name__ == '__main__':
  tf.test.main()
