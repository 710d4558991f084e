"""Arguments of `strategy.step`, and reductions in `strategy.run`.

`programs_test.py` compares loops with one device.
"""

import contextlib

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import processes, tf_case, virtual_devices

virtual_devices.configure()


def _ring():
  return tfs.RingMirroredStrategy(virtual_devices.names(4))


def _central():
  # Not CPU:0, where TensorFlow puts ops without an explicit device.
  return tfs.CentralStorageStrategy(
    virtual_devices.names(4), virtual_devices.name(1)
  )


class ArgumentsTest(tf_case.TestCase):
  def test_only_distributed_batches_are_split(self):
    strategy = _ring()
    data = tf.data.Dataset.from_tensor_slices(tf.range(6.0)).batch(6)
    [batch] = strategy.experimental_distribute_dataset(data)

    @strategy.step
    def step(x, weights, *, power):
      return tf.reduce_sum(x) * weights[-1], x**power

    total, powers = step(batch, np.float32([1, 2, 3]), power=2)
    self.assertEqual(float(total), 45.0)
    self.assertAllEqual(powers, np.arange(6.0) ** 2)
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError,
      'use a result of strategy.step as it is',
    ):
      strategy.reduce('SUM', total, axis=None)

  def test_next_in_a_function(self):
    strategy = _ring()
    data = tf.data.Dataset.range(6).batch(4)
    batches = iter(strategy.experimental_distribute_dataset(data))
    total = strategy.step(tf.reduce_sum)
    run = tf.function(lambda batches: total(next(batches)))
    self.assertEqual([int(run(batches)) for _ in range(2)], [6, 9])

  def test_plain_batch_is_computed_on_all_replicas(self):
    step = _ring().step(tf.reduce_sum)
    with self.assertLogs('absl', 'WARNING') as logs:
      self.assertEqual(float(step(tf.range(6.0))), 15.0)
    self.assertIn('experimental_distribute_dataset', logs.output[0])

  def test_step_without_a_batch(self):
    strategy = _ring()
    with strategy.scope():
      count = tf.Variable(0.0)
    step = strategy.step(lambda: count.assign_add(1.0))
    self.assertEqual([float(step()) for _ in range(2)], [1.0, 2.0])
    self.assertEqual([float(c) for c in count.values], [2.0] * 4)

  @parameterized.parameters(
    (None, ()), (tf.reduce_sum, 1), (tf.reduce_sum, ['adam'])
  )
  def test_invalid_arguments_are_refused(self, fn, optimizers):
    strategy = _central()
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'strategy.step'
    ):
      strategy.step(fn, optimizers)


def _in_branch(rows, scale, weight):
  def branch():
    before = scale * rows
    scale.assign(scale * 2.0)
    weight.assign(weight * scale)
    return before + scale * weight

  return tf.reduce_sum(tf.cond(weight > 0, branch, lambda: rows))


def _in_loop(rows, scale, weight):
  total = tf.zeros_like(rows)
  for _ in tf.range(3):
    weight.assign_add(scale)
    total += rows * scale
    if weight > 4.0:
      scale.assign(scale * 0.5)
    total -= rows * scale / 4
  return tf.reduce_sum(total)


def _in_elements(rows, scale, weight):
  """Writes with an operation that does not name the type of the variable."""
  total = tf.zeros_like(rows)
  for _ in tf.range(3):
    scale[...].assign(scale * 0.5 + weight)
    total += rows * scale
  weight.assign_add(scale)
  return tf.reduce_sum(total)


