"""Accumulation, EMA and 16-bit training equal one device's."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import tiers, virtual_devices
from tests.conformance import harness
from tests.conformance.harness import Feature

optimizers = keras.optimizers


def _accumulating(**options):
  return lambda: optimizers.Adam(1e-2, gradient_accumulation_steps=2, **options)


def _averaging(**options):
  return lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, **options)


def _small_steps():
  return optimizers.SGD(0.02)


FEATURES = (
  Feature('accumulation', rows=133, optimizer=_accumulating(), mark=tiers.soak),
  Feature(
    'accumulation_global_clipnorm',
    rows=133,
    optimizer=_accumulating(global_clipnorm=0.05),
  ),
  Feature('ema', rows=69, optimizer=_averaging(), mark=tiers.soak),
  Feature(
    'ema_overwrite',
    rows=69,
    optimizer=_averaging(ema_overwrite_frequency=2),
    mark=tiers.soak,
  ),
  Feature(
    'ema_overwrite_accumulation_steps_per_execution',
    rows=133,
    optimizer=_accumulating(use_ema=True, ema_overwrite_frequency=2),
    compile={'steps_per_execution': 2},
  ),
  Feature(
    'mixed_float16',
    rows=69,
    optimizer=_small_steps,
    policy='mixed_float16',
    tolerance=2e-3,
    mark=tiers.soak,
  ),
  Feature(
    'mixed_float16_global_clipnorm',
    rows=69,
    optimizer=lambda: optimizers.SGD(0.1, global_clipnorm=0.05),
    policy='mixed_float16',
    tolerance=2e-3,
  ),
  Feature(
    'mixed_bfloat16',
    rows=69,
    optimizer=_small_steps,
    policy='mixed_bfloat16',
    tolerance=2e-3,
    mark=tiers.soak,
  ),
)


class OptimizerOptionsTest(harness.ConformanceTest, parameterized.TestCase):
  @tiers.named_parameters(*harness.table(FEATURES))
  def test_equals_one_device(self, case, feature):
    self.assert_feature(case, feature)

  @tiers.named_parameters(
    *harness.table(FEATURES, [harness.CENTRAL_STORAGE_OF_2])
  )
  @pytest.mark.soak
  def test_equals_one_device_with_two(self, case, feature):
    self.assert_feature(case, feature)


def _one_weight():
  return keras.Sequential(
    [
      keras.layers.Input([1]),
      keras.layers.Dense(1, use_bias=False, kernel_initializer='ones'),
    ]
  )


class LossScaleTest(harness.ConformanceTest, parameterized.TestCase):
  """An overflow that one replica alone sees is everybody's overflow."""

  @tiers.product(
    [{'case': c} for c in harness.STRATEGIES],
    bad_replica=(tiers.soak(0), 1, 3),
  )
  def test_overflow_on_one_replica_skips_the_step_everywhere(
    self, case, bad_replica
  ):
    strategy = case.create()
    with strategy.scope():
      model = _one_weight()
      optimizer = optimizers.LossScaleOptimizer(
        optimizers.SGD(0.5), initial_scale=8.0
      )
      model.compile(optimizer, 'mse')
    x = np.full([8, 1], 0.5, np.float32)
    y = np.zeros([8, 1], np.float32)
    good = model.fit(x, y, batch_size=8, epochs=1, verbose=0, shuffle=False)
    after_good = model.get_weights()[0].copy()
    x[2 * bad_replica] = np.inf
    model.fit(x, y, batch_size=8, epochs=1, verbose=0, shuffle=False)
    self.assertTrue(np.isfinite(good.history['loss'][0]))
    # One finite step of d/dw mean((w/2)^2) = w/2, then one that was skipped.
    self.assertAllClose(after_good, [[0.75]])
    self.assertAllClose(model.get_weights()[0], [[0.75]])
    self.assertAllEqual(optimizer.dynamic_scale.numpy(), 4.0)
    for variable in (optimizer.dynamic_scale, optimizer.step_counter):
      for copy in variable.value.values:
        self.assertAllEqual(copy.numpy(), variable.numpy())

  def test_two_dynamic_scales_are_refused(self):
    strategy = tfs.MultiWorkerRingStrategy(devices=virtual_devices.names(2))
    with strategy.scope(), harness.dtype_policy('mixed_float16'):
      model = _one_weight()
      optimizer = optimizers.LossScaleOptimizer(optimizers.SGD(0.1))
      model.compile(tfs.keras.LocalSteps(optimizer, 2), 'mse')
    x = np.ones([8, 1], np.float32)
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'one LossScaleOptimizer'
    ):
      model.fit(x, x, batch_size=8, verbose=0)


if __name__ == '__main__':
  tf.test.main()
