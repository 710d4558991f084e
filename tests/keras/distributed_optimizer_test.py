"""DistributedOptimizer: what it refuses, what it hands on, what it weighs."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from absl.testing import parameterized

import tf_strategies as tfs
from tests import tiers, virtual_devices

virtual_devices.configure_logical_cpus()

optimizers = keras.optimizers
DistributedOptimizer = tfs.keras.DistributedOptimizer


def _strategy(replicas=4):
  return tfs.RingMirroredStrategy([f'CPU:{i}' for i in range(replicas)])


def _model():
  return keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(2)])


def _fit(strategy, optimizer, rows=16, **compile_options):
  keras.utils.set_random_seed(1)
  with strategy.scope():
    model = _model()
    model.compile(optimizer(), 'mse', **compile_options)
  x = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
  model.fit(x, x[:, :2] * 3, batch_size=8, shuffle=False, verbose=0)
  return model


class RefusalTest(tf.test.TestCase, parameterized.TestCase):
  @tiers.named_parameters(
    tiers.full('clipnorm', {'clipnorm': 0.25}, 'clipnorm=0.25'),
    tiers.full('clipvalue', {'clipvalue': 0.5}, 'clipvalue=0.5'),
    ('global_clipnorm', {'global_clipnorm': 1.5}, 'global_clipnorm=1.5'),
    tiers.full(
      'accumulated',
      {'clipnorm': 0.25, 'gradient_accumulation_steps': 2},
      'clipnorm=0.25',
    ),
  )
  def test_clipping_without_the_wrapper_is_refused(self, options, named):
    for run_eagerly in (False, True):
      with self.assertRaises(tfs.errors.UnsupportedOptionError) as caught:
        _fit(
          _strategy(),
          lambda: optimizers.SGD(0.1, **options),
          run_eagerly=run_eagerly,
        )
      self.assertIn(named, str(caught.exception))
      self.assertIn('tfs.keras.DistributedOptimizer', str(caught.exception))

  @pytest.mark.full
  def test_clipping_inside_a_loss_scale_is_refused(self):
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'clipnorm=0.25'
    ):
      _fit(
        _strategy(),
        lambda: optimizers.LossScaleOptimizer(
          optimizers.SGD(0.1, clipnorm=0.25)
        ),
      )

  def test_clipping_in_a_custom_loop_is_refused_before_any_update(self):
    strategy = _strategy()
    with strategy.scope():
      variable = tf.Variable(2.0)
      optimizer = optimizers.SGD(0.1, clipnorm=0.5)

    @tf.function
    def step():
      strategy.run(lambda: optimizer.apply([tf.constant(1.0)], [variable]))

    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'clipnorm=0.5'
    ):
      step()
    self.assertAllEqual(variable.numpy(), 2.0)

  @pytest.mark.full
  def test_one_replica_may_clip_without_the_wrapper(self):
    model = _fit(_strategy(1), lambda: optimizers.SGD(0.1, clipnorm=0.25))
    self.assertEqual(model.optimizer.iterations.numpy(), 2)

  def test_bad_arguments(self):
    for arguments, message in (
      (((DistributedOptimizer('sgd'),), {}), 'one wrapper'),
      ((('sgd',), {'weighting': 'batches'}), "weighting='batches'"),
      ((('sgd',), {'clipnorm': 1.0}), 'clipnorm'),
    ):
      args, kwargs = arguments
      with self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, message):
        DistributedOptimizer(*args, **kwargs)

  @pytest.mark.full
  def test_foreign_strategy_is_refused(self):
    strategy = tf.distribute.MirroredStrategy(['CPU:0', 'CPU:1'])
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'under MirroredStrategy'
    ):
      _fit(strategy, lambda: DistributedOptimizer('sgd'))

  def test_cross_replica_context_is_refused(self):
    strategy = _strategy()
    with strategy.scope():
      variable = tf.Variable(1.0)
      optimizer = DistributedOptimizer('sgd')
      with self.assertRaisesRegex(
        tfs.errors.UnsupportedOptionError, 'strategy.run'
      ):
        optimizer.apply([tf.constant(1.0)], [variable])

  @tiers.parameters('sum', tiers.full('mean_with_sample_weight'))
  def test_loss_reductions_that_rows_cannot_weigh_are_refused(self, reduction):
    strategy = _strategy()
    with strategy.scope():
      model = _model()
      model.compile(
        DistributedOptimizer('sgd'),
        keras.losses.MeanSquaredError(reduction=reduction),
      )
    with self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, reduction):
      model.fit(np.ones([8, 3]), np.ones([8, 2]), batch_size=8, verbose=0)

  @pytest.mark.full
  def test_sum_reduction_with_weighting_none_equals_one_device(self):
    weights = []
    for strategy in (_strategy(), None):
      keras.utils.set_random_seed(1)
      with strategy.scope() if strategy else tf.name_scope(''):
        model = _model()
        optimizer = optimizers.SGD(0.01)
        if strategy:
          optimizer = DistributedOptimizer(optimizer, weighting='none')
        model.compile(optimizer, keras.losses.MeanSquaredError(reduction='sum'))
      x = np.random.default_rng(0).normal(size=(13, 3)).astype(np.float32)
      model.fit(x, x[:, :2], batch_size=8, shuffle=False, verbose=0)
      weights.append(model.get_weights())
    for a, b in zip(*weights, strict=True):
      self.assertAllClose(a, b, 0, 1e-6)


class MaskTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters((True, 1), (False, 0))
  def test_a_mask_that_reaches_the_loss_warns_once(self, mask, warnings):
    with _strategy(2).scope():
      model = keras.Sequential(
        [
          keras.layers.Input([5], dtype='int32'),
          keras.layers.Embedding(9, 4, mask_zero=mask),
          keras.layers.Dense(1),
        ]
      )
      model.compile(DistributedOptimizer('sgd'), 'mse')
    x = np.arange(20).reshape([4, 5]) % 9
    with self.assertLogs('absl', 'INFO') as logs:
      logging.info('The run starts.')
      for _ in range(2):
        model.fit(x, x[..., None], batch_size=4, verbose=0)
    self.assertLen([m for m in logs.output if 'A mask' in m], warnings)


class MutationTest(tf.test.TestCase):
  """What the wrapper does is needed: without it these results are others."""

  def _weights(self, optimizer, rows, replicas):
    return _fit(_strategy(replicas), optimizer, rows).get_weights()[0]

  @pytest.mark.full
  def test_unweighted_rows_are_another_result(self):
    def optimizer(weighting):
      return lambda: DistributedOptimizer(
        optimizers.SGD(0.1), weighting=weighting
      )

    one = self._weights(lambda: optimizers.SGD(0.1), 13, 1)
    rows = self._weights(optimizer('rows'), 13, 4)
    none = self._weights(optimizer('none'), 13, 4)
    self.assertAllClose(one, rows, 0, 1e-6)
    self.assertGreater(np.abs(one - none).max(), 1e-3)

  @pytest.mark.soak
  def test_unwrapped_uneven_rows_are_another_result(self):
    one = self._weights(lambda: optimizers.SGD(0.1), 13, 1)
    unwrapped = self._weights(lambda: optimizers.SGD(0.1), 13, 4)
    self.assertGreater(np.abs(one - unwrapped).max(), 1e-3)


class DelegationTest(tf.test.TestCase, parameterized.TestCase):
  def test_attributes_are_the_inner_optimizers(self):
    inner = optimizers.Adam(0.25, loss_scale_factor=8.0)
    optimizer = DistributedOptimizer(inner)
    optimizer.learning_rate = 0.5
    self.assertAllClose(inner.learning_rate.numpy(), 0.5)
    self.assertEqual(optimizer.loss_scale_factor, 8.0)
    self.assertAllClose(optimizer.scale_loss(tf.constant(2.0)), 16.0)
    optimizer.build([keras.Variable([1.0, 2.0])])
    self.assertEqual(
      [v.path for v in optimizer.variables], [v.path for v in inner.variables]
    )
    self.assertIs(optimizer.iterations, inner.iterations)

  def test_outside_of_a_strategy_it_is_the_inner_optimizer(self):
    results = []
    for wrap in (lambda o: o, DistributedOptimizer):
      variable = keras.Variable([3.0, 4.0])
      optimizer = wrap(optimizers.SGD(1.0, clipnorm=1.0))
      optimizer.apply([tf.constant([3.0, 4.0])], [variable])
      results.append(variable.numpy())
    self.assertAllClose(results[0], [2.4, 3.2])
    self.assertAllClose(results[0], results[1])

  def test_configuration_round_trip(self):
    optimizer = DistributedOptimizer(
      optimizers.AdamW(0.125, clipnorm=2.0), weighting='none', name='mine'
    )
    copy = keras.saving.deserialize_keras_object(
      keras.saving.serialize_keras_object(optimizer)
    )
    self.assertIsInstance(copy, DistributedOptimizer)
    self.assertIsInstance(copy.inner_optimizer, optimizers.AdamW)
    self.assertEqual(copy.get_config(), optimizer.get_config())
    self.assertEqual(copy.inner_optimizer.clipnorm, 2.0)
    self.assertEqual(copy.weighting, 'none')

  @pytest.mark.full
  def test_missing_gradients_stay_missing(self):
    strategy = _strategy()
    with strategy.scope():
      used, unused = keras.Variable(1.0), keras.Variable(1.0)
      optimizer = DistributedOptimizer(optimizers.SGD(1.0))

    def replica_fn():
      optimizer.apply([tf.constant(0.125), None], [used, unused])

    strategy.run(tf.function(replica_fn))
    self.assertAllClose(used.numpy(), 0.5)
    self.assertAllClose(unused.numpy(), 1.0)

  def test_learning_rate_schedule_and_callback(self):
    schedule = optimizers.schedules.PiecewiseConstantDecay([1], [0.1, 0.0])
    model = _fit(
      _strategy(), lambda: DistributedOptimizer(optimizers.SGD(schedule))
    )
    self.assertAllClose(model.optimizer.learning_rate, 0.0)


if __name__ == '__main__':
  tf.test.main()
