"""`TPURingStrategy` adds a ring to the graph and nothing else.

`execution_test` checks the results of the ring.
"""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tests import tf_case, tiers
from tests.strategies.tpu import double, program
from tf_strategies.collectives.algorithms.ring import ring_all_reduce

_SHAPES = {
  'float32': [[3, 5], [], [7], [2, 2, 2]],
  'bfloat16': [[4, 4], [1]],
  'float64': [[11]],
}


def traced_step(strategy):
  """Traces a step of a training loop: gradients, one all-reduce, updates."""
  with strategy.scope():
    variables = [
      tf.Variable(tf.ones(shape, dtype))
      for dtype, of_dtype in _SHAPES.items()
      for shape in of_dtype
    ]

  def train(x):
    with tf.GradientTape() as tape:
      losses = [tf.reduce_sum(tf.cast(v, tf.float32)) ** 2 for v in variables]
      loss = tf.add_n(losses) * tf.reduce_sum(x)
    context = tf.distribute.get_replica_context()
    summed = context.all_reduce('SUM', tape.gradient(loss, variables))
    for variable, gradient in zip(variables, summed, strict=True):
      variable.assign_sub(gradient)
    return loss

  x = np.ones([strategy.num_replicas_in_sync, 2], np.float32)
  return program.Program(strategy, train, [x])


class GraphTest(tf_case.TestCase):
  @tiers.parameters(4, tiers.soak(32))
  def test_step_has_one_ring_per_dtype(self, num_replicas):
    step = traced_step(double.create_strategy(num_replicas))
    self.assertIsNone(step.mismatch(ring_all_reduce(num_replicas)))
    self.assertEmpty(step.sums)
    self.assertEqual(
      collections.Counter(op.get_attr('T').name for op in step.permutes),
      dict.fromkeys(_SHAPES, 2 * (num_replicas - 1)),
    )
    # Each round sends one chunk of each buffer and nothing else.
    for permute in step.permutes:
      dtype = permute.get_attr('T').name
      size = sum(int(np.prod(shape)) for shape in _SHAPES[dtype])
      self.assertEqual(permute.inputs[0].shape, [1, -(-size // num_replicas)])

  @pytest.mark.smoke
  def test_builtin_uses_only_cross_replica_sums(self):
    step = traced_step(double.create_strategy(4, all_reduce='builtin'))
    self.assertEmpty(step.permutes)
    self.assertLen(step.sums, sum(len(shapes) for shapes in _SHAPES.values()))

  def test_one_replica_has_no_collectives(self):
    step = traced_step(double.create_strategy(1))
    self.assertEmpty(step.permutes)
    self.assertEmpty(step.sums)

  def test_device_assignment_with_some_cores(self):
    topology = tf.tpu.experimental.Topology(
      mesh_shape=[2, 2, 1, 1],
      device_coordinates=[[[x, y, 0, 0] for x in (0, 1) for y in (0, 1)]],
    )
    cores = tf.tpu.experimental.DeviceAssignment(
      topology, core_assignment=[[[0, 1, 0, 0]], [[1, 0, 0, 0]]]
    )
    strategy = double.create_strategy(4, device_assignment=cores)
    self.assertEqual(strategy.num_replicas_in_sync, 2)
    self.assertIsNone(traced_step(strategy).mismatch(ring_all_reduce(2)))

  def test_sparse_gradients_use_cross_replica_sums(self):
    strategy = double.create_strategy(4)
    with strategy.scope():
      table = tf.Variable(tf.ones([6, 2]))
      dense = tf.Variable(tf.ones([3]))

    def step(x):
      with tf.GradientTape() as tape:
        rows = tf.gather(table, [1, 1, 3])
        loss = tf.reduce_sum(rows) * tf.reduce_sum(dense) * tf.reduce_sum(x)
      gradients = tape.gradient(loss, [table, dense])
      self.assertIsInstance(gradients[0], tf.IndexedSlices)
      return tf.distribute.get_replica_context().all_reduce('SUM', gradients)

    step = program.Program(strategy, step, [np.ones([4, 2], np.float32)])
    self.assertLen(step.sums, 1)
    self.assertIsNone(step.mismatch(ring_all_reduce(4)))
    self.assertLen(step.permutes, 6)


if __name__ == '__main__':
  tf.test.main()
