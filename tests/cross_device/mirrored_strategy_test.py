"""Every op works in TensorFlow's own `MirroredStrategy`."""

import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tests.cross_device import replicas
from tests.cross_device.replicas import SUM

virtual_devices.configure()

NAMES = replicas.devices(4)
RANKS = replicas.inputs('float32', (103,), 4)


class MirroredStrategyTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.named_parameters(*replicas.NAMED_OPS)
  def test_values_without_a_device_are_reduced_where_replicas_run(
    self, make_op
  ):
    # Arguments of a function have no device while the graph is built.
    op = make_op()
    strategy = tf.distribute.MirroredStrategy(list(NAMES), op)
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
