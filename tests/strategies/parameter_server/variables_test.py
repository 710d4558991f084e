"""What the coordinator reads and writes of variables on servers."""

from unittest import mock

import tensorflow as tf

from tests.strategies.parameter_server import local_servers
from tf_strategies.strategies.parameter_server import variables


class CoordinatorAccessTest(tf.test.TestCase):
  """The coordinator's own access waits for the steps that are on the way."""

  def setUp(self):
    super().setUp()
    self.enter_context(local_servers.on_local_devices())
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

  def test_reads_and_writes_wait_and_writes_are_told(self):
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

  def test_functions_follow_a_variable_that_is_made_anew(self):
    read = tf.function(lambda: self.variable * 2.0)
    write = tf.function(lambda x: self.variable.assign_add(x))
    concrete = read.get_concrete_function()
    self.assertAllEqual(read(), [2.0, 4.0, 6.0])
    write(tf.ones([3]))
    for value in (10.0, 20.0):
      with mock.patch.object(self.variable, 'is_alive', lambda: False):
        # A recovery that fails after this is tried again.
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
