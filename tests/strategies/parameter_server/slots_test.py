"""Slots hold what steps leave on servers, and are applied once, as one step."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests.strategies.parameter_server import local_servers, step_programs
from tf_strategies.strategies.parameter_server import packing, traced_step

_SPECS = tf.TensorSpec([None], tf.int32), tf.TensorSpec([None, 2], tf.float32)


def _mean_loss(weight, table, ids, x):
  return tf.reduce_mean(tf.square(tf.gather(table, ids) * x - weight))


def _sum_loss(weight, table, ids, x):
  return tf.reduce_sum(tf.square(tf.gather(table, ids) * x - weight))


_OPTIMIZERS = {
  'adagrad': lambda: keras.optimizers.Adagrad(0.1),
  'lazy_adam': lambda: tfs.keras.LazyRows(keras.optimizers.Adam(0.05)),
}


class SlotsTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(local_servers.on_local_devices())

  def step(self, program, variables, *specs, **options):
    return step_programs.Step(program, variables, *specs, **options)

  @parameterized.product(
    loss=(_mean_loss, _sum_loss), rows=((3, 5), (1, 1, 6), (8,))
  )
  @pytest.mark.smoke
  def test_tasks_do_what_one_device_does(self, loss, rows):
    """Checks gradients, lookups, sums, means, and counts of steps."""

    def program(weight, table, count, total, mean, ids, x):
      with tf.GradientTape() as tape:
        value = loss(weight, table, ids, x)
      gradients = tape.gradient(value, [weight, table])
      optimizer.apply(gradients, [weight, table])
      count.assign_add(1)
      total.assign(total + tf.reduce_sum(x, 0))
      mean.assign(tf.reduce_mean(x, 0) * 0.5 + mean)
      return {'loss': value, 'rows': tf.size(ids), 'sum': tf.reduce_sum(x, 0)}

    rng = np.random.default_rng(3)
    ids = rng.integers(0, 5, 8).astype(np.int32)
    x = rng.normal(size=[8, 2]).astype(np.float32)
    table = rng.normal(size=[5, 2]).astype(np.float32)
    values = [1.0, -1.0], table, 7, [0.0, 1.0], [1.0, 0.0]
    expected = [tf.Variable(v) for v in values]
    with local_servers.scope():
      ours = [tf.Variable(v) for v in values]
    results = []
    for variables, scope in (
      (expected, tf.name_scope('plain')),
      (ours, local_servers.scope()),
    ):
      with scope:
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(variables[:2])
      if variables is expected:
        results.append(tf.function(program)(*variables, ids, x))
        continue
      powers = traced_step.powers_of_rows(
        lambda batch, v=variables: program(*v, *batch),
        [optimizer],
        _SPECS,
        tuple,
      )
      step = self.step(
        program,
        variables,
        *_SPECS,
        optimizers=[optimizer],
        tasks=len(rows),
        powers=powers,
      )
      at = np.cumsum(rows)[:-1]
      for task, part in enumerate(
        zip(np.split(ids, at), np.split(x, at), strict=True)
      ):
        step.compute(*part, task=task)
      results.append(step.apply())
    for name, want in results[0].items():
      self.assertAllClose(results[1][name], want, 1e-5, 1e-5)
    for want, got in zip(expected, ours, strict=True):
      self.assertAllClose(got, want, 1e-5, 1e-5)

  def test_layout(self):
    """Checks that a server gets what its variables need: small tensors in one."""
    with local_servers.on_local_devices():
      a, c = (local_servers.variable(0, [1.0, 2.0]) for _ in 'ac')
      b = local_servers.variable(1, tf.zeros([100], tf.float16))
      table = local_servers.partitioned_variable(
        tf.zeros([6, 4]), 2, trainable=False
      )
    with local_servers.scope():
      optimizer = keras.optimizers.SGD(0.1)
      optimizer.build([a])

    def program(a, b, c, table, x):
      c.assign(a * 2.0)
      b.assign_add(tf.ones_like(b))
      table.assign(table + 1.0)
      optimizer.apply([x], [a])
      return tf.reduce_sum(x), tf.size(x)

    with mock.patch.object(packing, 'SMALL_BYTES', 40):
      spec = tf.TensorSpec([2], tf.float32)
      step = self.step(program, [a, b, c, table], spec, optimizers=[optimizer])
      shapes = {
        server: [(s.shape.as_list(), s.dtype) for s in specs]
        for server, specs in step.layout.specs.items()
      }
      found = step(np.ones(2, np.float32))
    numbers = 2 * 2  # Of a float64.
    self.assertEqual(
      shapes,
      {
        # The gradient, `c`, the numbers and the number of rows; a part of the table.
        0: [([2 + 2 + numbers + 1], tf.float32), ([3, 4], tf.float32)],
        # The number of rows; large tensors.
        1: [
          ([1], tf.float32),
          ([100], tf.float16),
          ([3, 4], tf.float32),
        ],
      },
    )
    self.assertEqual(found, (2.0, 2))
    self.assertAllClose(a, [0.9, 1.9])
    self.assertAllClose(c, [2.0, 4.0])
    self.assertAllEqual(b, [1.0] * 100)
    self.assertAllEqual(table, tf.ones([6, 4]))

  @parameterized.parameters('adagrad', 'lazy_adam')
  def test_a_lookup_sends_few_messages(self, optimizer):
    """Checks that a step with a table in parts never has it whole."""
    table = local_servers.partitioned_variable(
      tf.zeros([100, 4]), 2, trainable=False
    )
    with local_servers.scope():
      kernel, bias = tf.Variable(tf.zeros([4, 1])), tf.Variable([0.0])
      optimizer = _OPTIMIZERS[optimizer]()
      optimizer.build([table, kernel, bias])

    def program(table, kernel, bias, ids):
      with tf.GradientTape() as tape:
        tape.watch(table)
        found = (tf.gather(table, ids) + tf.gather(table, ids)) @ kernel + bias
        loss = tf.reduce_mean(found**2)
      variables = [table, kernel, bias]
      optimizer.apply(tape.gradient(loss, variables), variables)
      return loss

    step = self.step(
      program,
      [table, kernel, bias],
      tf.TensorSpec([8], tf.int32),
      optimizers=[optimizer],
    )
    self.assertEqual(
      {id(v) for v in step.traced.copied}, {id(kernel), id(bias)}
    )
    # pylint: disable=protected-access
    inner = step.traced._function.graph.get_operations()
    gathers = [op for op in inner if op.type == 'ResourceGather']
    self.assertLen(gathers, 2 * len(table.parts))
    # To the first server: small gradients with the loss and the number of rows, and
    # rows with their numbers. To the other one nothing but ids.
    shapes = {
      server: [s.shape.as_list() for s in specs]
      for server, specs in step.layout.specs.items()
    }
    self.assertEqual(shapes, {0: [[4 + 1 + 2 + 1], [None, 4], [None]]})
    # From the first server: all copies in one message.
    server = local_servers.device(0)
    operations = step.worker._function.graph.get_operations()
    read = {
      tensor.name
      for op in operations
      if op.device != server
      for tensor in op.inputs
      if tensor.op.device == server and tensor.dtype != tf.resource
    }
    self.assertLen(read, 1)

  def test_rows_of_each_number(self):
    """Checks that slots for lookups take what each batch has."""
    with local_servers.scope():
      table = tf.Variable(tf.zeros([5, 2]))
      optimizer = keras.optimizers.SGD(1.0)
      optimizer.build([table])

    def program(table, ids):
      with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, ids))
      optimizer.apply([tape.gradient(loss, table)], [table])

    step = self.step(
      program, [table], tf.TensorSpec([None], tf.int64), optimizers=[optimizer]
    )
    expected = np.zeros([5, 2])
    for ids in ([3, 3, 1], [0], [], [4, 1]):
      step(np.array(ids, np.int64))
      for i in ids:
        expected[i] -= 1.0
      self.assertAllEqual(table, expected)

  @parameterized.parameters('text', 'large')
  def test_results_that_are_no_numbers(self, kind):
    a = local_servers.variable(0, [1.0, 2.0])

    def program(a, x):
      a.assign_add(x)
      if kind == 'text':
        return tf.strings.as_string(tf.cast(a, tf.int32))
      return tf.ones([300, 300]) * a[0]

    step = self.step(program, [a], tf.TensorSpec([2], tf.float32))
    found = step(np.ones(2, np.float32))
    want = [b'2', b'3'] if kind == 'text' else np.full([300, 300], 2.0)
    self.assertAllEqual(found, want)
    self.assertAllEqual(a, [2.0, 3.0])

  def test_what_workers_compute_is_applied_once(self):
    """Checks that slots which are written again hold the last step alone."""
    a = local_servers.variable(0, [0.0, 0.0])
    step = self.step(
      lambda a, x: a.assign_add(x), [a], tf.TensorSpec([2], tf.float32)
    )
    step.compute(np.ones(2, np.float32))
    step.compute(2 * np.ones(2, np.float32))
    self.assertAllEqual(a, [0.0, 0.0])
    step.apply()
    self.assertAllEqual(a, [2.0, 2.0])

  def test_step_that_writes_nothing(self):
    a = local_servers.variable(0, [1.0, 2.0])
    step = self.step(
      lambda a, x: tf.reduce_sum(a * x), [a], tf.TensorSpec([2], tf.float32)
    )
    self.assertTrue(step.layout.is_empty)
    self.assertEqual(step(np.ones(2, np.float32)), 3.0)


if __name__ == '__main__':
  tf.test.main()