class OneCopyTest(tf_case.TestCase):
  @parameterized.product(
    create=(_ring, _central),
    program=(_in_branch, _in_loop, _in_elements),
    is_outside=(True, False),
  )
  def test_reads_and_writes_in_control_flow(self, create, program, is_outside):
    """Checks variables with one copy: of central storage or made outside the scope."""

    def run(strategy):
      scope = contextlib.nullcontext if is_outside else strategy.scope
      with scope():
        scale = tf.Variable(2.0)
      with strategy.scope():
        weight = tf.Variable(1.0)
      data = tf.data.Dataset.range(1, 9, output_type=tf.float32).batch(6)
      step = tf.function if strategy is one_device else strategy.step
      step = step(lambda rows: program(rows, scale, weight))
      results = [
        float(step(batch))
        for batch in strategy.experimental_distribute_dataset(data)
      ]
      copies = strategy.experimental_local_results(weight)
      return results, {float(w) for w in copies}, float(scale)

    one_device = tf.distribute.get_strategy()
    self.assertEqual(run(create()), run(one_device))

  def test_loop_that_reads_and_writes_a_table_is_refused(self):
    """Only one replica writes. Others would read values of later iterations."""
    strategy = _ring()
    table = tf.lookup.experimental.MutableHashTable(tf.int32, tf.float32, 1.0)
    with strategy.scope():
      total = tf.Variable(0.0)

    @strategy.step
    def step():
      for i in tf.range(3):
        found = table.lookup(i)
        table.insert(i, 2.0 * found)
        total.assign_add(tf.reshape(found, []))

    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'reads and writes a table'
    ):
      step()

  def test_random_generator_in_a_branch_is_refused(self):
    strategy = _ring()
    generator = tf.random.Generator.from_seed(1)
    draw = strategy.step(
      lambda: tf.cond(
        tf.constant(True), lambda: generator.normal([]), lambda: 0.0
      )
    )
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'RngReadAndSkip.*runs once'
    ):
      draw()

  @parameterized.parameters(_ring, _central)
  def test_loop_reads_elements_of_a_variable_with_one_copy(self, create):
    strategy = create()
    table = tf.Variable([[1.0], [2.0]])
    with strategy.scope():
      total = tf.Variable(0.0)

    @strategy.step
    def step():
      for i in tf.range(2):
        table.assign(table * 2.0)
        total.assign_add(tf.reduce_sum(tf.gather_nd(table, [[i]])))

    step()
    copies = strategy.experimental_local_results(total)
    self.assertEqual({float(c) for c in copies}, {10.0})


def _apply_in_branch(rank):
  strategy = tfs.MultiWorkerRingStrategy(devices=virtual_devices.names(1))
  with strategy.scope():
    variable, optimizer = keras.Variable([0.0]), keras.optimizers.SGD(1.0)

  def apply():
    optimizer.apply([tf.constant([rank + 1.0])], [variable])
    return 0

  @tf.function
  def step(flag):
    strategy.run(lambda: tf.cond(flag, apply, lambda: 0))

  for flag in (True, False, True):
    step(tf.constant(flag))
  strategy.close()
  return variable.numpy().tolist()


class ReplicaCodeTest(tf_case.TestCase):
  """In `strategy.run`, each replica sees its own rows."""

  @parameterized.product(create=(_ring, _central), where=('branch', 'loop'))
  def test_reduction_in_control_flow_is_refused(self, create, where):
    strategy = create()
    with strategy.scope():
      variable, optimizer = keras.Variable([1.0]), keras.optimizers.SGD(1.0)
      optimizer.build([variable])

    def apply(i):
      optimizer.apply([tf.ones([1])], [variable])
      return [i + 1]

    def replica_fn():
      if where == 'branch':
        tf.cond(tf.constant(True), lambda: apply(0), lambda: [0])
      else:
        tf.while_loop(lambda i: i < 2, apply, [0])

    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError,
      'optimizer.apply.*a loop.*strategy.step',
    ):
      tf.function(lambda: strategy.run(replica_fn))()
    self.assertAllEqual(variable.numpy(), [1.0])

  def test_workers_with_one_device_reduce_in_a_branch(self):
    self.assertEqual(processes.run_workers(_apply_in_branch, 2), [[-6.0]] * 2)

  @parameterized.parameters('step', 'run')
  def test_unbuilt_loss_scale_uses_gradients_of_all_replicas(self, method):
    strategy = _ring()
    with strategy.scope():
      variable = keras.Variable([0.0])
      optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=8.0, dynamic_growth_steps=1
      )

    def apply(x):
      gradient = optimizer.scale_loss(tf.reduce_sum(x, keepdims=True))
      optimizer.apply([gradient], [variable])

    step = strategy.step(apply)
    if method == 'run':
      step = tf.function(lambda batch: strategy.run(apply, (batch,)))
    x = np.ones([16], np.float32)
    x[9] = np.inf
    data = tf.data.Dataset.from_tensor_slices(x).batch(4)
    for batch in strategy.experimental_distribute_dataset(data):
      step(batch)
    # All replicas skip the third step and halve the scale. Others double it.
    self.assertEqual(float(variable.numpy()[0]), -12.0)
    for copy in optimizer.dynamic_scale.value.values:
      self.assertEqual(float(copy), 32.0)


if __name__ == '__main__':
  tf.test.main()
