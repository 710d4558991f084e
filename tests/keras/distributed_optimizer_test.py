"""DistributedOptimizer: what it refuses, what it hands on, what it weighs."""

import zipfile
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import virtual_devices
from tf_strategies.spmd import site

virtual_devices.configure()

optimizers = keras.optimizers
DistributedOptimizer = tfs.keras.DistributedOptimizer


def _strategy(replicas=4):
  return tfs.RingMirroredStrategy(virtual_devices.names(replicas))


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
  def test_bad_arguments(self):
    for arguments, message in (
      (((DistributedOptimizer('sgd'),), {}), 'one wrapper'),
      (((None,), {}), 'optimizer=None'),
      ((('sgd',), {'weighting': 'batches'}), "weighting='batches'"),
      ((('sgd',), {'clipnorm': 1.0}), 'clipnorm'),
    ):
      args, kwargs = arguments
      with self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, message):
        DistributedOptimizer(*args, **kwargs)

  def test_foreign_strategy_is_refused(self):
    strategy = tf.distribute.MirroredStrategy(
      [virtual_devices.name(0), virtual_devices.name(1)]
    )
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'under MirroredStrategy'
    ):
      _fit(strategy, lambda: DistributedOptimizer('sgd'))

  @parameterized.product(
    count=(1, 4), make=(DistributedOptimizer, optimizers.get)
  )
  def test_cross_replica_context_is_refused(self, count, make):
    strategy = tfs.create_strategy(
      'ring_mirrored', devices=virtual_devices.names(count)
    )
    with strategy.scope():
      variable = tf.Variable(1.0)
      optimizer = make('sgd')
      with self.assertRaisesRegex(
        tfs.errors.UnsupportedOptionError, 'strategy.run'
      ):
        optimizer.apply([tf.constant(1.0)], [variable])

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


class CheckpointTest(tf.test.TestCase, parameterized.TestCase):
  """State that was saved with the wrapper loads without it, and the reverse."""

  def _trained(self, wrap):
    keras.utils.set_random_seed(2)
    return _fit(_strategy(2), lambda: wrap(optimizers.Adam(0.1)))

  def assert_same_optimizer(self, one, other):
    for a, b in zip(one.variables, other.variables, strict=True):
      self.assertAllEqual(a.numpy(), b.numpy())
    self.assertGreater(one.iterations.numpy(), 0)

  @parameterized.parameters(True, False)
  def test_checkpoints(self, was_wrapped):
    wraps = [lambda o: o, DistributedOptimizer]
    wrap_saved, wrap_loaded = reversed(wraps) if was_wrapped else wraps
    saved = self._trained(wrap_saved)
    path = tf.train.Checkpoint(model=saved, optimizer=saved.optimizer).save(
      self.create_tempdir().full_path + '/c'
    )
    for is_built in (True, False):
      with _strategy(2).scope():
        model = _model()
        model.compile(wrap_loaded(optimizers.Adam(0.1)), 'mse')
        if is_built:
          model.optimizer.build(model.trainable_variables)
        status = tf.train.Checkpoint(
          model=model, optimizer=model.optimizer
        ).restore(path)
        if not is_built:
          model.optimizer.build(model.trainable_variables)
      status.assert_existing_objects_matched()
      self.assert_same_optimizer(saved.optimizer, model.optimizer)

  @parameterized.parameters((None, 'Adam'), ('mixed_float16', 'LossScale'))
  def test_saved_model_does_not_name_the_wrapper(self, policy, kind):
    keras.config.set_dtype_policy(policy or 'float32')
    try:
      saved = self._trained(DistributedOptimizer)
      path = self.create_tempdir().full_path + '/m.keras'
      saved.save(path)
      with zipfile.ZipFile(path) as files:
        self.assertNotIn(b'DistributedOptimizer', files.read('config.json'))
      loaded = keras.models.load_model(path)
    finally:
      keras.config.set_dtype_policy('float32')
    self.assertIn(kind, type(loaded.optimizer).__name__)
    self.assert_same_optimizer(saved.optimizer, loaded.optimizer)


class MutationTest(tf.test.TestCase):
  """In a model's step no weighting is needed, but that every replica counts."""

  def _weights(self, optimizer, rows, replicas):
    return _fit(_strategy(replicas), optimizer, rows).get_weights()[0]

  @pytest.mark.smoke
  def test_a_replica_that_is_left_out_is_another_result(self):
    def optimizer(weighting):
      return lambda: DistributedOptimizer(
        optimizers.SGD(0.1), weighting=weighting
      )

    one = self._weights(lambda: optimizers.SGD(0.1), 13, 1)
    rows = self._weights(optimizer('rows'), 13, 4)
    none = self._weights(optimizer('none'), 13, 4)
    self.assertAllClose(one, rows, 0, 1e-6)
    self.assertAllClose(one, none, 0, 1e-6)

    def leave_out(site, tensors):
      return [tf.zeros_like(t) if site.replica == 3 else t for t in tensors]

    with mock.patch.object(site.Site, 'contributions', leave_out):
      mutated = self._weights(optimizer('rows'), 13, 4)
    self.assertGreater(np.abs(one - mutated).max(), 1e-3)


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

  @pytest.mark.smoke
  def test_learning_rate_schedule_and_callback(self):
    schedule = optimizers.schedules.PiecewiseConstantDecay([1], [0.1, 0.0])
    model = _fit(
      _strategy(), lambda: DistributedOptimizer(optimizers.SGD(schedule))
    )
    self.assertAllClose(model.optimizer.learning_rate, 0.0)


if __name__ == '__main__':
  tf.test.main()
