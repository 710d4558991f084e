"""Divisions of means, and sums that are the same in every run."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tests.cross_device import replicas
from tf_strategies.cross_device import executor

virtual_devices.configure()


class DivideTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(
    ('int32', [-5, -4, -1, 0, 5], [-3, -2, -1, 0, 2]),
    ('uint8', [5, 254, 255, 0, 1], [2, 127, 127, 0, 0]),
    ('float16', [-5, 1, 0, 3, 65504], [-2.5, 0.5, 0, 1.5, 32752]),
    ('complex64', [-5, 1j, 0, 3, 2], [-2.5, 0.5j, 0, 1.5, 1]),
  )
  def test_integers_are_rounded_down(self, dtype, values, expected):
    numpy_dtype = tf.as_dtype(dtype).as_numpy_dtype
    result = executor.divide(tf.constant(np.array(values, numpy_dtype)), 2)
    np.testing.assert_array_equal(
      result.numpy(), np.array(expected, numpy_dtype), strict=True
    )


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
