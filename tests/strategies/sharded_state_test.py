"""Optimizer state that is sharded across the devices of one process."""

import numpy as np
import tensorflow as tf

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


class ShardedStateTest(tf.test.TestCase):
  """Tests other than the optimizers, which `programs_test.py` covers."""

  def assert_equal_models(self, one, other):
    """Checks that weights and optimizer state are equal except for rounding."""
    pairs = zip(models.state(one), models.state(other), strict=True)
    for mine, theirs in pairs:
      for a, b in zip(mine, theirs, strict=True):
        self.assertAllClose(a, b, 1e-6, 1e-6)

  def test_gradient_that_is_not_finite_is_skipped(self):
    def data():
      x, y = models.numbers()
      x[20] = np.inf  # In one replica's part of the second batch.
      return x, y

    one = models.train(models.OPTIMIZERS['loss_scale'], data=data)
    model = models.train(models.OPTIMIZERS['loss_scale'], sharded(), data=data)
    self.assert_equal_models(one, model)
    self.assertTrue(np.isfinite(model.get_weights()[0]).all())
    # The second step halves the scale, and two more double it.
    self.assertEqual(float(model.optimizer.dynamic_scale.numpy()), 8.0)

  def test_each_device_stores_its_share(self):
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

  def test_reads_and_writes_use_the_whole_value(self):
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

  def test_checkpoint_continues_on_other_devices(self):
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
      self.assert_equal_models(loaded, model)

  def test_state_of_another_shape_is_named(self):
    with self.assertLogs(level='WARNING') as logs:
      models.train(models.OPTIMIZERS['adafactor'], sharded())
    found = [m for m in logs.output if 'every replica has' in m]
    self.assertLen(found, 1)
    self.assertIn('Adafactor', found[0])

  def test_strategy_run_is_refused(self):
    strategy = sharded()
    with strategy.scope():
      model = models.dense_model()
      optimizer = models.OPTIMIZERS['adam']()

    def replica():
      variables = model.trainable_variables
      optimizer.apply([tf.ones_like(v) for v in variables], variables)

    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'strategy.step'):
      tf.function(lambda: strategy.run(replica))()


if __name__ == '__main__':
  tf.test.main()
