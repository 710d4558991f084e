"""The traced program of a replica gives correct results when all replicas run it.

XLA compiles the graph; NumPy executes only the collectives.
"""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import tf_case, tiers
from tests.strategies.tpu import double, program
from tf_strategies.collectives.algorithms.ring import ring_all_reduce

SUM = tf.distribute.ReduceOp.SUM
MEAN = tf.distribute.ReduceOp.MEAN

# XLA may number the replicas in another order than TensorFlow.
_ORDERS = {4: [2, 0, 3, 1], 8: [5, 0, 7, 2, 6, 1, 4, 3]}


def distinct(num_replicas, *shape, dtype=np.int32):
  """Returns an array for each rank. Elements differ by rank and position."""
  positions = np.arange(np.prod(shape, dtype=int)).reshape(shape)
  ranks = np.arange(num_replicas).reshape([-1, *[1] * len(shape)])
  return (ranks * 1000 + positions).astype(dtype)


def all_reduce(reduce_op, tensors, order=None):
  """Returns each replica's results for the rows of `tensors`."""
  count = len(tensors[0])

  def step(*rows):
    context = tf.distribute.get_replica_context()
    return context.all_reduce(reduce_op, list(rows))

  traced = program.Program(double.create_strategy(count), step, tensors)
  results, _ = traced.run(count, order=order)
  return results


class ExecutionTest(tf_case.TestCase):
  @tiers.parameters(
    tiers.smoke(4),
    3,
    tiers.soak(8),
  )
  def test_sum(self, n):
    # A matrix, scalars, a vector that does not divide, and nothing.
    shapes = ((3, 5), (), (2 * n + 1,), (0, 3))
    whole = [distinct(n, *shape) for shape in shapes]
    floats = np.random.default_rng(0).normal(size=[n, 4, 3]).astype(np.float32)
    results = all_reduce(SUM, [*whole, floats], _ORDERS.get(n))
    for *sums, float_sum in results:
      for value, total in zip(whole, sums, strict=True):
        np.testing.assert_array_equal(
          total, value.sum(0, dtype=np.int32), strict=True
        )
      self.assertAllClose(float_sum, floats.sum(0), atol=1e-6, rtol=1e-6)
      self.assertEqual(float_sum.tobytes(), results[0][-1].tobytes())

  def test_mean(self):
    floats = distinct(4, 6, dtype=np.float32)
    whole = -distinct(4, 2, 3)
    halves = np.full([4, 5], 60000, np.float16)  # Their sum overflows.
    for float_mean, whole_mean, half_mean in all_reduce(
      MEAN, [floats, whole, halves]
    ):
      np.testing.assert_array_equal(float_mean, floats.mean(0), strict=True)
      np.testing.assert_array_equal(
        whole_mean, whole.sum(0, dtype=np.int32) // 4, strict=True
      )
      np.testing.assert_array_equal(half_mean, halves[0], strict=True)

  @parameterized.parameters((SUM, 1), (MEAN, 4))
  def test_gradient_is_the_all_reduce_of_gradients(self, reduce_op, divisor):
    x, weight = (distinct(4, 5, dtype=np.float32) for _ in range(2))

    def step(x, weight):
      with tf.GradientTape() as tape:
        tape.watch(x)
        context = tf.distribute.get_replica_context()
        loss = tf.reduce_sum(context.all_reduce(reduce_op, x) * weight)
      return tape.gradient(loss, x)

    traced = program.Program(double.create_strategy(4), step, [x, weight])
    self.assertIsNone(traced.mismatch(ring_all_reduce(4)))
    results, _ = traced.run(4)
    for (gradient,) in results:
      np.testing.assert_array_equal(gradient, weight.sum(0) / divisor)


if __name__ == '__main__':
  tf.test.main()
