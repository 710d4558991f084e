"""`tf.IndexedSlices` are gathered in order, with duplicates, on every device."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import virtual_devices
from tests.cross_device import replicas
from tests.cross_device.replicas import MEAN, SUM
from tf_strategies import _tf_internal, cross_device

virtual_devices.configure()

NUM_ROWS = 6
WIDTH = 2


def slices_of(rank, rows):
  """Returns slices of `rows` whose values tell ranks and positions apart."""
  values = rank * 1000 + np.arange(len(rows) * WIDTH, dtype=np.float32)
  return tf.IndexedSlices(
    tf.constant(values.reshape([-1, WIDTH])),
    tf.constant(rows, tf.int64),
    tf.constant([NUM_ROWS, WIDTH], tf.int64),
  )


def on_devices(all_slices, names):
  components = []
  for s, name in zip(all_slices, names, strict=True):
    with tf.device(name):
      components.append(
        tf.IndexedSlices(
          tf.identity(s.values),
          tf.identity(s.indices),
          None if s.dense_shape is None else tf.identity(s.dense_shape),
        )
        if isinstance(s, tf.IndexedSlices)
        else tf.identity(s)
      )
  return _tf_internal.PerReplica(components)


def concatenated(all_slices, divide_by=1):
  values = np.concatenate([s.values.numpy() for s in all_slices]) / divide_by
  return values, np.concatenate([s.indices.numpy() for s in all_slices])


class SparseTest(tf.test.TestCase, parameterized.TestCase):
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
    self.value = on_devices(self.slices, self.names)

  def assert_slices(self, found, expected, name=None):
    values, indices = expected
    np.testing.assert_array_equal(found.values.numpy(), values)
    np.testing.assert_array_equal(found.indices.numpy(), indices)
    self.assertAllEqual(found.dense_shape, [NUM_ROWS, WIDTH])
    if name is not None:
      for part in (found.values, found.indices, found.dense_shape):
        self.assertEndsWith(part.device, name)

  @parameterized.named_parameters(*replicas.NAMED_OPS)
  def test_duplicates_are_kept(self, make_op):
    op = make_op()
    for reduce_op, divide_by in ((SUM, 1), (MEAN, 3)):
      result = op.reduce(reduce_op, self.value, self.value)
      self.assertLen(result.values, 3)
      expected = concatenated(self.slices, divide_by)
      for component, name in zip(result.values, self.names, strict=True):
        self.assert_slices(component, expected, name)
    self.assertEqual(op.calls, 2)

  @pytest.mark.smoke
  def test_unknown_number_of_rows(self):
    op = cross_device.RingAllReduce()
    signature = [
      (tf.TensorSpec([None, WIDTH]), tf.TensorSpec([None], tf.int64))
    ] * 3

    @tf.function(input_signature=[signature])
    def step(parts):
      shape = tf.constant([NUM_ROWS, WIDTH], tf.int64)
      value = on_devices(
        [tf.IndexedSlices(v, i, shape) for v, i in parts], self.names
      )
      return op.reduce(SUM, value, value).values

    for rows in ([[1], [2, 2], [0, 5, 0]], [[], [], [3]]):
      slices = [slices_of(rank, r) for rank, r in enumerate(rows)]
      for found in step([(s.values, s.indices) for s in slices]):
        self.assert_slices(found, concatenated(slices))
    self.assertEqual(op.calls, 2)

  @parameterized.product(op=('auto', 'ring'), reduce_op=(SUM, MEAN))
  def test_dense_in_one_replica(self, op, reduce_op):
    dense = np.full([NUM_ROWS, WIDTH], 4096, np.float32)
    mixed = [self.slices[0], tf.constant(dense), self.slices[2]]
    value = on_devices(mixed, self.names)
    result = replicas.OPS[op]().reduce(reduce_op, value, value)
    expected = dense.copy()
    for s in (self.slices[0], self.slices[2]):
      np.add.at(expected, s.indices.numpy(), s.values.numpy())
    if reduce_op == MEAN:
      expected = expected / np.float32(3)
    replicas.assert_equal(result, expected, self.names)

  def test_broadcast_keeps_slices(self):
    op = cross_device.RingAllReduce()
    results = op.broadcast(self.slices[2], self.value)
    self.assertLen(results.values, 3)
    for component, name in zip(results.values, self.names, strict=True):
      self.assert_slices(component, concatenated(self.slices[2:]), name)
    # Plain numbers, not tensors.
    alone = op.broadcast(
      tf.IndexedSlices([[1.0, 2.0]], [3]), virtual_devices.name(7)
    )
    self.assertAllEqual(alone.values, [[1.0, 2.0]])
    self.assertAllEqual(alone.indices, [3])

  @parameterized.parameters(
    tfs.RingMirroredStrategy, tfs.CentralStorageStrategy
  )
  def test_scatter_of_the_first_replica(self, make_strategy):
    strategy = make_strategy(replicas.devices(2))
    expected = {
      'scatter_add': [1, 12, 1],
      'scatter_sub': [1, -8, 1],
      'scatter_max': [1, 10, 1],
      'scatter_min': [1, 1, 1],
      'scatter_update': [1, 10, 1],
    }
    for name, value in expected.items():
      with strategy.scope():
        variable = tf.Variable(
          [1.0, 1.0, 1.0],
          aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )

      @tf.function
      def step(variable=variable, name=name):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        values = {'scatter_add': [10.0, 1.0], 'scatter_sub': [9.0]}
        values = tf.constant(values.get(name, [10.0]))
        # Row 1 on the first replica, another row on the others.
        rows = tf.ones([tf.size(values)], tf.int32) + replica
        getattr(variable, name)(tf.IndexedSlices(values, rows))

      strategy.run(step)
      for component in strategy.experimental_local_results(variable):
        self.assertAllEqual(component, value, name)


if __name__ == '__main__':
  tf.test.main()
