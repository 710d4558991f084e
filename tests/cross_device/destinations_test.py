"""The devices that receive the results of reduce and gather."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import tf_case, virtual_devices
from tests.cross_device import replicas
from tests.cross_device.replicas import MEAN, SUM
from tf_strategies import cross_device

virtual_devices.configure()

NAMES = replicas.devices(4)


class ReduceTest(tf_case.TestCase):
  @parameterized.named_parameters(*replicas.NAMED_OPS)
  def test_batch_with_different_destinations(self, make_op):
    op = make_op()
    one = virtual_devices.name(5)
    two = virtual_devices.name(1), virtual_devices.name(7)
    with tf.distribute.MirroredStrategy(list(two)).scope():
      variable = tf.Variable(0.0)
    # The devices of the values, the destination if it is not the value, and
    # the devices of the result.
    cases = (
      (NAMES, None, NAMES),
      (NAMES, one, [one]),
      (NAMES, variable, two),
      (NAMES[2:], None, NAMES[2:]),
      (NAMES, None, NAMES),
    )
    pairs, expected = [], []
    for index, (holders, destination, _) in enumerate(cases):
      ranks = replicas.inputs('int32', (11 + index,), len(holders))
      value = replicas.on_devices(ranks, holders)
      pairs.append((value, value if destination is None else destination))
      expected.append(replicas.exact(ranks, MEAN))
    results = op.batch_reduce(MEAN, pairs)
    for result, want, case in zip(results, expected, cases, strict=True):
      replicas.assert_equal(result, want, case[2])
    # Values that stay on the same devices share one all-reduce.
    self.assertEqual(op.calls, 2)
    self.assertEqual(op.report()['calls']['reduce'], 2)

  @parameterized.named_parameters(*replicas.NAMED_OPS)
  def test_one_replica(self, make_op):
    holder, other = virtual_devices.name(2), virtual_devices.name(6)
    ranks = replicas.inputs('float32', (101,), 1)
    value = replicas.on_devices(ranks, [holder])
    for destination, name in ((value, holder), (other, other)):
      result = make_op().reduce(MEAN, value, destination)
      replicas.assert_equal(result, ranks[0], [name])

  def test_only_bytes_from_other_devices_are_counted(self):
    op = cross_device.RingAllReduce()
    value = replicas.on_devices(replicas.inputs('float32', (100,), 4), NAMES)
    for name in NAMES[0], virtual_devices.name(7):
      op.reduce(SUM, value, name)
    received = op.report()['reduce_bytes_in']
    self.assertEqual(list(received.values()), [1200, 1600])


class GatherTest(tf_case.TestCase):
  @parameterized.parameters([[[False], [True]]], [[[b'a'], [b'b', b'c']]])
  def test_gather_of_bools_and_strings(self, values):
    value = replicas.on_devices(values, NAMES[:2])
    gathered = cross_device.RingAllReduce()._gather(value, value, 0)
    for component in gathered.values:
      self.assertAllEqual(component, np.concatenate(values))


if __name__ == '__main__':
  tf.test.main()
