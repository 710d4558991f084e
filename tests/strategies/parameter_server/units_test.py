"""What a step writes on servers is written once, or not at all."""

import itertools
import time

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import tiers
from tests.strategies.parameter_server import local_servers, step_programs
from tf_strategies.strategies.parameter_server import (
  batch_message,
  journal,
  traced_step,
)


def _loop(write):
  def body(i):
    write(i)
    return i + 1

  tf.while_loop(lambda i: i < 6, body, [0])


def _rounds(count, run):
  def body(i):
    run()
    return i + 1

  tf.while_loop(lambda i: i < count, body, [0])


def _branch_in_loop(write):
  def body(i):
    tf.cond(i % 2 == 0, lambda: write_one(i), lambda: write_one(i))
    return i + 1

  def write_one(i):
    write(i)
    return 1

  tf.while_loop(lambda i: i < 6, body, [0])


_SHAPES = {
  'loop': _loop,
  'branch_in_loop': _branch_in_loop,
}


class UnitsTest(tf.test.TestCase, parameterized.TestCase):
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
  def test_worker_that_was_given_up_writes_nothing(self, program):
    values = [1.0, 2.0, 3.0], [-0.5, 0.25, 4.0]
    ours = [local_servers.variable(i, v) for i, v in enumerate(values)]
    step = self.trace(program, ours)
    x = tf.constant([0.5, 1.5, -0.25])
    self.journal.revoke([1])
    step(x)
    before = [v.numpy() for v in ours]
    self.journal.revoke([0])
    # The error of the refused unit, or of an operation that it cancelled.
    with self.assertRaises(tf.errors.OpError):
      step(x)
    for want, got in zip(before, ours, strict=True):
      self.assertAllEqual(want, got)
    # Its next task is another one.
    step = self.trace(program, ours)
    step(x)

  @parameterized.named_parameters(
    *[(p.__name__, p) for p in step_programs.PROGRAMS]
  )
  def test_step_that_is_repeated_writes_nothing(self, program):
    values = [1.0, 2.0, 3.0], [-0.5, 0.25, 4.0]
    ours = [local_servers.variable(i, v) for i, v in enumerate(values)]
    step = self.trace(program, ours)
    x = tf.constant([0.5, 1.5, -0.25])
    step(x)
    before = [v.numpy() for v in ours]
    self.journal.revoke([0])
    step.repeat(x, token=self.journal.token(0))
    for want, got in zip(before, ours, strict=True):
      self.assertAllEqual(want, got)
    for k, variable in enumerate(ours):
      variable.assign(variable + 7.0 * (k + 1))
    before = [v.numpy() for v in ours]
    step.number += 1
    step.repeat(x, token=self.journal.token(0))
    if program is not step_programs.no_variable:
      self.assertNotAllEqual(before, [v.numpy() for v in ours])

  @parameterized.parameters(('lost',), ('given_up',))
  def test_step_that_came_to_its_middle_is_done_once(self, how):
    a, b = (local_servers.variable(i, [0.0] * 3) for i in range(2))
    c = local_servers.variable(1, 0.0)
    has_failed = []

    def program(a, b, c, x):
      c.assign_add(1.0)
      a.scatter_add(tf.IndexedSlices(x[:1], tf.constant([1])))
      token = yield a.read_value()
      row = x[:1] + token
      b.scatter_add(tf.IndexedSlices(row, tf.constant([2])))
      return row

    def fail_once():
      if not has_failed:
        has_failed.append(True)
        if how == 'lost':
          raise ZeroDivisionError('the worker is lost')
        self.journal.revoke([0])

    step = self.trace(step_programs.between(program, fail_once), [a, b, c])
    with self.assertRaises(tf.errors.OpError):
      step(tf.ones([3]))
    self.assertAllEqual(a, [0.0, 1.0, 0.0])
    self.assertAllEqual(b, [0.0] * 3)
    self.assertEqual(
      self.journal.done(batch_message.TASKS, step_programs.KEY), 0
    )
    step.repeat(tf.ones([3]), token=self.journal.token(0))
    self.assertAllEqual(a, [0.0, 1.0, 0.0])
    self.assertAllEqual(b, [0.0, 0.0, 1.0])
    self.assertAllEqual(c, 1.0)
    self.assertEqual(
      self.journal.done(batch_message.TASKS, step_programs.KEY), 1
    )

  @tiers.product(
    shape=tuple(_SHAPES),
    deaths=((3, 3, 4), tiers.soak((0, 5))),
  )
  def test_rounds_that_are_repeated_are_written_once(self, shape, deaths):
    """The attempts end before these rounds of six; then one comes to its end."""
    a, b = (local_servers.variable(i, [0.0] * 6) for i in range(2))
    began = []

    def begin(i):
      began.append(int(i))
      if began[-1] == left[0]:
        raise ZeroDivisionError('the worker is lost')
      return i

    def write(i):
      i = tf.reshape(tf.numpy_function(begin, [i], tf.int32), [1])
      for variable, factor in ((a, 1.0), (b, 10.0)):
        # Of other rounds than the index it would be seen.
        value = factor * tf.cast(i[0] + 1, tf.float32)
        variable.scatter_add(tf.IndexedSlices([value], i))

    def program(a, b, x):
      del a, b
      _SHAPES[shape](write)
      return x

    step = self.trace(program, [a, b])
    left = [*deaths, None]
    while left[0] is not None:
      with self.assertRaises(tf.errors.OpError):
        step.repeat(tf.ones([3]), token=self.journal.token(0))
      self.journal.revoke([0])
      left.pop(0)
    for times in (1, 2):
      step.repeat(tf.ones([3]), token=self.journal.token(0))
      self.assertAllEqual(a, np.arange(1.0, 7.0) * times)
      self.assertAllEqual(b, np.arange(1.0, 7.0) * times * 10)
      self.journal.revoke([0])
      step.number += 1
    attempts = [[*range(d + 1)] for d in deaths] + 2 * [[*range(6)]]
    self.assertEqual(began, list(itertools.chain(*attempts)))

  @pytest.mark.smoke
  def test_steps_whose_units_have_one_number(self):
    """Checks a number whose unit is in a loop in one step, and not in the other."""
    a, b = (local_servers.variable(i, [0.0] * 3) for i in range(2))
    programs = step_programs.scattered_only, step_programs.written_in_a_loop
    for program in (*programs, programs[0]):
      step = self.trace(program, [a, b])
      step.number = self.number = getattr(self, 'number', 0) + 1
      step.repeat(tf.ones([3]), token=self.journal.token(0))
      before = a.numpy(), b.numpy()
      self.assertNotAllEqual(before[0], [0.0] * 3)
      self.journal.revoke([0])
      step.repeat(tf.ones([3]), token=self.journal.token(0))
      self.assertAllEqual(a, before[0])
      self.assertAllEqual(b, before[1])

  @tiers.product(
    chooses=('counter', 'nested', 'loop'),
    begins=(True, False),
  )
  def test_step_that_is_repeated_makes_the_same_choice(self, chooses, begins):
    """Others count between two attempts; the first may have written nothing."""
    a, b = (local_servers.variable(i, [0.0] * 2) for i in range(2))
    c = local_servers.variable(0, 4)
    fails = [True]

    def fail_once():
      if fails.pop():
        raise ZeroDivisionError('the worker is lost')

    def write(column):
      def branch():
        row = tf.IndexedSlices(tf.ones([1]), tf.constant([column]))
        first = [tf.numpy_function(fail_once, [], [])] if not begins else []
        with tf.control_dependencies(first):
          a.scatter_add(row)
        if begins:
          with tf.control_dependencies([a.read_value()]):
            first = [tf.numpy_function(fail_once, [], [])]
        with tf.control_dependencies(first):
          b.scatter_add(row)
        return 1

      return branch

    def program(a, b, c, x):
      del a, b
      if chooses == 'nested':
        tf.cond(
          x[0] > 0.0,
          lambda: tf.cond(c.read_value() % 2 == 0, write(0), write(1)),
          lambda: 0,
        )
        return x
      turn = c.read_value()
      c.assign_add(1)
      choose = lambda: tf.cond(turn % 2 == 0, write(0), write(1))  # noqa: E731
      if chooses == 'loop':
        _rounds(turn - 3, choose)
      else:
        choose()
      return x

    step = self.trace(program, [a, b, c])
    with self.assertRaises(tf.errors.OpError):
      step(tf.ones([3]))
    self.assertAllEqual(a, [float(begins), 0.0])
    fails.append(False)
    c.assign_add(1)
    self.journal.revoke([0])
    step.repeat(tf.ones([3]), token=self.journal.token(0))
    for each in (a, b):
      self.assertAllEqual(each, [1.0, 0.0])
    # The next step chooses by itself.
    c.assign(5)
    fails.append(False)
    step.number += 1
    fails.extend([False] * 2)
    step.repeat(tf.ones([3]), token=self.journal.token(0))
    for each in (a, b):
      self.assertAllEqual(each, [1.0, 2.0 if chooses == 'loop' else 1.0])

  def test_unit_begins_when_all_is_there(self):
    a, b = (local_servers.variable(1, [0.0] * 3) for _ in '01')

    def program(a, b, x):
      token = yield tf.identity(x)

      def update(variable, value):
        variable.assign_add(value)

      # On one server, and so in one unit.
      step = traced_step.current()
      with step.merging():
        step.update(a, lambda: update(a, x), [], waits=True)
        step.update(b, lambda: update(b, x + token), [], waits=True)
      return token

    def give_up():
      time.sleep(0.5)  # Leaves time for a write, which must not happen.
      self.journal.revoke([0])

    step = self.trace(step_programs.between(program, give_up), [a, b])
    with self.assertRaises(tf.errors.OpError):
      step(tf.ones([3]))
    self.assertEqual((a[0].numpy(), b[0].numpy()), (0.0, 0.0))

  @parameterized.parameters(True, False)
  def test_updates_in_and_before_a_branch_of_a_merge_call(self, is_taken):
    a, b = (local_servers.variable(1, [0.0] * 3) for _ in '01')

    def program(a, b, x):
      step = traced_step.current()

      def update(variable, value):
        step.update(variable, lambda: add(variable, value), [], waits=True)

      def add(variable, value):
        variable.assign_add(value)

      def branch():
        update(b, 10.0 * x)
        return tf.reduce_sum(a.read_value())  # Sees the update above.

      with step.merging():
        update(a, x)
        return tf.cond(tf.reduce_sum(x) > 0.0, branch, lambda: -1.0)

    step = self.trace(program, [a, b])
    x = tf.ones([3]) * (1.0 if is_taken else -1.0)
    self.assertEqual(step(x), 3.0 if is_taken else -1.0)
    self.assertAllEqual(a, x)
    self.assertAllEqual(b, [10.0 * is_taken] * 3)
    step.repeat(x)
    self.assertAllEqual(a, x)
    self.assertAllEqual(b, [10.0 * is_taken] * 3)

  @parameterized.parameters((True, 2.0), (False, 1.0))
  def test_after_a_restore_a_step_is_repeated(self, restores_all, expected):
    """Checks that all is repeated, or only unwritten units if this server lives."""
    a, b = (local_servers.variable(i, [0.0] * 3) for i in range(2))

    def program(a, b, x):
      a.scatter_add(tf.IndexedSlices(x[:1], tf.constant([1])))
      token = yield a.read_value()
      b.scatter_add(tf.IndexedSlices(x[:1] + token, tf.constant([2])))
      return token

    def fail():
      raise ZeroDivisionError('the worker is lost')

    step = self.trace(step_programs.between(program, fail), [a, b])
    for _ in range(2):
      with self.assertRaises(tf.errors.OpError):
        step.repeat(tf.ones([3]), token=self.journal.token(0))
      self.assertAllEqual(a, [0.0, 1.0, 0.0])
    self.journal.recover(restores_all)
    with self.assertRaises(tf.errors.OpError):
      step.repeat(tf.ones([3]), token=self.journal.token(0))
    self.assertAllEqual(a, [0.0, expected, 0.0])


if __name__ == '__main__':
  tf.test.main()
