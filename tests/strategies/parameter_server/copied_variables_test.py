"""A worker's copies of servers' variables: all that a step does is done to them."""

import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tests.strategies.parameter_server import local_servers
from tf_strategies import errors
from tf_strategies.strategies.parameter_server import copied_variables

virtual_devices.configure()


def _concrete(function, *specs):
  return tf.function(function, autograph=False).get_concrete_function(*specs)


class CopiesTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(local_servers.on_local_devices())

  def _run(self, variable, step, value, calls=2):
    """What a step makes of a copy, in each of some calls of one function."""

    def trace(value):
      copies = copied_variables.Copies([variable], [value])
      with copies.tracing():
        step()
      return copies.take_values()

    function = _concrete(trace, tf.TensorSpec(value.shape, value.dtype))
    return [function(value)[0].numpy().tolist() for _ in range(calls)]

  def test_branches_loops_and_rows(self):
    variable = local_servers.variable(0, [1.0, 2.0, 3.0])

    def step():
      tf.cond(
        variable[0] > 5.0,
        lambda: variable.assign(variable * 2.0).value(),
        lambda: variable.assign_add([9.0, 9.0, 9.0]).value(),
      )
      tf.while_loop(
        lambda i: i < 3,
        lambda i: (variable.assign_add([1.0, 0.0, 0.0]).value(), i + 1)[1:],
        [0],
      )
      variable.scatter_add(tf.IndexedSlices([0.5], [2]))

    found = self._run(variable, step, tf.constant([10.0, 20.0, 30.0]))
    # The same in each call: a copy lives for one.
    self.assertEqual(found, [[23.0, 40.0, 60.5]] * 2)
    self.assertAllEqual(variable, [1.0, 2.0, 3.0])

  def test_gradient_is_that_of_the_copy(self):
    variable = local_servers.variable(0, 3.0)

    def step():
      with tf.GradientTape() as tape:
        loss = variable * variable
      variable.assign_sub(tape.gradient(loss, variable))

    self.assertEqual(self._run(variable, step, tf.constant(5.0)), [-5.0] * 2)

  def test_gradient_of_a_loop(self):
    """It asks for the shape of the copy, which has one when it has a value."""
    variable = local_servers.variable(0, [3.0, 4.0])

    def step():
      with tf.GradientTape() as tape:
        _, loss = tf.while_loop(
          lambda i, _: i < 3,
          lambda i, z: (i + 1, z + tf.reduce_sum(variable * variable)),
          [0, 0.0],
        )
      variable.assign_sub(tf.convert_to_tensor(tape.gradient(loss, variable)))

    found = self._run(variable, step, tf.constant([1.0, 2.0]), calls=100)
    self.assertEqual(found, [[-5.0, -10.0]] * 100)

  def test_looks_what_is_written_and_how(self):
    read, added, assigned = (
      local_servers.variable(0, float(i)) for i in range(3)
    )
    look = copied_variables.Copies()

    def trace():
      with look.tracing():
        added.assign(added + read)
        assigned.assign(read * 2.0)

    _concrete(trace)
    self.assertCountEqual(
      map(id, look.variables), map(id, (added, read, assigned))
    )
    self.assertEqual(look.added, {id(added)})
    self.assertEqual(look.assigned, {id(assigned)})

  def test_function_that_was_called_before(self):
    variable = local_servers.variable(0, 3.0)
    add = tf.function(lambda: variable.assign_add(1.0))
    self.assertAllEqual(add(), 4.0)
    self.assertEqual(self._run(variable, add, tf.constant(5.0)), [6.0] * 2)
    self.assertAllEqual(variable, 4.0)

  def test_functions_that_have_their_graph_read_the_copies(self):
    frozen, trained = (local_servers.variable(0, 3.0) for _ in range(2))
    scale = _concrete(lambda: frozen * trained * trained)
    add = _concrete(lambda: trained.assign_add(1.0))

    def step():
      with tf.GradientTape() as tape:
        loss = scale()  # 3 * 5 * 5
      trained.assign_add(tape.gradient(loss, trained))  # 5 + 30
      trained.assign_add(scale())  # 35 + 3 * 35 * 35

    found = self._run(trained, step, tf.constant(5.0))
    self.assertEqual(found, [3710.0] * 2)
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'writes.*call the tf.function'
    ):
      self._run(trained, add, tf.constant(5.0))
    self.assertAllEqual([frozen, trained], [3.0, 3.0])


if __name__ == '__main__':
  tf.test.main()
