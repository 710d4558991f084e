"""Workers share the rows of a batch only if their results can be combined."""

import keras
import tensorflow as tf
from absl.testing import parameterized

from tests.strategies.parameter_server import local_servers
from tf_strategies import _tf_internal
from tf_strategies.spmd import plan
from tf_strategies.strategies.parameter_server import traced_step

_IDS = tf.TensorSpec([8], tf.int64)


def _powers(run, spec, variables=(), exempt=()):
  """Returns the powers of a step that is given an optimizer of some variables."""
  with local_servers.scope():
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build(variables)
  return traced_step.powers_of_rows(
    lambda x: run(optimizer, x),
    [optimizer],
    tf.nest.map_structure(_tf_internal.with_any_rows, spec),
    lambda: exempt,
  )


def _once(table, ids):
  return tf.reduce_sum(tf.gather(table, ids) ** 2)


def _with_positions(table, ids):
  return tf.reduce_sum((tf.gather(table, ids) + tf.gather(table, [3])) ** 2)


def _unique(table, ids):
  found, places = tf.unique(ids)
  return tf.reduce_sum(tf.gather(tf.gather(table, found), places) ** 2)


def _summed_and_averaged(table, ids):
  return (
    tf.reduce_sum(tf.gather(table, ids)),
    tf.reduce_mean(tf.gather(table, (ids + 1) % 5)),
  )


class PowersOfRowsTest(local_servers.LocalServersTestCase):
  @parameterized.parameters(
    (_once, None),
    (_unique, 'Unique'),
    # Each worker would build the pairs from its own rows only.
    (_with_positions, 'ConcatV2'),
    (_summed_and_averaged, 'used in two ways'),
  )
  def test_lookups_are_shared_if_rows_are_independent(self, program, meets_at):
    table = local_servers.partitioned_variable(tf.ones([5, 2]), 3)

    def run(optimizer, ids):
      with tf.GradientTape() as tape:
        loss = program(table, ids)
      optimizer.apply([tape.gradient(loss, table)], [table])

    if meets_at is None:
      self.assertEqual(_powers(run, _IDS, [table]).gradients, [1])
    else:
      with self.assertRaisesRegex(plan.NeedsExchangeError, meets_at):
        _powers(run, _IDS, [table])

  def test_returned_variable_is_read_after_the_step(self):
    rows = local_servers.variable(0, 0.0)

    def run(_, ids):
      rows.assign_add(tf.reduce_sum(tf.cast(ids, tf.float32)))
      return {'rows': rows}

    powers = _powers(run, _IDS, exempt=[rows])
    self.assertEqual(
      powers.outputs, [0]
    )  # The variable is read after the step.
    self.assertEqual(powers.writes, {id(rows): 1})
    with self.assertRaisesRegex(plan.NeedsExchangeError, 'reads when it has'):
      _powers(run, _IDS)

  def test_layer_that_needs_all_rows_is_named(self):
    with local_servers.scope():
      metric = keras.metrics.Mean()
    layer = keras.layers.UnitNormalization(axis=0, name='my_layer')

    def run(_, x):
      metric.update_state(tf.reduce_sum(x))
      return tf.reduce_sum(layer(x))

    with self.assertRaisesRegex(
      plan.NeedsExchangeError, 'my_layer.*needs all rows of a batch at once'
    ):
      _powers(run, tf.TensorSpec([8, 3]))


class WholeBatchTest(local_servers.LocalServersTestCase):
  @parameterized.named_parameters(
    (
      'read',
      lambda a, other, x: a + 1.0,
      'a branch or a loop, or a read of what it has updated',
    ),
    (
      'rows_written',
      lambda a, other, x: other.scatter_nd_update([[0]], [5.0]),
      'row by row',
    ),
    (
      'written_in_a_branch',
      lambda a, other, x: tf.cond(
        x[0] > 0.0, lambda: [other.assign_add(x[:2]), 1][1], lambda: 1
      ),
      'in a branch or a loop',
    ),
  )
  def test_step_that_needs_the_whole_batch_is_refused(self, after, want):
    a, other = (local_servers.variable(i, [1.0, 2.0]) for i in range(2))

    def step(optimizer, x):
      with tf.GradientTape() as tape:
        loss = tf.reduce_mean(x[:, None] * (a * a))
      optimizer.apply([tape.gradient(loss, a)], [a])
      after(a, other, x)
      return loss

    with self.assertRaisesRegex(plan.NeedsExchangeError, want):
      _powers(step, tf.TensorSpec([None], tf.float32), [a])


if __name__ == '__main__':
  tf.test.main()
