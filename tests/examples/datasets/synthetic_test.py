import tensorflow as tf

from examples import datasets
from tests.data import formula


class MakeSyntheticTest(formula.DataTestCase):
  def test_seed_decides(self):
    make = datasets.make_synthetic
    self.assert_same_data(make(50, 20, seed=4), make(50, 20, seed=4))
    one, other = make(50, 20, seed=4), make(50, 20, seed=5)
    self.assertNotAllEqual(one.train.images, other.train.images)


if __name__ == '__main__':
  tf.test.main()
