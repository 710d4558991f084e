"""Wrong arguments raise an error that names the value and a fix."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tests.cross_device import replicas
from tests.cross_device.replicas import SUM
from tf_strategies import cross_device, errors

virtual_devices.configure()

NAMES = replicas.devices(2)


class ErrorsTest(tf.test.TestCase, parameterized.TestCase):
  def assert_refused(self, words, call):
    with self.assertRaises(errors.UnsupportedOptionError) as caught:
      call()
    self.assertIsInstance(caught.exception, ValueError)
    for word in words:
      self.assertIn(word, str(caught.exception))

  def reduces(self, op, components):
    """Yields each way to reduce: all-reduce, to one device, several at once."""
    value = replicas.on_devices(components, NAMES)
    good = replicas.on_devices(np.ones([2, 3], np.float32), NAMES)
    yield lambda: op.reduce(SUM, value, value)
    yield lambda: op.reduce(SUM, value, virtual_devices.name(5))
    yield lambda: op.batch_reduce(SUM, [(good, good), (value, value)])

  @parameterized.parameters('auto', 'ring')
  def test_shapes_that_differ(self, op):
    components = [tf.zeros([3, 2]), tf.zeros([4, 2])]
    for reduce in self.reduces(replicas.OPS[op](), components):
      self.assert_refused(
        ['replica 1', '(4, 2)', '(3, 2)', 'Fix: ', 'strategy.gather'],
        reduce,
      )

  def test_dtypes_that_differ(self):
    components = [tf.zeros([3]), tf.zeros([3], tf.float16)]
    for reduce in self.reduces(cross_device.RingAllReduce(), components):
      self.assert_refused(['replica 1', 'float16', 'float32'], reduce)

  @parameterized.parameters('Ring', 'hierarchical(0)', 'tree(2)')
  def test_algorithm_that_is_none_is_refused_at_once(self, name):
    self.assert_refused(
      [f'algorithm={name!r}', "'halving_doubling'", "'naive'", 'Fix: '],
      lambda: cross_device.ScheduledAllReduce(name),
    )


if __name__ == '__main__':
  tf.test.main()
