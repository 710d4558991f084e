"""The devices that receive the results of reduce, gather and broadcast."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tests.cross_device import replicas
from tests.cross_device.replicas import MEAN, SUM
from tf_strategies import _tf_internal, cross_device

virtual_devices.configure()

NAMES = replicas.devices(4)
RANKS = replicas.inputs('float32', (101,), 4)
SUM_OF_RANKS = replicas.exact(RANKS)


def value_of_ranks():
  return replicas.on_devices(RANKS, NAMES)


def mirrored_variable(names, value=0.0):
  with tf.distribute.MirroredStrategy(list(names)).scope():
    return tf.Variable(value)


class ReduceTest(tf.test.TestCase, parameterized.TestCase):
  def assert_one(self, tensor, expected, name):
    self.assertIsInstance(tensor, tf.Tensor)
    np.testing.assert_array_equal(tensor.numpy(), expected, strict=True)
    self.assertEndsWith(tensor.device, name)

  @parameterized.named_parameters(*replicas.NAMED_OPS)
  def test_batch_with_different_destinations(self, make_op):
    op = make_op()
    pairs, expected = [], []
    for index, destination in enumerate(
      [
        None,
        virtual_devices.name(5),
        mirrored_variable((virtual_devices.name(1), virtual_devices.name(7))),
        None,
      ]
    ):
      ranks = replicas.inputs('int32', (11 + index,), 4)
      value = replicas.on_devices(ranks, NAMES)
      pairs.append((value, value if destination is None else destination))
      expected.append(replicas.exact(ranks, MEAN))
    results = op.batch_reduce(MEAN, pairs)
    replicas.assert_equal(results[0], expected[0], NAMES)
    self.assert_one(results[1], expected[1], virtual_devices.name(5))
    replicas.assert_equal(
      results[2],
      expected[2],
      (virtual_devices.name(1), virtual_devices.name(7)),
    )
    replicas.assert_equal(results[3], expected[3], NAMES)
    # Values that stay on their devices share one all-reduce.
    self.assertEqual(op.calls, 1)
    self.assertEqual(op.report()['calls']['reduce'], 2)

  def test_batch_over_different_devices(self):
    op = cross_device.RingAllReduce()
    few = replicas.on_devices(RANKS[:2], NAMES[2:])
    results = op.batch_reduce(SUM, [(v, v) for v in (few, value_of_ranks())])
    replicas.assert_equal(results[0], replicas.exact(RANKS[:2]), NAMES[2:])
    replicas.assert_equal(results[1], SUM_OF_RANKS, NAMES)
    self.assertEqual(op.calls, 2)

  @parameterized.parameters(*replicas.OPS)
  def test_one_replica(self, op):
    op = replicas.OPS[op]()
    value = replicas.on_devices(RANKS[2:3], [virtual_devices.name(2)])
    for destination, name in (
      (value, virtual_devices.name(2)),
      (virtual_devices.name(6), virtual_devices.name(6)),
    ):
      pairs = [(value, destination)]
      for result in (
        op.reduce(MEAN, value, destination),
        op.batch_reduce(MEAN, pairs)[0],
      ):
        self.assert_one(result, RANKS[2], name)

  def test_variable_components(self):
    variable = mirrored_variable(NAMES, RANKS[0])
    for component, rank in zip(variable.values, RANKS, strict=True):
      component.assign(rank)
    value = _tf_internal.PerReplica(variable.values)
    op = cross_device.RingAllReduce()
    replicas.assert_equal(op.reduce(SUM, value, value), SUM_OF_RANKS, NAMES)


class GatherTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.product(op=('auto', 'ring'), axis=(0, 1))
  def test_uneven(self, op, axis):
    op = replicas.OPS[op]()
    ranks = []
    for rank in range(4):
      shape = [2, 3, 2]
      shape[axis] = rank
      positions = np.arange(np.prod(shape), dtype=np.float32)
      ranks.append(rank * 1000 + positions.reshape(shape))
    value = replicas.on_devices(ranks, NAMES)
    expected = np.concatenate(ranks, axis)
    gathered = op._gather(value, value, axis)
    replicas.assert_equal(gathered, expected, NAMES)
    alone = op._gather(value, virtual_devices.name(6), axis)
    np.testing.assert_array_equal(alone.numpy(), expected, strict=True)
    self.assertEndsWith(alone.device, virtual_devices.name(6))
    self.assertEqual(op.report()['calls']['gather'], 2)

  @parameterized.parameters('bool', 'string')
  def test_what_has_no_sum(self, dtype):
    ranks = [tf.cast([rank > 1], tf.bool) for rank in range(4)]
    if dtype == 'string':
      ranks = [tf.as_string(r) for r in ranks]
    value = replicas.on_devices(ranks, NAMES)
    gathered = cross_device.RingAllReduce()._gather(value, value, 0)
    for component in gathered.values:
      self.assertAllEqual(component, tf.concat(ranks, 0))

  def test_unknown_lengths(self):
    @tf.function(input_signature=[[tf.TensorSpec([None, 2])] * 3])
    def step(values):
      value = replicas.on_devices(values, NAMES[:3])
      return cross_device.RingAllReduce()._gather(value, value, 0).values

    ranks = [np.full([rank, 2], rank, np.float32) for rank in range(3)]
    for component in step([tf.constant(r) for r in ranks]):
      self.assertAllEqual(component, np.concatenate(ranks))


class BroadcastTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.named_parameters(*replicas.NAMED_OPS)
  def test_to_every_device(self, make_op):
    op = make_op()
    tensor = tf.constant(RANKS[3])
    replicas.assert_equal(
      op.broadcast(tensor, mirrored_variable(NAMES)), RANKS[3], NAMES
    )
    alone = op.broadcast(tensor, virtual_devices.name(6))
    self.assertAllEqual(alone, RANKS[3])
    self.assertEndsWith(alone.device, virtual_devices.name(6))
    self.assertEqual(op.report()['calls']['broadcast'], 2)


if __name__ == '__main__':
  tf.test.main()
