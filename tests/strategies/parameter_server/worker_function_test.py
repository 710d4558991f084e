"""Whether workers may share the rows of a batch that looks rows of tables up."""

import keras
import tensorflow as tf
from absl.testing import parameterized

from tests.strategies.parameter_server import local_servers
from tf_strategies.strategies.parameter_server import worker_function


def _once(table, ids):
  return tf.gather(table, ids)


def _twice(table, ids):
  return tf.gather(table, ids) * tf.gather(table, (ids + 1) % 5)


def _with_positions(table, ids):
  return tf.gather(table, ids) + tf.gather(table, [3])


def _unique(table, ids):
  found, places = tf.unique(ids)
  return tf.gather(tf.gather(table, found), places)


class WhyRowsMeetTest(tf.test.TestCase, parameterized.TestCase):
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
      rows = keras.Variable(0.0)

      def run(ids):
        rows.assign_add(tf.reduce_sum(tf.cast(ids, tf.float32)))
        return {'rows': rows, 'other': None}

      ids = tf.TensorSpec([8], tf.int64)
      self.assertIsNone(worker_function.why_rows_meet(run, ids, []))

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
      found = worker_function.why_rows_meet(run, ids, gradients)
    if meets_at is None:
      self.assertIsNone(found)
    else:
      self.assertRegex(found, meets_at)


if __name__ == '__main__':
  tf.test.main()
