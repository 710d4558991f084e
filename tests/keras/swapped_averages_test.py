"""`SwapEMAWeights` finds the averages of an optimizer inside any wrappers."""

import functools

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests import tf_case, tiers, virtual_devices
from tests.programs import common

virtual_devices.configure()

optimizers = keras.optimizers
LossScale = optimizers.LossScaleOptimizer


def _adam(use_ema=True):
  return optimizers.Adam(0.1, use_ema=use_ema, ema_momentum=0.5)


def _by_kind():
  adam, sgd = _adam(), optimizers.SGD(0.1)
  return optimizers.MultiOptimizer(
    lambda v: adam if 'kernel' in v.path else sgd
  )


def _apart(optimizer):
  return tfs.keras.LocalSteps(optimizer, 1, outer=optimizers.SGD(1.0))


def _ring():
  return tfs.create_strategy('ring_mirrored', devices=virtual_devices.names(2))


def _worker():
  return tfs.MultiWorkerRingStrategy(devices=[virtual_devices.name(0)])


def _fit(make_optimizer, strategy=None):
  """Returns the weights and the losses of evaluations."""
  keras.utils.set_random_seed(1)
  with common.scope_of(strategy):
    model = common.linear(3, 2)
    model.compile(make_optimizer(), 'mse')
  x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
  history = common.fit(
    model,
    x,
    x[:, :2] * 3,
    batch_size=8,
    epochs=3,
    validation_split=0.2,
    callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
    shuffle=False,
  )
  return [*model.get_weights(), *history['val_loss']]


@functools.cache
def _bare():
  return _fit(_adam)


class SwappedAveragesTest(tf_case.TestCase):
  @tiers.named_parameters(
    tiers.soak('lazy', lambda o: tfs.keras.LazyRows(o), None),
    ('scaled_lazy', lambda o: LossScale(tfs.keras.LazyRows(o)), None),
    ('scaled', LossScale, _ring),
    tiers.soak('apart', _apart, _worker),
    ('scaled_apart', lambda o: LossScale(_apart(o)), _worker),
  )
  def test_wrapped_optimizer_equals_bare_optimizer(self, wrap, make_strategy):
    strategy = make_strategy and make_strategy()
    found = _fit(lambda: wrap(_adam()), strategy)
    self.assertAllClose(_bare(), found, 1e-6, 1e-6)

  def test_averages_of_one_of_several_optimizers(self):
    found = _fit(lambda: LossScale(_by_kind()), _ring())
    self.assertAllClose(_fit(_by_kind), found, 1e-6, 1e-6)

  def test_optimizer_without_averages_raises(self):
    with self.assertRaisesRegex(ValueError, 'use_ema=False'):
      _fit(lambda: LossScale(_adam(use_ema=False)))


if __name__ == '__main__':
  tf.test.main()
