"""Differences above 1e-6 from one device are float32 rounding."""

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests import virtual_devices

virtual_devices.configure()


def _weights(dtype, replicas):
  """Returns the weights after 80 Adam steps. Gradients are means of 3 batches."""
  keras.backend.clear_session()
  keras.backend.set_floatx(dtype)
  rng = np.random.default_rng(0)
  x, y = (rng.normal(size=[640, n]).astype(dtype) for n in (16, 4))
  strategy = tf.distribute.get_strategy()
  if replicas > 1:
    names = virtual_devices.names(replicas)
    strategy = tfs.create_strategy('ring_mirrored', devices=names)
  with strategy.scope():
    model = keras.Sequential(
      [
        keras.Input([16]),
        keras.layers.Dense(32, 'tanh'),
        keras.layers.Dense(4),
      ]
    )
    adam = keras.optimizers.Adam(1e-2, gradient_accumulation_steps=3)
    model.compile(adam, 'mse', steps_per_execution=8)
  # Uses the same numbers in both dtypes.
  model.set_weights(
    [np.float32(0.3 * rng.normal(size=w.shape)) for w in model.get_weights()]
  )
  model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
  return np.concatenate([np.ravel(w) for w in model.get_weights()])


class RoundingTest(tf.test.TestCase):
  def tearDown(self):
    keras.backend.set_floatx('float32')
    keras.config.set_dtype_policy('float32')
    super().tearDown()

  def test_accumulation_with_adam_differs_only_by_rounding(self):
    exact, one, several = (
      _weights(*how) for how in (('float64', 1), ('float32', 1), ('float32', 4))
    )
    # A wrong algorithm would also differ in float64.
    self.assertAllClose(_weights('float64', 4), exact, rtol=0, atol=1e-12)
    error_of_one = np.max(np.abs(one - exact))
    self.assertLess(np.max(np.abs(several - exact)), 3 * error_of_one)
    self.assertLess(np.max(np.abs(several - one)), 5e-6)


if __name__ == '__main__':
  tf.test.main()
