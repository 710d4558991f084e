"""Optimizer state that the devices of one process divide among themselves."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import virtual_devices
from tests.strategies import sharded_models as models
from tf_strategies import errors

virtual_devices.configure()


def sharded(devices=3):
  return tfs.create_strategy(
    'ring_mirrored',
    devices=virtual_devices.names(devices),
    shard_optimizer_state=True,
  )


def assert_equal_models(test, one, other):
  """Checks that weights and optimizer state equal the results of one device."""
  for mine, theirs in zip(models.state(one), models.state(other), strict=True):
    test.assertLen(mine, len(theirs))
    for a, b in zip(mine, theirs, strict=True):
      test.assertAllClose(a, b, 1e-6, 1e-6)


class ExactTest(tf.test.TestCase):
  """`programs_test.py` covers every optimizer with `sharded`; this class covers
  the rest.
  """

  def test_a_gradient_that_is_not_finite(self):
    def data():
      x, y = models.numbers()
      x[20] = np.inf  # In one replica's part of the second batch.
      return x, y

    one = models.train(models.OPTIMIZERS['loss_scale'], data=data)
    model = models.train(models.OPTIMIZERS['loss_scale'], sharded(), data=data)
    assert_equal_models(self, one, model)
    self.assertTrue(np.isfinite(model.get_weights()[0]).all())
    # The second step halves it, and two more double it.
    self.assertEqual(float(model.optimizer.dynamic_scale.numpy()), 8.0)


class StorageTest(tf.test.TestCase, parameterized.TestCase):
  def test_bytes_of_a_device(self):
    devices = 3
    model = models.train(
      models.OPTIMIZERS['plain'], sharded(devices), model=models.large_model
    )
    by_device = [0] * devices
    for variable in model.optimizer.variables:
      for i, copy in enumerate(variable.value.values):
        self.assertIn(virtual_devices.name(i)[1:], copy.device)
        by_device[i] += copy.read_value().numpy().nbytes
    _, whole = models.stored_bytes(model)
    for stored in by_device:
      self.assertLess(stored, whole * (1 / devices + 0.05))
      self.assertGreater(stored, whole / devices)

  def test_reads_and_writes_are_of_the_whole(self):
    model = models.train(models.OPTIMIZERS['adam'], sharded())
    slot = model.optimizer.variables[2]
    value = np.arange(7 * 33, dtype='float32').reshape(7, 33)
    slot.assign(value)
    self.assertAllEqual(slot.numpy(), value)
    slot.assign_add(value)
    slot.value.assign_sub(3 * value)
    self.assertAllEqual(slot.numpy(), -value)
    self.assertIn('3 pieces', repr(slot.value))
    # The pieces contain the elements in order, with padding at the end.
    self.assertAllEqual(
      np.concatenate([c.numpy() for c in slot.value.values]), -value.ravel()
    )

  def test_checkpoint_goes_on_elsewhere(self):
    x, y = models.numbers()
    model = models.train(models.OPTIMIZERS['adam'], sharded(2))
    path = tf.train.Checkpoint(model=model).write(
      self.create_tempdir().full_path
    )
    model.fit(x, y, batch_size=13, shuffle=False, verbose=0)
    for strategy in (tf.distribute.get_strategy(), sharded(3)):
      with strategy.scope():
        loaded = models.dense_model()
        loaded.compile(models.OPTIMIZERS['adam'](), 'mse')
        loaded.optimizer.build(loaded.trainable_variables)
        tf.train.Checkpoint(model=loaded).restore(path).expect_partial()
      loaded.fit(x, y, batch_size=13, shuffle=False, verbose=0)
      assert_equal_models(self, loaded, model)

  def test_state_of_another_shape_is_named(self):
    with self.assertLogs(level='WARNING') as logs:
      models.train(models.OPTIMIZERS['adafactor'], sharded())
    found = [m for m in logs.output if 'every replica has' in m]
    self.assertLen(found, 1)
    self.assertIn('Adafactor', found[0])


class RefusalTest(tf.test.TestCase, parameterized.TestCase):
  def test_loop_of_the_users_own(self):
    strategy = sharded()
    with strategy.scope():
      model = models.dense_model()
      optimizer = models.OPTIMIZERS['adam']()

    @tf.function
    def step():
      def replica():
        variables = model.trainable_variables
        optimizer.apply([tf.ones_like(v) for v in variables], variables)

      strategy.run(replica)

    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'strategy.step'):
      step()

  def test_update_in_a_loop_of_a_step(self):
    strategy = sharded()
    with strategy.scope():
      model = _LoopInStep([keras.Input([7]), keras.layers.Dense(33)])
      model.compile(models.OPTIMIZERS['adam'](), 'mse')
    x, _ = models.numbers()
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'shard_optimizer_state'
    ):
      model.fit(x, np.zeros([len(x), 33], 'float32'), verbose=0)


class _LoopInStep(keras.Sequential):
  def train_step(self, data):
    x, y = data

    def turn(i):
      with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(self(x) - y))
      variables = self.trainable_variables
      self.optimizer.apply(tape.gradient(loss, variables), variables)
      return [i + 1]

    tf.while_loop(lambda i: i < 2, turn, [tf.constant(0)])
    return {}


if __name__ == '__main__':
  tf.test.main()
