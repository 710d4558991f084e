"""Sums are the same in every run."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tests.cross_device import replicas

virtual_devices.configure()


class SumsInGraphsTest(tf.test.TestCase, parameterized.TestCase):
  """TensorFlow must not reorder the additions of a sum by their arrival."""

  @parameterized.parameters('direct', 'naive')
  def test_large_sum_is_the_same_in_every_run(self, name):
    # Terms and sum exceed the memory that TensorFlow assumes for a logical CPU.
    size = 14_000_000
    op = replicas.OPS[name]()
    names = replicas.devices(3)
    ranks = []
    for rank, device in enumerate(names):
      with tf.device(device):
        noise = tf.random.stateless_normal([size], [rank, 0])
        ranks.append(tf.Variable(noise * 10.0**rank))

    @tf.function
    def step():
      value = replicas.on_devices(ranks, names)
      with tf.device(names[1]):
        return op.reduce(replicas.SUM, value, value).values[1] + 0.0

    expected = (ranks[0].numpy() + ranks[1].numpy()) + ranks[2].numpy()
    for _ in range(3):
      np.testing.assert_array_equal(step().numpy(), expected)


if __name__ == '__main__':
  tf.test.main()
