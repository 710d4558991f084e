"""Dropout draws other masks on each replica, from one state that is saved."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import tiers, virtual_devices
from tests.conformance import harness


class Mask(keras.layers.Layer):
  """Outputs the mask that dropout draws, one row a row."""

  def __init__(self):
    super().__init__(name='mask')
    self.dropout = keras.layers.Dropout(0.5, seed=3)

  def call(self, x, training=None):
    return self.dropout(tf.ones_like(x), training=training)


class DropoutTest(harness.ConformanceTest, parameterized.TestCase):
  def _masks(self, strategy, steps):
    with harness.scope_of(strategy):
      layer = Mask()
      layer(tf.ones([1, 64]))

    @tf.function
    def draw():
      return strategy.run(lambda: layer(tf.ones([1, 64]), training=True))

    drawn = []
    for _ in range(steps):
      drawn.append(
        [v.numpy() for v in strategy.experimental_local_results(draw())]
      )
    return layer, np.array(drawn)

  @tiers.named_parameters(*harness.every())
  def test_masks_differ_between_replicas_and_steps(self, case):
    layer, masks = self._masks(case.create(), steps=3)
    flat = masks.reshape([-1, 64])
    for i in range(len(flat)):
      for j in range(i):
        # Independent masks of 64 agree in 32 places, give or take 4.
        self.assertBetween(int(np.sum(flat[i] == flat[j])), 12, 52)
    copies = layer.dropout.seed_generator.state.value.values
    self.assertLen(copies, masks.shape[1])
    for copy in copies:
      np.testing.assert_array_equal(copy.numpy(), copies[0].numpy())

  @tiers.named_parameters(*harness.every())
  def test_first_replica_draws_what_one_device_draws(self, case):
    one = tf.distribute.OneDeviceStrategy(virtual_devices.name(0))
    _, want = self._masks(one, steps=2)
    _, got = self._masks(case.create(), steps=2)
    np.testing.assert_array_equal(want[:, 0], got[:, 0])


if __name__ == '__main__':
  tf.test.main()
