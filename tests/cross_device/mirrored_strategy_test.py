"""Every op works in TensorFlow's own `MirroredStrategy`."""

import tensorflow as tf
from absl.testing import parameterized

from tests import tiers, virtual_devices
from tests.cross_device import replicas
from tests.cross_device.replicas import MEAN, SUM

virtual_devices.configure()

NAMES = replicas.devices(4)
RANKS = replicas.inputs('float32', (103,), 4)


class MirroredStrategyTest(tf.test.TestCase, parameterized.TestCase):
  def strategy_of(self, op):
    return tf.distribute.MirroredStrategy(list(NAMES), cross_device_ops=op)

  def per_replica(self, strategy, values=RANKS):
    """Returns a distributed value, with each part on its own device."""

    def value_fn(context):
      index = context.replica_id_in_sync_group
      with tf.device(NAMES[index]):
        return tf.identity(values[index])

    return strategy.experimental_distribute_values_from_function(value_fn)

  @tiers.product(
    op=tiers.few(replicas.OPS, 'auto', 'ring'),
    reduce_op=(tiers.soak(SUM), MEAN),
  )
  def test_all_reduce(self, op, reduce_op):
    op = replicas.OPS[op]()
    strategy = self.strategy_of(op)
    value = self.per_replica(strategy)

    def replica_step(x):
      context = tf.distribute.get_replica_context()
      a, b = context.all_reduce(reduce_op, [x, 2.0 * x[:7]])
      return a, b

    @tf.function
    def step(value):
      return strategy.run(replica_step, args=(value,))

    for _ in range(3):
      whole, part = step(value)
    expected = replicas.exact(RANKS, reduce_op)
    for component in whole.values:
      self.assertAllEqual(component, expected)
    for component in part.values:
      self.assertAllEqual(component, 2 * expected[:7])
    # Counts executions. The graph was traced once, and all values share one
    # call.
    self.assertEqual(op.calls, 3)

  @parameterized.named_parameters(*replicas.NAMED_OPS)
  def test_values_without_a_device_are_reduced_where_replicas_run(
    self, make_op
  ):
    # Arguments of a function have no device while the graph is built.
    op = make_op()
    strategy = self.strategy_of(op)
    placed = []

    @tf.function
    def step(values):
      value = strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
      )
      self.assertEqual({v.device for v in value.values}, {''})
      with strategy.scope():
        pairs = [(value, value)]
        reduced = strategy.extended.batch_reduce_to(SUM, pairs)[0]
      placed.extend(component.device for component in reduced.values)
      return reduced.values

    for component in step([tf.constant(rank) for rank in RANKS]):
      self.assertAllEqual(component, replicas.exact(RANKS))
    self.assertEqual([d.rpartition('device:')[2] for d in placed], list(NAMES))
    self.assertNotIn('', op.report()['all_reduce_bytes_in'])


if __name__ == '__main__':
  tf.test.main()
