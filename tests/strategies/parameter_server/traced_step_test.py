"""A traced step makes of variables what the same step makes of plain ones."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests.strategies.parameter_server import local_servers, step_programs
from tf_strategies import errors
from tf_strategies.strategies.parameter_server import (
  batch_message,
  journal,
  traced_step,
)


def _concrete(function):
  return tf.function(function).get_concrete_function(step_programs.SPEC)


def _compiled(function):
  return tf.function(lambda x: function(x) * 1.0, jit_compile=True)


def _in_branch(function, x):
  return tf.cond(x[0] > 0.0, lambda: function(x) * 1.0, lambda: x)


class TracedStepTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(local_servers.on_local_devices())
    self.journal = journal.Journal(2, 2)

  def trace(self, program, variables, *specs):
    return step_programs.Step(
      program, variables, self.journal, *(specs or [step_programs.SPEC])
    )

  @parameterized.named_parameters(
    *[(p.__name__, p) for p in step_programs.PROGRAMS]
  )
  def test_programs_do_what_they_do_with_plain_variables(self, program):
    values = ([1.0, 2.0, 3.0], [-0.5, 0.25, 4.0])
    plain = [tf.Variable(v) for v in values]
    ours = [local_servers.variable(i, v) for i, v in enumerate(values)]
    expected_step = tf.function(program, autograph=False)
    step = self.trace(program, ours)
    for k in range(3):
      x = tf.constant([0.5, 1.5, -0.25]) * (k + 1)
      self.assertAllClose(expected_step(*plain, x), step(x), 1e-6, 1e-6)
      for want, got in zip(plain, ours, strict=True):
        self.assertAllClose(want, got, 1e-6, 1e-6)
    self.assertEqual(
      self.journal.done(batch_message.TASKS, step_programs.KEY), 3
    )
    self.assertEqual(
      self.journal.done(batch_message.TASKS, step_programs.KEY + 1), 0
    )
    self.assertEqual(
      self.journal.done(batch_message.SPLITS, step_programs.KEY), 0
    )

  @parameterized.parameters(tf.int64, tf.int32, tf.float64, tf.bfloat16)
  def test_counters_of_other_types(self, dtype):
    counter = local_servers.variable(0, tf.constant(3, dtype))

    def program(counter, x):
      counter.assign(counter + tf.cast(tf.size(x), dtype))
      counter.assign_add(tf.ones([], dtype))
      return tf.cast(counter, tf.float32)

    step = self.trace(program, [counter])
    self.assertAllEqual([step(tf.ones([3])) for _ in range(3)], [7, 11, 15])
    self.assertEqual(int(counter.numpy()), 15)

  @parameterized.parameters(('sum',), ('assigned_sum',), ('overwrite',))
  def test_sums_do_not_overwrite_what_others_add(self, kind):
    a = local_servers.variable(0, [0.0, 0.0, 0.0])

    def program(a, x):
      token = yield a.read_value()
      with tf.control_dependencies([token]):
        x = tf.identity(x)
      if kind == 'sum':
        a.assign_add(x)
      elif kind == 'assigned_sum':
        a.assign(a + x)
      else:
        a.assign(a * 1.0 + x)
      return a.read_value()

    def other():
      a.assign_add([10.0, 20.0, 30.0])

    step = self.trace(step_programs.between(program, other), [a])
    # What the step sees is what there was when it began, and its own.
    self.assertAllEqual(step(tf.ones([3])), [1.0, 1.0, 1.0])
    expected = [1.0] * 3 if kind == 'overwrite' else [11.0, 21.0, 31.0]
    self.assertAllEqual(a, expected)

  def test_sums_in_a_branch_do_not_overwrite_what_others_add(self):
    a = local_servers.variable(0, [0.0, 0.0, 0.0])

    def other():
      a.assign_add([10.0, 20.0, 30.0])

    def program(a, x):
      def branch():
        old = a.read_value()
        with tf.control_dependencies([old]):
          acted = tf.numpy_function(other, [], [])
        with tf.control_dependencies([acted]):
          a.assign(old + tf.identity(x))
        return a.read_value()

      return tf.cond(x[0] > 0.0, branch, lambda: x)

    self.trace(program, [a])(tf.ones([3]))
    self.assertAllEqual(a, [11.0, 21.0, 31.0])

  def test_functions_that_have_their_graph_read(self):
    a = local_servers.variable(0, [1.0, 2.0, 3.0])
    scale = _concrete(lambda x: a * x)

    def program(a, x):
      with tf.GradientTape() as tape:
        loss = tf.reduce_sum(scale(x))
      a.assign_sub(tf.convert_to_tensor(tape.gradient(loss, a)))
      return loss

    step = self.trace(program, [a])
    self.assertEqual(step(tf.constant([1.0, 10.0, 0.5])), 22.5)
    self.assertAllEqual(a, [0.0, -8.0, 2.5])

  @parameterized.parameters(
    ('writes', lambda a, saved, add, scale, x: add(x)),
    ('writes', lambda a, saved, add, scale, x: _in_branch(add, x)),
    ('writes', lambda a, saved, add, scale, x: _compiled(a.assign_add)(x)),
    ('writes', lambda a, saved, add, scale, x: saved.add(x)),
    ('reads', lambda a, saved, add, scale, x: [a.assign_add(x), scale(x)][1]),
    ('reads', lambda a, saved, add, scale, x: [a.assign(x), scale(x)][1]),
  )
  def test_functions_that_have_their_graph_and_write_are_refused(
    self, does, call
  ):
    a = local_servers.variable(0, [1.0, 2.0, 3.0])
    add = _concrete(lambda x: a.assign_add(x) * 1.0)
    scale = _concrete(lambda x: a * x)
    module = tf.Module()
    module.total = tf.Variable([0.0, 0.0, 0.0])
    module.add = tf.function(
      lambda x: module.total.assign_add(x), [step_programs.SPEC]
    )
    path = self.create_tempdir().full_path
    tf.saved_model.save(module, path)
    saved = tf.saved_model.load(path)
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, f'which {does}.*call the tf.function'
    ):
      self.trace(lambda a, x: call(a, saved, add, scale, x), [a])(tf.ones([3]))
    self.assertAllEqual(a, [1.0, 2.0, 3.0])
    self.assertAllEqual(saved.total, [0.0, 0.0, 0.0])

  @pytest.mark.smoke
  def test_a_step_reads_one_state(self):
    a, b = (local_servers.variable(i, [1.0, 1.0, 1.0]) for i in range(2))

    def program(a, b, x):
      first = tf.identity(a)
      # Both have been fetched when the other one writes.
      token = yield first + b
      with tf.control_dependencies([token]):
        return first + 10.0 * a + 100.0 * b

    def other():
      a.assign([7.0, 7.0, 7.0])
      b.assign([7.0, 7.0, 7.0])

    step = self.trace(step_programs.between(program, other), [a, b])
    self.assertAllEqual(step(tf.ones([3])), [111.0] * 3)

  @parameterized.product(
    where=('step', 'branch', 'loop', 'branch_in_loop'), is_small=(True, False)
  )
  def test_what_a_branch_or_loop_writes_is_read_once(self, where, is_small):
    """Checks the scale of a loss, which others change during the step."""
    size = 3 if is_small else 30_000
    a, b = (local_servers.variable(i, [1.0] * size) for i in range(2))

    def other():
      a.assign(a * 7.0)
      return np.float32(0.0)

    def scaled(a, b, x):
      with tf.GradientTape() as tape:
        loss = tf.reduce_sum(x) * a[0]
      gradient = tape.gradient(loss, a)[0]
      with tf.control_dependencies([loss, gradient]):
        zero = tf.reshape(tf.numpy_function(other, [], tf.float32), [])

      def unscaled():
        with tf.GradientTape() as tape:
          ratio = (loss + zero) / a[0]
        # The product is -ratio, since the same value divided `loss`.
        ratio -= tape.gradient(ratio, a)[0] * (a[0] + zero)
        a.assign(a * 2.0)
        return ratio + gradient

      found = tf.cond(zero < 1.0, unscaled, lambda: 0.0)
      b.assign_add(tf.fill([size], found))
      return found

    def program(a, b, x):
      if where == 'step':
        return scaled(a, b, x)
      if where == 'branch':
        return tf.cond(x[0] > 0.0, lambda: scaled(a, b, x), lambda: 0.0)

      def body(i, total):
        if where == 'loop':
          return i + 1, total + scaled(a, b, x)
        found = tf.cond(x[0] > 0.0, lambda: scaled(a, b, x), lambda: 0.0)
        return i + 1, total + found

      return tf.while_loop(lambda i, _: i < 3, body, [0, 0.0])[1]

    rounds = 3 if 'loop' in where else 1
    found = self.trace(program, [a, b])(tf.ones([3]))
    # 3 rows by one scale each: 3 + 3, and the gradient of 3.
    self.assertAllClose(found, 9.0 * rounds)
    self.assertAllClose(b, [1.0 + 9.0 * rounds] * size)
    # Each round sees what the one before has written.
    self.assertAllClose(a, [2.0**rounds] * size)

  def test_an_update_that_waits_is_not_done_within_another_one(self):
    begun = []

    def program(a, b, x):
      def first():
        begun.append('first')
        a.assign_add(x)

      def second():
        begun.append('second')
        b.assign(b.read_value() + x)
        begun.append('end of second')

      step = traced_step.current()
      begun.clear()
      with step.merging():
        step.update(a, first, [x], waits=True)
        step.update(b, second, [x], waits=False)
      return x

    a, b = (local_servers.variable(i, [1.0, 2.0, 3.0]) for i in range(2))
    self.trace(program, [a, b])(tf.ones([3]))
    self.assertEqual(begun, ['first', 'second', 'end of second'])
    self.assertAllEqual([a, b], [[2.0, 3.0, 4.0]] * 2)

  def test_an_error_in_the_program_ends_the_step(self):
    def program(a, x):
      raise ZeroDivisionError('in the program')

    with self.assertRaisesRegex(ZeroDivisionError, 'in the program'):
      self.trace(program, [local_servers.variable(0, [1.0])])
    self.assertIsNone(traced_step.current())


if __name__ == '__main__':
  tf.test.main()
