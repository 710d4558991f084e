"""A replica without rows contributes nothing, whatever the step computes."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import tf_case, virtual_devices

virtual_devices.configure()

SUM = tf.distribute.ReduceOp.SUM
MEAN = tf.distribute.ReduceOp.MEAN


def _strategy():
  return tfs.RingMirroredStrategy(virtual_devices.names(4))


def _run(strategy, fn, rows, mode):
  """Runs `fn` on rows 1, 2, ...: eagerly, or with a function outside or inside
  `run`.
  """
  x = np.arange(1.0, rows + 1, dtype=np.float32)[:, None]
  dataset = tf.data.Dataset.from_tensor_slices(x).batch(4)
  [batch] = strategy.experimental_distribute_dataset(dataset)
  if mode == 'inside':
    fn = tf.function(fn)
  run = tf.function(strategy.run) if mode == 'outside' else strategy.run
  return [value.numpy() for value in run(fn, args=(batch,)).values]


def _context():
  return tf.distribute.get_replica_context()


def _seven(x):
  """Returns 7 plus the sum. A padding row of zeros would wrongly add 7."""
  return 7.0 + tf.reduce_sum(x)


def _slices(x):
  slices = tf.IndexedSlices(
    7.0 + x, tf.zeros([tf.shape(x)[0]], tf.int64), tf.constant([3, 1])
  )
  return tf.convert_to_tensor(_context().all_reduce(SUM, slices))[:, 0]


# Each replica's computation, and the expected result of (all values, own
# value).
_CASES = {
  'sum': (
    lambda x: _context().all_reduce(SUM, _seven(x)),
    lambda values, own: (7 + values).sum(),
  ),
  'mean': (
    lambda x: _context().all_reduce(MEAN, _seven(x)),
    lambda values, own: (7 + values).mean(),
  ),
  'slices': (_slices, lambda values, own: [(7 + values).sum(), 0, 0]),
  'gather': (
    lambda x: _context().all_gather(x, axis=0)[:, 0],
    lambda values, own: values,
  ),
  'number': (_seven, lambda values, own: 7 + own),
  'rows': (lambda x: x[:, 0] + 7, lambda values, own: [7 + own]),
}
MODES = ('outside', 'inside', 'eager')


class EmptyReplicasTest(tf_case.TestCase):
  @parameterized.product(name=tuple(_CASES), mode=MODES)
  def test_replicas_without_rows_are_left_out(self, name, mode):
    compute, want = _CASES[name]
    *results, last = _run(_strategy(), compute, 3, mode)
    values = np.arange(1.0, 4.0)
    for value, result in zip(values, results, strict=True):
      self.assertAllClose(result, want(values, value))
    # A replica without rows returns zeros.
    self.assertAllEqual(last, np.zeros_like(last))
    if name == 'rows':
      self.assertEmpty(last)

  @parameterized.product(mode=MODES)
  def test_metric_variables_are_unchanged(self, mode):
    strategy = _strategy()
    with strategy.scope():
      total = tf.Variable(
        0.0,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
      )

    def replica_fn(x):
      total.assign_add(_seven(x))
      total.assign(total + 1.0)
      return x

    _run(strategy, replica_fn, 2, mode)
    self.assertAllClose(total.numpy(), 1.0 + 2.0 + 2 * 8.0)

  @pytest.mark.smoke
  def test_full_batches_add_no_branch(self):
    """Checks that the graph of a step with static shapes has no branch."""
    strategy = _strategy()

    @tf.function
    def step():
      values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.ones([2, 3])
      )
      return strategy.run(lambda x: _context().all_reduce(SUM, x), (values,))

    graph = step.get_concrete_function().graph
    kinds = {op.type for op in graph.get_operations()}
    self.assertNoCommonElements(kinds, {'If', 'StatelessIf', 'EagerPyFunc'})


if __name__ == '__main__':
  tf.test.main()
