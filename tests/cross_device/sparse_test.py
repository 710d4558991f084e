"""`tf.IndexedSlices` are gathered in order, with duplicates, on every device."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import tf_case, virtual_devices
from tests.cross_device import replicas
from tests.cross_device.replicas import MEAN, SUM

virtual_devices.configure()

NUM_ROWS = 6
WIDTH = 2


def slices_of(rank, rows):
  """Returns slices of `rows` whose values differ by rank and position."""
  values = rank * 1000 + np.arange(len(rows) * WIDTH, dtype=np.float32)
  return tf.IndexedSlices(
    tf.constant(values.reshape([-1, WIDTH])),
    tf.constant(rows, tf.int64),
    tf.constant([NUM_ROWS, WIDTH], tf.int64),
  )


class SparseTest(tf_case.TestCase):
  def setUp(self):
    super().setUp()
    self.names = replicas.devices(3)
    # Row 1 occurs twice in one replica and again in another. One replica has no
    # rows.
    self.slices = [
      slices_of(0, [1, 5, 1]),
      slices_of(1, []),
      slices_of(2, [1, 0]),
    ]
    self.value = replicas.on_devices(self.slices, self.names)

  def assert_slices(self, found, all_slices, divide_by=1):
    """Checks that each device has the concatenation of slices."""
    values = np.concatenate([s.values for s in all_slices]) / divide_by
    for component, name in zip(found.values, self.names, strict=True):
      np.testing.assert_array_equal(component.values.numpy(), values)
      self.assertAllEqual(
        component.indices, np.concatenate([s.indices for s in all_slices])
      )
      self.assertAllEqual(component.dense_shape, [NUM_ROWS, WIDTH])
      for part in tf.nest.flatten(component, expand_composites=True):
        self.assertEndsWith(part.device, name)

  @parameterized.named_parameters(*replicas.NAMED_OPS)
  def test_duplicates_are_kept(self, make_op):
    op = make_op()
    for reduce_op, divide_by in ((SUM, 1), (MEAN, 3)):
      result = op.reduce(reduce_op, self.value, self.value)
      self.assert_slices(result, self.slices, divide_by)
    self.assertEqual(op.calls, 2)

  @parameterized.product(op=('auto', 'ring'), reduce_op=(SUM, MEAN))
  def test_one_replica_has_a_dense_value(self, op, reduce_op):
    dense = np.full([NUM_ROWS, WIDTH], 4096, np.float32)
    mixed = [self.slices[0], tf.constant(dense), self.slices[2]]
    value = replicas.on_devices(mixed, self.names)
    result = replicas.OPS[op]().reduce(reduce_op, value, value)
    expected = dense.copy()
    for s in (self.slices[0], self.slices[2]):
      np.add.at(expected, s.indices.numpy(), s.values.numpy())
    if reduce_op == MEAN:
      expected = expected / np.float32(3)
    replicas.assert_equal(result, expected, self.names)

  @parameterized.product(
    make_strategy=(tfs.RingMirroredStrategy, tfs.CentralStorageStrategy),
    case=(
      ('scatter_add', [10.0, 1.0], 12),
      ('scatter_sub', [9.0], -8),
      ('scatter_max', [10.0], 10),
      ('scatter_min', [10.0], 1),
      ('scatter_update', [10.0], 10),
    ),
  )
  def test_only_the_first_replica_scatters(self, make_strategy, case):
    name, values, expected = case
    strategy = make_strategy(replicas.devices(2))
    with strategy.scope():
      variable = tf.Variable(
        [1.0, 1.0, 1.0],
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
      )

    @tf.function
    def step():
      replica = tf.distribute.get_replica_context().replica_id_in_sync_group
      # Row 1 on the first replica, another row on the others.
      rows = tf.ones([len(values)], tf.int32) + replica
      getattr(variable, name)(tf.IndexedSlices(tf.constant(values), rows))

    strategy.run(step)
    for component in strategy.experimental_local_results(variable):
      self.assertAllEqual(component, [1, expected, 1])


if __name__ == '__main__':
  tf.test.main()
