"""Slots hold the results of steps on servers, and reads of variables wait for steps."""

from concurrent import futures
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.parameter_server import local_servers, step_programs
from tf_strategies.strategies.parameter_server import variables


class SlotsTest(local_servers.LocalServersTestCase):
  def test_lookup_sends_few_messages(self):
    """Checks that a step never joins a partitioned table."""
    table = local_servers.partitioned_variable(
      tf.zeros([100, 4]), 2, trainable=False
    )
    with local_servers.scope():
      kernel, bias = tf.Variable(tf.zeros([4, 1])), tf.Variable([0.0])
      optimizer = keras.optimizers.Adagrad(0.1)
      optimizer.build([table, kernel, bias])

    def program(ids):
      with tf.GradientTape() as tape:
        tape.watch(table)
        found = (tf.gather(table, ids) + tf.gather(table, ids)) @ kernel + bias
        loss = tf.reduce_mean(found**2)
      variables = [table, kernel, bias]
      optimizer.apply(tape.gradient(loss, variables), variables)
      return loss

    step = step_programs.Step(
      program, [], tf.TensorSpec([8], tf.int32), optimizers=[optimizer]
    )
    self.assertEqual(
      {id(v) for v in step.traced.copied}, {id(kernel), id(bias)}
    )
    inner = step.traced.function.graph.get_operations()
    gathers = [op for op in inner if op.type == 'ResourceGather']
    self.assertLen(gathers, 2 * len(table.parts))
    # Each server gets the gradients of its rows. All else travels as bytes: the numbers
    # of the rows and, on the first server, small gradients and the loss.
    shapes = {
      server: [s.shape.as_list() for s in specs]
      for server, specs in step.layout.specs.items()
    }
    self.assertEqual(shapes, {i: [[None, 4], [None]] for i in (0, 1)})
    # All copies from the first server come in one message.
    server = local_servers.device(0)
    # pylint: disable-next=protected-access
    operations = step.worker._function.graph.get_operations()
    read = {
      tensor.name
      for op in operations
      if op.device != server
      for tensor in op.inputs
      if tensor.op.device == server and tensor.dtype != tf.resource
    }
    self.assertLen(read, 1)

  def test_string_and_large_results(self):
    a = local_servers.variable(0, [1.0, 2.0])

    def program(a, x):
      a.assign_add(x)
      return tf.strings.as_string(tf.cast(a, tf.int32)), tf.ones([300, 300])

    step = step_programs.Step(program, [a], tf.TensorSpec([2], tf.float32))
    text, large = step(np.ones(2, np.float32))
    self.assertAllEqual(text, [b'2', b'3'])
    self.assertAllEqual(large, np.ones([300, 300]))
    self.assertAllEqual(a, [2.0, 3.0])

  @pytest.mark.smoke
  def test_concurrent_sums_in_a_loop_are_all_kept(self):
    a = local_servers.variable(0, tf.zeros([100_000]))

    def add_plainly(a, x):
      a.assign_add(x)

    def program(a, x):
      def add(i):
        a.assign_add(x)
        return i + 1

      tf.while_loop(lambda i: i < 1, add, [0], parallel_iterations=1)

    spec = tf.TensorSpec([100_000], tf.float32)
    programs = program, add_plainly, program, add_plainly
    steps = [step_programs.Step(each, [a], spec) for each in programs]

    def repeat(step):
      for _ in range(20):
        step(np.ones(100_000, np.float32))

    for step in steps:
      step(np.ones(100_000, np.float32))
    with futures.ThreadPoolExecutor(4) as pool:
      list(pool.map(repeat, steps))
    self.assertAllEqual(a, 84.0 * np.ones(100_000))


class CoordinatorAccessTest(local_servers.LocalServersTestCase):
  """Access by the chief waits for the steps in progress."""

  def setUp(self):
    super().setUp()
    self.drained = mock.Mock(side_effect=lambda action: action())
    self.on_write = mock.Mock()
    self.variable = local_servers.variable(
      1, [1.0, 2.0, 3.0], self.drained, self.on_write
    )

  def counts(self):
    found = self.drained.called, self.on_write.call_count
    self.drained.reset_mock()
    self.on_write.reset_mock()
    return found

  def test_reads_and_writes_wait_and_writes_are_reported(self):
    variable, row = self.variable, tf.IndexedSlices([1.0], [1])
    self.counts()
    for use, writes in (
      (variable.numpy, 0),
      (variable.read_value, 0),
      (lambda: variable + 1.0, 0),
      (lambda: tf.gather(variable, [0]), 0),
      (lambda: variable.gather_nd([[0]]), 0),
      (lambda: variable.assign([4.0, 5.0, 6.0]), 1),
      (lambda: variable.assign_add([1.0, 1.0, 1.0]), 1),
      (lambda: variable.assign_sub([1.0, 1.0, 1.0]), 1),
      (lambda: variable.scatter_add(row), 1),
      (lambda: variable.scatter_update(row), 1),
    ):
      use()
      self.assertEqual(self.counts(), (True, writes))
    self.assertAllEqual(self.variable, [4.0, 1.0, 6.0])
    # A graph does not wait.
    self.counts()
    tf.function(lambda: self.variable.assign_add(tf.ones([3])) + 1.0)()
    self.assertEqual(self.counts(), (False, 0))

  def test_functions_use_a_recreated_variable(self):
    read = tf.function(lambda: self.variable * 2.0)
    write = tf.function(lambda x: self.variable.assign_add(x))
    concrete = read.get_concrete_function()
    self.assertAllEqual(read(), [2.0, 4.0, 6.0])
    write(tf.ones([3]))
    for value in (10.0, 20.0):
      with mock.patch.object(self.variable, 'is_alive', lambda: False):
        # Twice, as when a recovery fails and is repeated.
        self.variable.recreate_if_dead()
        self.variable.recreate_if_dead()
      variables.update_functions([self.variable])
      self.assertTrue(self.variable.is_lost)
      self.variable.assign(tf.fill([3], value))
      write(tf.ones([3]))
      for function in (read, concrete):
        self.assertAllEqual(function(), tf.fill([3], 2.0 * value + 2.0))


if __name__ == '__main__':
  tf.test.main()
