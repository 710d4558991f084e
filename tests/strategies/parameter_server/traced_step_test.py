"""A traced step makes of variables what the same step makes of plain ones."""

import time
from unittest import mock

import tensorflow as tf
from absl.testing import parameterized

from tests import tiers
from tests.strategies.parameter_server import local_servers
from tf_strategies import _tf_internal
from tf_strategies.strategies.parameter_server import (
  batch_message,
  journal,
  traced_step,
  worker_function,
)

_KEY = 5


def _assign(a, b, x):
  a.assign(b + x)
  return a.read_value()


def _read_after_write(a, b, x):
  a.assign_add(x)
  b.assign(a * 2.0)
  a.assign_sub(b)
  return a + b


def _sums(a, b, x):
  a.assign(a + x)
  a.assign(x + a)
  b.assign(b - x)
  b.assign_add(x)
  b.assign_sub(3.0 * x)
  return b.read_value()


def _sum_after_overwrite(a, b, x):
  a.assign(x)
  a.assign_add(x)
  b.assign_add(x)
  b.assign(tf.zeros_like(b))
  b.assign_add(x)
  return a * b


def _difference_the_other_way_round(a, b, x):
  # No addition: it must not be sent as one.
  a.assign(x - a)
  return a.read_value()


def _written_in_a_branch(a, b, x):
  tf.cond(tf.reduce_sum(x) > 0.0, lambda: a.assign_add(x), lambda: a.assign(b))
  return a.read_value()


def _written_in_the_other_branch(a, b, x):
  return _written_in_a_branch(a, b, -x)


def _written_before_and_in_a_branch(a, b, x):
  a.assign_add(x)
  tf.cond(
    tf.reduce_sum(x) > 0.0, lambda: a.assign(a * 2.0), lambda: a.read_value()
  )
  a.assign_add(x)
  return a.read_value()


def _written_in_a_loop(a, b, x):
  def body(i):
    a.assign_add(x)
    b.assign(a + b)
    return i + 1

  tf.while_loop(lambda i: i < 3, body, [0], parallel_iterations=1)
  return a + b


def _read_in_a_loop(a, b, x):
  a.assign_add(x)
  return tf.while_loop(
    lambda i, s: i < 3, lambda i, s: (i + 1, s + a * b), [0, x]
  )[1]


def _gradients(a, b, x):
  with tf.GradientTape() as tape:
    loss = tf.reduce_sum(tf.sin(a * x) + b * b * x)
  for variable, gradient in zip(
    (a, b), tape.gradient(loss, [a, b]), strict=True
  ):
    variable.assign_sub(0.1 * gradient)
  return loss


def _gradients_of_a_loop(a, b, x):
  with tf.GradientTape() as tape:
    total = tf.while_loop(
      lambda i, s: i < 3,
      lambda i, s: (i + 1, tf.sin(s * a) + b + tf.gather(a, [0, 0, 2])),
      [0, x],
    )[1]
    loss = tf.reduce_sum(total)
  for variable, gradient in zip(
    (a, b), tape.gradient(loss, [a, b]), strict=True
  ):
    variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
  return loss


def _gradients_of_a_branch(a, b, x):
  with tf.GradientTape() as tape:
    loss = tf.cond(
      tf.reduce_sum(x) > 0.0,
      lambda: tf.reduce_sum(a * a * x),
      lambda: tf.reduce_sum(b),
    )
  a.assign_sub(tf.convert_to_tensor(tape.gradient(loss, a)))
  return loss


def _gradient_after_a_write(a, b, x):
  a.assign_add(x)
  with tf.GradientTape() as tape:
    loss = tf.reduce_sum(a * a * b)
  gradient = tape.gradient(loss, a)
  a.assign_sub(0.1 * gradient)
  return gradient


def _rows(a, b, x):
  a.assign_add(x)
  a.scatter_add(tf.IndexedSlices(tf.constant([10.0]), tf.constant([1])))
  a.assign_add(x)
  return tf.gather(a, [2, 1, 0])


def _gathered_after_a_write(a, b, x):
  a.assign_add(x)
  return tf.gather(a, [2, 2, 0]) + tf.gather_nd(a, [[0], [1], [1]])


def _scattered_only(a, b, x):
  a.scatter_update(tf.IndexedSlices(x[:2], tf.constant([2, 0])))
  b.scatter_sub(tf.IndexedSlices(x[:1], tf.constant([1])))
  return b.read_value()


def _broadcast(a, b, x):
  a.assign_add(tf.broadcast_to(x[0], [3]))
  return a.read_value()


def _no_variable(a, b, x):
  return x * 2.0


