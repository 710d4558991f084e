"""`strategy.run` refuses a batch of which a replica has no rows."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import virtual_devices

virtual_devices.configure()

SUM = tf.distribute.ReduceOp.SUM
_STRATEGIES = (
  tfs.RingMirroredStrategy,
  tfs.CentralStorageStrategy,
  lambda devices: tfs.MultiWorkerRingStrategy(devices=devices),
)


def _strategy(make=tfs.RingMirroredStrategy):
  return make(virtual_devices.names(4))


def _sum(x):
  context = tf.distribute.get_replica_context()
  return context.all_reduce(SUM, tf.reduce_sum(x))


class RowlessReplicasTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.product(make=_STRATEGIES, mode=('outside', 'inside', 'eager'))
  def test_they_are_refused_before_they_run(self, make, mode):
    strategy = _strategy(make)
    with strategy.scope():
      written = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

    def replica_fn(x):
      written.assign_add(tf.ones_like(x[0, 0]))
      return _sum(x)

    fn = tf.function(replica_fn) if mode == 'inside' else replica_fn
    step = lambda batch: strategy.run(fn, args=(batch,))  # noqa: E731
    if mode == 'outside':
      step = tf.function(step)
    x = np.arange(1.0, 12.0, dtype=np.float32)[:, None]
    dataset = tf.data.Dataset.from_tensor_slices(x).batch(8)
    full, last = strategy.experimental_distribute_dataset(dataset)
    self.assertAllClose(step(full).values[3], 36.0)
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, r'strategy\.step'
    ):
      step(last)
    self.assertAllClose(written, 4.0)

  def test_ragged_batches(self):
    strategy = _strategy()
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0], [], [5.0]])
    dataset = tf.data.Dataset.from_tensor_slices(ragged).batch(4)
    step = tf.function(lambda batch: strategy.run(_sum, args=(batch,)))
    full, last = strategy.experimental_distribute_dataset(dataset)
    self.assertAllClose(step(full).values[0], 10.0)
    with self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, '1, 0, 0'):
      step(last)

  @pytest.mark.smoke
  def test_full_batches_pay_nothing(self):
    """With static shapes the graph has no branch at all."""
    strategy = _strategy()

    @tf.function
    def step():
      values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.ones([2, 3])
      )
      return strategy.run(_sum, (values,))

    graph = step.get_concrete_function().graph
    kinds = {op.type for op in graph.get_operations()}
    self.assertNoCommonElements(kinds, {'If', 'StatelessIf', 'EagerPyFunc'})


if __name__ == '__main__':
  tf.test.main()
