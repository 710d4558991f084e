"""Whether workers may share the rows of a batch that looks rows of tables up."""

import keras
import tensorflow as tf
from absl.testing import parameterized

from tests.strategies.parameter_server import local_servers
from tf_strategies import _keras_internal
from tf_strategies.spmd import plan
from tf_strategies.strategies.parameter_server import (
  sync_engine,
  traced_step,
  worker_function,
)


def _once(table, ids):
  return tf.gather(table, ids)


def _twice(table, ids):
  return tf.gather(table, ids) * tf.gather(table, (ids + 1) % 5)


def _with_positions(table, ids):
  return tf.gather(table, ids) + tf.gather(table, [3])


def _unique(table, ids):
  found, places = tf.unique(ids)
  return tf.gather(tf.gather(table, found), places)


class PowersOfRowsTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.product(
    program=((_once, None), (_twice, None), (_unique, 'Unique')),
    parts=(1, 3),
  )
  def test_lookups(self, program, parts):
    program, meets_at = program
    self.assert_meets(program, parts, meets_at)

  def test_positions_are_of_all_rows(self):
    # Of each microbatch they would be pairs of their own.
    self.assert_meets(_with_positions, 1, 'ConcatV2')

  def test_result_that_is_a_variable(self):
    with local_servers.on_local_devices():
      rows = local_servers.variable(0, 0.0)

      def run(ids):
        rows.assign_add(tf.reduce_sum(tf.cast(ids, tf.float32)))
        return {'rows': rows, 'other': None}

      ids = tf.TensorSpec([8], tf.int64)
      powers = worker_function.powers_of_rows(run, ids, [])
    self.assertEqual(powers.outputs, [0])  # The variable is read after it.
    self.assertEqual(powers.writes, {id(rows.handle): 1})

  @parameterized.parameters(True, False)
  def test_what_a_user_has_named_is_named(self, in_layer):
    class Share(keras.layers.Layer):
      def call(self, x):
        return x / tf.reduce_sum(x)

    with local_servers.on_local_devices():
      metric = keras.metrics.Mean(name='my_metric')
      layer = Share(name='my_layer')

      def run(x):
        if in_layer:
          return {'sum': tf.reduce_sum(layer(x))}
        metric.update_state(tf.reduce_sum(x) ** 2)
        return {'sum': tf.reduce_sum(x)}

      spec = tf.TensorSpec([8, 3])
      with self.assertRaises(plan.NeedsExchangeError) as raised:
        worker_function.powers_of_rows(run, spec, [])
    found = str(raised.exception)
    named = 'my_layer' if in_layer else 'my_metric/total'
    self.assertIn('needs all rows of a batch at once', found)
    self.assertIn(named, found)
    self.assertNotIn('Part(', found)

  def test_lookups_that_are_summed_and_averaged(self):
    with local_servers.on_local_devices():
      table = local_servers.variable(0, tf.ones([5, 2]))
      gradients = []

      def run(ids):
        with tf.GradientTape() as tape:
          losses = (
            tf.reduce_sum(tf.gather(table, ids)),
            tf.reduce_mean(tf.gather(table, (ids + 1) % 5)),
          )
        gradients.append(tape.gradient(losses, table))

      with self.assertRaisesRegex(plan.NeedsExchangeError, 'used in two ways'):
        worker_function.powers_of_rows(
          run, tf.TensorSpec([8], tf.int64), gradients
        )

  def assert_meets(self, program, parts, meets_at):
    with local_servers.on_local_devices():
      value = tf.reshape(tf.range(10.0), [5, 2])
      table = (
        local_servers.variable(0, value)
        if parts == 1
        else local_servers.partitioned_variable(value, parts)
      )
      gradients = []

      def run(ids):
        with tf.GradientTape() as tape:
          loss = tf.reduce_sum(program(table, ids) ** 2)
        gradients.append(tape.gradient(loss, table))

      ids = tf.TensorSpec([8], tf.int64)
      if meets_at is None:
        powers = worker_function.powers_of_rows(run, ids, gradients)
        self.assertEqual(powers.gradients, [1] * len(gradients))
      else:
        with self.assertRaisesRegex(plan.NeedsExchangeError, meets_at):
          worker_function.powers_of_rows(run, ids, gradients)


def _then(after):
  """A step that applies a gradient of `a`, and then does something."""

  def step(a, other, optimizer, x):
    with tf.GradientTape() as tape:
      loss = tf.reduce_sum(a * a) * tf.reduce_mean(x)
    optimizer.apply([tape.gradient(loss, a)], [a])
    after(a, other, optimizer, x)
    return loss

  return step


def _assigned_before(a, other, optimizer, x):
  a.assign(tf.ones([2]))
  return _then(lambda *args: None)(a, other, optimizer, x)


class BesideApplyTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.named_parameters(
    ('nothing', _then(lambda a, other, o, x: None), None),
    ('other', _then(lambda a, other, o, x: other.assign(other * 2.0)), None),
    ('rate', _then(lambda a, other, o, x: o.learning_rate + 1.0), None),
    ('read', _then(lambda a, other, o, x: a + 1.0), 'reads after'),
    ('rows_read', _then(lambda a, other, o, x: tf.gather(a, [0])), 'reads'),
    ('iterations', _then(lambda a, other, o, x: o.iterations + 1), 'reads'),
    ('added', _then(lambda a, other, o, x: a.assign_add([1.0, 1.0])), 'writes'),
    ('assigned_before', _assigned_before, 'writes and optimizer.apply updates'),
    (
      'rows_written',
      _then(lambda a, other, o, x: other.scatter_nd_update([[0]], [5.0])),
      'writes rows',
    ),
  )
  def test_what_makes_a_step_whole(self, step, want):
    with local_servers.on_local_devices():
      a, other = (local_servers.variable(i, [1.0, 2.0]) for i in range(2))
      optimizer = keras.optimizers.SGD(0.5)
      optimizer.build([a])
      # With a strategy, the optimizer's own variables are on servers too.
      optimizer._iterations._value = local_servers.variable(0, 0)
      look = traced_step.TracedStep(is_share=True)

      def run(x):
        with _keras_internal.capture_apply([optimizer]) as calls:
          look.applied = calls
          return step(a, other, optimizer, x)

      spec = tf.TensorSpec([None], tf.float32)
      worker_function.discover(run, spec, look)
      found = sync_engine.beside_apply(look)
    self.assertEqual(len(found), want is not None, found)
    if want is not None:
      self.assertIn(want, found[0])


if __name__ == '__main__':
  tf.test.main()