PROGRAMS = (
  _assign,
  _read_after_write,
  _sums,
  _sum_after_overwrite,
  _difference_the_other_way_round,
  _written_in_a_branch,
  _written_in_the_other_branch,
  _written_before_and_in_a_branch,
  _written_in_a_loop,
  _read_in_a_loop,
  _gradients,
  _gradients_of_a_loop,
  _gradients_of_a_branch,
  _gradient_after_a_write,
  _rows,
  _gathered_after_a_write,
  _scattered_only,
  _broadcast,
  _no_variable,
)


class _Step:
  """Does a program as a worker does a step: each call is another step."""

  def __init__(self, program, variables, journal, *specs):
    def run(batch):
      return program(*variables, *batch)

    discovery = worker_function.discover(run, specs)

    def step(token, number, *batch):
      traced = traced_step.TracedStep(discovery.access)
      key = tf.constant(_KEY, tf.int64)
      with traced.tracing():
        traced.ticket = journal.ticket(batch_message.TASKS, token, key, number)
        outputs = run(batch)
      with tf.control_dependencies(traced.commit()):
        return tf.identity(outputs)

    number = tf.TensorSpec([], tf.int64)
    self._token = journal.token(0)
    self._steps = 0
    self.function = worker_function.concrete(step, number, number, *specs)

  def __call__(self, *batch):
    self._steps += 1
    return self.repeat(*batch)

  def repeat(self, *batch, token=None):
    """The same step again."""
    token = self._token if token is None else token
    numbers = (tf.constant(n, tf.int64) for n in (token, self._steps))
    return self.function(*numbers, *batch)


_SPEC = tf.TensorSpec([3], tf.float32)


class TracedStepTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(local_servers.on_local_devices())
    self.journal = journal.Journal(2, 2)

  def trace(self, program, variables, *specs):
    return _Step(program, variables, self.journal, *(specs or [_SPEC]))

  @parameterized.named_parameters(
    *[(p.__name__.strip('_'), p) for p in PROGRAMS]
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
    self.assertEqual(self.journal.done(batch_message.TASKS, _KEY), 3)
    self.assertEqual(self.journal.done(batch_message.TASKS, _KEY + 1), 0)
    self.assertEqual(self.journal.done(batch_message.SPLITS, _KEY), 0)

  @tiers.named_parameters(
    *tiers.few(
      [(p.__name__.strip('_'), p) for p in PROGRAMS],
      'written_in_a_branch',
      'scattered_only',
      'sums',
    )
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
    # Of what was refused first, or of what was cancelled by that.
    with self.assertRaises(tf.errors.OpError):
      step(x)
    for want, got in zip(before, ours, strict=True):
      self.assertAllEqual(want, got)
    # Its next task is another one.
    step = self.trace(program, ours)
    step(x)

  @tiers.named_parameters(
    *tiers.few(
      [
        (p.__name__.strip('_'), p)
        for p in PROGRAMS
        if p is not _written_in_a_loop
      ],
      'written_in_a_branch',
      'rows',
      'sums',
    )
  )
  def test_step_that_is_repeated_writes_nothing(self, program):
    values = [1.0, 2.0, 3.0], [-0.5, 0.25, 4.0]
    ours = [local_servers.variable(i, v) for i, v in enumerate(values)]
    step = self.trace(program, ours)
    x = tf.constant([0.5, 1.5, -0.25])
    step(x)
    before = [v.numpy() for v in ours]
    step.repeat(x)
    for want, got in zip(before, ours, strict=True):
      self.assertAllEqual(want, got)
    for k, variable in enumerate(ours):
      variable.assign(variable + 7.0 * (k + 1))
    before = [v.numpy() for v in ours]
    step(x)
    if program is not _no_variable:
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

    step = self.trace(self.between(program, fail_once), [a, b, c])
    with self.assertRaises(tf.errors.OpError):
      step(tf.ones([3]))
    self.assertAllEqual(a, [0.0, 1.0, 0.0])
    self.assertAllEqual(b, [0.0] * 3)
    self.assertEqual(self.journal.done(batch_message.TASKS, _KEY), 0)
    step.repeat(tf.ones([3]), token=self.journal.token(0))
    self.assertAllEqual(a, [0.0, 1.0, 0.0])
    self.assertAllEqual(b, [0.0, 0.0, 1.0])
    self.assertAllEqual(c, 1.0)
    self.assertEqual(self.journal.done(batch_message.TASKS, _KEY), 1)

  @parameterized.parameters((True,), (False,))
  def test_unit_begins_when_all_is_there(self, waits):
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
      time.sleep(0.5)  # What is there may be written.
      self.journal.revoke([0])

    def admit(first, result):
      # A mutation: it begins when the ticket is there.
      del first, result

    if not waits:
      self.enter_context(
        mock.patch.object(_tf_internal, 'begin_after_captures', admit)
      )
    step = self.trace(self.between(program, give_up), [a, b])
    with self.assertRaises(tf.errors.OpError):
      step(tf.ones([3]))
    self.assertEqual(a[0].numpy(), 0.0 if waits else 1.0)
    self.assertEqual(b[0].numpy(), 0.0 if waits else 1.0)

  def test_after_a_restore_a_step_is_repeated_as_a_whole(self):
    a, b = (local_servers.variable(i, [0.0] * 3) for i in range(2))

    def program(a, b, x):
      a.scatter_add(tf.IndexedSlices(x[:1], tf.constant([1])))
      token = yield a.read_value()
      b.scatter_add(tf.IndexedSlices(x[:1] + token, tf.constant([2])))
      return token

    def fail():
      raise ZeroDivisionError('the worker is lost')

    step = self.trace(self.between(program, fail), [a, b])
    for _ in range(2):
      with self.assertRaises(tf.errors.OpError):
        step.repeat(tf.ones([3]), token=self.journal.token(0))
      self.assertAllEqual(a, [0.0, 1.0, 0.0])
    self.journal.recover()
    with self.assertRaises(tf.errors.OpError):
      step.repeat(tf.ones([3]), token=self.journal.token(0))
    self.assertAllEqual(a, [0.0, 2.0, 0.0])

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

  def test_booleans_and_several_types_on_one_server(self):
    flag = local_servers.variable(1, tf.constant(False))
    count = local_servers.variable(1, tf.constant(2, tf.int64))
    half = local_servers.variable(1, tf.constant([0.5, 1.5], tf.float16))

    def program(flag, count, half, x):
      flag.assign(tf.logical_not(flag))
      count.assign_add(tf.where(flag, tf.constant(10, tf.int64), 1))
      half.assign(half * 2)
      return tf.reduce_sum(x)

    step = self.trace(program, [flag, count, half])
    step(tf.ones([3]))
    step(tf.ones([3]))
    self.assertEqual(flag.numpy(), False)
    self.assertEqual(count.numpy(), 13)
    self.assertAllEqual(half, [2.0, 6.0])

  def between(self, program, action):
    """The program with an action of somebody else in its middle."""

    def run(*args):
      generator = program(*args)
      with tf.control_dependencies([next(generator)]):
        acted = tf.numpy_function(action, [], [])
      with tf.control_dependencies([acted]):
        token = tf.identity(0.0)
      try:
        generator.send(token)
      except StopIteration as e:
        return e.value
      raise AssertionError('the program does not end')

    return run

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

    step = self.trace(self.between(program, other), [a])
    # What the step sees is what there was when it began, and its own.
    self.assertAllEqual(step(tf.ones([3])), [1.0, 1.0, 1.0])
    expected = [1.0] * 3 if kind == 'overwrite' else [11.0, 21.0, 31.0]
    self.assertAllEqual(a, expected)

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

    step = self.trace(self.between(program, other), [a, b])
    self.assertAllEqual(step(tf.ones([3])), [111.0] * 3)

  def test_few_tensors_cross_between_tasks(self):
    count = 6
    variables = [
      local_servers.variable(i % 2, [float(i), 1.0, 2.0]) for i in range(count)
    ]

    def program(*args):
      *variables, x = args
      for variable in variables:
        variable.assign_add(variable * x)
      return tf.add_n([v.read_value() for v in variables])

    step = self.trace(program, variables)
    step(tf.ones([3]))
    graph = step.function.graph
    servers = [local_servers.device(i) for i in range(2)]
    left, came = set(), set()
    for op in graph.get_operations():
      for tensor in op.inputs:
        if tensor.dtype == tf.resource or tensor.op.device == op.device:
          continue
        if tensor.op.device in servers:
          left.add(tensor.name)
        if op.device in servers and tensor.op.type != 'Const':
          came.add((tensor.name, op.device))
    # One message from each server and one to each.
    self.assertLen(left, 2)
    self.assertLen(came, 2)

  def test_outside_of_a_step_nothing_is_held(self):
    self.assertIsNone(traced_step.current())
    a = local_servers.variable(0, [1.0, 2.0, 3.0])

    @tf.function(autograph=False)
    def run(x):
      a.assign_add(x)
      return a.read_value()

    self.assertAllEqual(run(tf.ones([3])), [2.0, 3.0, 4.0])
    self.assertAllEqual(a, [2.0, 3.0, 4.0])

  def test_an_error_in_the_program_ends_the_step(self):
    def program(a, x):
      raise ZeroDivisionError('in the program')

    with self.assertRaisesRegex(ZeroDivisionError, 'in the program'):
      self.trace(program, [local_servers.variable(0, [1.0])])
    self.assertIsNone(traced_step.current())


if __name__ == '__main__':
  tf.test.main()
