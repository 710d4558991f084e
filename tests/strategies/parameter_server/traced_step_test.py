"""A step on servers changes variables like the same step with plain variables."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests.strategies.parameter_server import local_servers, step_programs
from tf_strategies import errors

SPEC = step_programs.SPEC


def _concrete(function):
  return tf.function(function).get_concrete_function(SPEC)


def _compiled(function):
  return tf.function(lambda x: function(x) * 1.0, jit_compile=True)


def _in_branch(function, x):
  return tf.cond(x[0] > 0.0, lambda: function(x) * 1.0, lambda: x)


def _with_gradient(a, function, x):
  with tf.GradientTape() as tape:
    loss = tf.reduce_sum(function(x))
  return a.assign_sub(tf.convert_to_tensor(tape.gradient(loss, a)))


class TracedStepTest(local_servers.LocalServersTestCase):
  @parameterized.named_parameters(
    *[(p.__name__, p) for p in step_programs.PROGRAMS]
  )
  def test_programs_equal_plain_variables(self, program):
    """Also checks that a worker, which may be lost, writes no variable."""
    values = ([1.0, 2.0, 3.0], [-0.5, 0.25, 4.0])
    plain = [tf.Variable(v) for v in values]
    ours = [local_servers.variable(i, v) for i, v in enumerate(values)]
    expected_step = tf.function(program, autograph=False)
    step = step_programs.Step(program, ours, SPEC)
    for k in range(3):
      x = tf.constant([0.5, 1.5, -0.25]) * (1.0, -2.0, 3.0)[k]
      before = [v.numpy() for v in ours]
      step.compute(x)
      self.assertAllEqual(before, [v.numpy() for v in ours])
      self.assertAllClose(expected_step(*plain, x), step(x), 1e-6, 1e-6)
      for want, got in zip(plain, ours, strict=True):
        self.assertAllClose(want, got, 1e-6, 1e-6)

  @parameterized.named_parameters(
    ('sum', lambda a, x: a.assign_add(x), True),
    ('assigned_sum', lambda a, x: a.assign(a + x), True),
    ('difference', lambda a, x: a.assign(a - -x), True),
    ('rows', lambda a, x: a.scatter_add(tf.IndexedSlices(x, [0, 1, 2])), True),
    (
      'branch',
      lambda a, x: tf.cond(x[0] > 0, lambda: a.assign(a + x), lambda: x),
      True,
    ),
    ('overwrite', lambda a, x: a.assign(a * 1.0 + x), False),
    (
      'sum_and_overwrite',
      lambda a, x: (a.assign_add(x), a.assign(a * 1.0)),
      False,
    ),
  )
  def test_sums_keep_concurrent_additions(self, write, is_kept):
    def program(a, x):
      write(a, x)
      return a.read_value()

    zeros = tf.zeros([3])
    for a in (
      local_servers.variable(0, zeros),
      local_servers.partitioned_variable(zeros, 2),
    ):
      step = step_programs.Step(program, [a], SPEC)
      computed = step.compute(tf.ones([3]))
      a.assign_add([10.0, 20.0, 30.0])
      # The step sees the values at its begin and its own writes.
      self.assertAllEqual(step.apply(computed), [1.0, 1.0, 1.0])
      self.assertAllEqual(a, [11.0, 21.0, 31.0] if is_kept else [1.0] * 3)

  @parameterized.named_parameters(
    ('gradient', lambda a, scale, x: _with_gradient(a, scale, x)),
    ('compiled', lambda a, scale, x: _compiled(a.assign_add)(x)),
    ('reads_sum', lambda a, scale, x: (a.assign_add(x), scale(x))[1]),
    ('reads_value', lambda a, scale, x: (a.assign(x), scale(x))[1]),
  )
  def test_functions_with_a_graph_equal_plain_variables(self, call):
    def step(a):
      scale = _concrete(lambda x: a * x)
      return lambda x: call(a, scale, x)

    x = tf.constant([1.0, -2.0, 0.5])
    plain = tf.Variable([1.0, 2.0, 3.0])
    ours = local_servers.variable(0, [1.0, 2.0, 3.0])
    expected, mine = step(plain), step(ours)
    traced = step_programs.Step(mine, [], SPEC)
    for _ in range(2):
      self.assertAllClose(traced(x), tf.function(expected)(x))
      self.assertAllClose(ours, plain)

  @parameterized.parameters(True, False)
  def test_loaded_function_writes_its_variable(self, in_branch):
    module = tf.Module()
    module.total = tf.Variable([0.0, 0.0, 0.0])
    module.add = tf.function(lambda x: module.total.assign_add(x), [SPEC])
    tf.saved_model.save(module, self.directory)
    with local_servers.scope():
      saved = tf.saved_model.load(self.directory)

    def program(total, x):
      found = _in_branch(saved.add, x) if in_branch else saved.add(x)
      return found + 10.0 * total

    step = step_programs.Step(program, [saved.total], SPEC)
    for k in range(1, 3):
      self.assertAllEqual(step(tf.ones([3])), [11.0 * k] * 3)
      self.assertAllEqual(saved.total, [1.0 * k] * 3)


def _add(table, x):
  table.assign_add(tf.ones_like(table) * x[0])
  table.assign_sub(tf.reduce_sum(table) * tf.ones_like(table))
  return tf.gather(table, [0, 4])


def _scatter(table, x):
  table.scatter_add(tf.IndexedSlices(tf.reshape(x[:2], [1, 2]), [3]))
  before = tf.gather(table, [3, 0])
  table.scatter_update(tf.IndexedSlices(before, [0, 2]))
  return before


def _scatter_in_loop(table, x):
  def body(i):
    table.scatter_sub(tf.IndexedSlices(tf.gather(table, [i]) * x[0], [i + 1]))
    return i + 1

  tf.while_loop(lambda i: i < 4, body, [0], parallel_iterations=1)
  return tf.gather(table, [4])


class PartitionedTest(local_servers.LocalServersTestCase):
  @parameterized.parameters(_add, _scatter, _scatter_in_loop)
  def test_programs_equal_plain_variables(self, program):
    value = np.arange(10, dtype=np.float32).reshape(5, 2)
    plain = tf.Variable(value)
    expected = tf.function(program, autograph=False)
    ours = local_servers.partitioned_variable(value, 2)
    step = step_programs.Step(program, [ours], SPEC)
    for _ in range(2):
      x = tf.constant([0.5, 1.5, -0.25])
      self.assertAllClose(step(x), expected(plain, x))
      self.assertAllClose(ours, plain)

  def test_concrete_function_is_refused(self):
    table = local_servers.partitioned_variable(tf.ones([5, 2]), 2)
    function = _concrete(lambda x: tf.gather(table, [1, 4]) * x[0])
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'traced before the step'
    ):
      step_programs.Step(lambda table, x: function(x), [table], SPEC)


def _loss(a, x):
  with tf.GradientTape() as tape:
    loss = tf.reduce_sum(a * a * x)
  return loss, [tape.gradient(loss, a)]


def _in_a_branch(a, b, optimizer, x):
  loss, gradients = _loss(a, x)
  tf.cond(
    loss > 3.0,
    lambda: [optimizer.apply(gradients, [a]), 1][1],
    lambda: [b.assign_add(x), 1][1],
  )
  return loss


def _in_a_loop(a, b, optimizer, x):
  def body(i):
    optimizer.apply(_loss(a, x)[1], [a])
    return i + 1

  tf.while_loop(lambda i: i < 3, body, [0], parallel_iterations=1)
  return a * b


_updates: dict = {}


def _in_a_function(a, b, optimizer, x):
  # TensorFlow keeps the graph of a function that was created outside the step.
  update = _updates.setdefault(
    id(optimizer), tf.function(lambda g: optimizer.apply([g], [a]))
  )
  loss, [gradient] = _loss(a, x)
  update(gradient)
  return loss


def _rate_written_before(a, b, optimizer, x):
  loss, gradients = _loss(a, x)
  optimizer.learning_rate.assign(0.01 * loss)
  optimizer.apply(gradients, [a])
  return loss


def _written_after(a, b, optimizer, x):
  loss, gradients = _loss(a, x)
  optimizer.apply(gradients, [a])
  a.assign_add(x)
  return loss


class ApplyTest(local_servers.LocalServersTestCase):
  @parameterized.parameters(
    _in_a_branch,
    _in_a_loop,
    _in_a_function,
    _rate_written_before,
    _written_after,
  )
  def test_optimizer_update_inside_a_step_equals_plain_variables(self, program):
    found = []
    for scope in (tf.name_scope('plain'), local_servers.scope()):
      with scope:
        a, b = tf.Variable([1.0, 2.0, 3.0]), tf.Variable([0.5, -1.0, 0.0])
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build([a, b])

        def run(x, variables=(a, b), optimizer=optimizer):
          return program(*variables, optimizer, x)

        step = tf.function(run, autograph=False)
        if found:
          step = step_programs.Step(run, [], SPEC, optimizers=[optimizer])
        found.append([])
        for k in (1.0, -0.5, 2.0):
          result = step(k * tf.constant([1.0, 0.25, 0.5]))
          values = [v.numpy() for v in (a, b, *optimizer.variables)]
          found[-1].append([result, *values])
    for want, got in zip(*found, strict=True):
      self.assertAllClose(want, got, 1e-5, 1e-6)

  @parameterized.parameters(True, False)
  def test_optimizer_reads_a_variable_that_the_step_writes(self, before):
    with local_servers.scope():
      a, rate = tf.Variable([1.0, 2.0, 3.0]), tf.Variable(0.5)
      optimizer = keras.optimizers.SGD(lambda: rate.read_value())
      optimizer.build([a])

    def program(a, rate, x):
      if before:
        rate.assign(0.25)
      optimizer.apply([x], [a])
      rate.assign(0.25)
      return x

    step = step_programs.Step(program, [a, rate], SPEC, optimizers=(optimizer,))
    if before:
      with self.assertRaisesRegex(
        errors.UnsupportedOptionError, 'not write before .*SGD.apply reads'
      ):
        step(tf.ones([3]))
      self.assertAllEqual(a, [1.0, 2.0, 3.0])
    else:
      step(tf.ones([3]))
      self.assertAllEqual(a, [0.5, 1.5, 2.5])


if __name__ == '__main__':
  tf.test.main()
