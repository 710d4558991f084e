"""A replica without rows contributes nothing, whatever the step computes."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import virtual_devices

virtual_devices.configure()

SUM = tf.distribute.ReduceOp.SUM
MEAN = tf.distribute.ReduceOp.MEAN


def _strategy():
  return tfs.RingMirroredStrategy(virtual_devices.names(4))


def _batches(strategy, rows):
  """One distributed batch: x = 1, 2, ... on the first replicas."""
  x = np.arange(1.0, rows + 1, dtype=np.float32)[:, None]
  dataset = tf.data.Dataset.from_tensor_slices(x).batch(4)
  return strategy.experimental_distribute_dataset(dataset)


def _run(strategy, fn, rows, mode):
  """Runs `fn` on one batch: eagerly, or in a function outside or inside."""
  if mode == 'inside':
    fn = tf.function(fn)
  step = lambda batch: strategy.run(fn, args=(batch,))  # noqa: E731
  if mode == 'outside':
    step = tf.function(step)
  for batch in _batches(strategy, rows):
    result = step(batch)
  return result


MODES = ('outside', 'inside', 'eager')


class RowlessReplicasTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.product(
    mode=MODES,
    rows=(1, 2, 3),
  )
  def test_reductions_leave_them_out(self, mode, rows):
    strategy = _strategy()
    values = np.arange(1.0, rows + 1)

    def replica_fn(x):
      context = tf.distribute.get_replica_context()
      # 7 + x: a stand-in row of zeros would add 7.
      total = context.all_reduce(SUM, 7.0 + tf.reduce_sum(x))
      mean = context.all_reduce(MEAN, 7.0 + tf.reduce_sum(x))
      return total, mean

    total, mean = _run(strategy, replica_fn, rows, mode)
    # What they return themselves is zero; all others have the exact value.
    expected = [np.sum(7.0 + values)] * rows + [0.0] * (4 - rows)
    self.assertAllClose([v.numpy() for v in total.values], expected)
    expected = [np.mean(7.0 + values)] * rows + [0.0] * (4 - rows)
    self.assertAllClose([v.numpy() for v in mean.values], expected)

  @parameterized.product(mode=MODES)
  def test_indexed_slices_leave_them_out(self, mode):
    strategy = _strategy()

    def replica_fn(x):
      slices = tf.IndexedSlices(
        7.0 + x, tf.zeros([tf.shape(x)[0]], tf.int64), tf.constant([3, 1])
      )
      reduced = tf.distribute.get_replica_context().all_reduce(SUM, slices)
      return tf.convert_to_tensor(reduced)

    result = _run(strategy, replica_fn, 2, mode)
    self.assertAllClose(result.values[0], [[17.0], [0.0], [0.0]])

  @parameterized.product(mode=('inside', 'outside', 'eager'))
  def test_gather_leaves_them_out(self, mode):
    strategy = _strategy()

    def replica_fn(x):
      return tf.distribute.get_replica_context().all_gather(x, axis=0)[:, 0]

    result = _run(strategy, replica_fn, 3, mode)
    self.assertAllClose(result.values[0], [1.0, 2.0, 3.0])

  @parameterized.product(mode=MODES)
  def test_outputs_are_trimmed(self, mode):
    strategy = _strategy()

    def replica_fn(x):
      return {'rows': x + 7.0, 'sum': tf.reduce_sum(x) + 7.0}

    result = _run(strategy, replica_fn, 2, mode)
    self.assertEqual([len(v) for v in result['rows'].values], [1, 1, 0, 0])
    self.assertAllClose(
      [v.numpy() for v in result['sum'].values], [8.0, 9.0, 0.0, 0.0]
    )

  @parameterized.product(mode=MODES)
  def test_metric_variables_are_untouched(self, mode):
    strategy = _strategy()
    with strategy.scope():
      total = tf.Variable(
        0.0,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
      )

    def replica_fn(x):
      total.assign_add(tf.reduce_sum(x) + 7.0)
      total.assign(total + 1.0)

    _run(strategy, replica_fn, 2, mode)
    self.assertAllClose(total.numpy(), 1.0 + 2.0 + 2 * 8.0)

  @parameterized.product(mode=('outside', 'inside'))
  def test_reductions_inside_a_branch_leave_them_out(self, mode):
    strategy = _strategy()

    def replica_fn(x):
      context = tf.distribute.get_replica_context()
      y = 7.0 + tf.reduce_sum(x)
      return tf.cond(
        tf.constant(True),
        lambda: [context.all_reduce(SUM, y), context.all_reduce(MEAN, y)],
        lambda: [y, y],
      )

    total, mean = _run(strategy, replica_fn, 2, mode)
    self.assertAllClose(total.values[0], 17.0)
    self.assertAllClose(mean.values[1], 8.5)

  def test_ragged_batches_keep_their_rows_together(self):
    strategy = _strategy()
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    dataset = tf.data.Dataset.from_tensor_slices((ragged, [[1.0], [2.0]]))
    dataset = dataset.batch(4)

    @tf.function
    def step(batch):
      def replica_fn(x, y):
        total = tf.reduce_sum(x) + tf.reduce_sum(y)
        return tf.distribute.get_replica_context().all_reduce(SUM, total)

      return strategy.run(replica_fn, args=batch)

    for batch in strategy.experimental_distribute_dataset(dataset):
      self.assertAllClose(step(batch).values[0], 9.0)

  @pytest.mark.smoke
  def test_full_batches_pay_nothing(self):
    """With static shapes the graph has no branch at all."""
    strategy = _strategy()

    @tf.function
    def step():
      values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.ones([2, 3])
      )
      return strategy.run(
        lambda x: tf.distribute.get_replica_context().all_reduce(SUM, x),
        args=(values,),
      )

    graph = step.get_concrete_function().graph
    kinds = {op.type for op in graph.get_operations()}
    self.assertNoCommonElements(kinds, {'If', 'StatelessIf', 'EagerPyFunc'})


if __name__ == '__main__':
  tf.test.main()
