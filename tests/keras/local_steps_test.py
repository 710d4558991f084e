"""LocalSteps on one worker: its errors, delegation and saving."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import tf_case, virtual_devices
from tests.programs import common
from tf_strategies.keras import local_steps

virtual_devices.configure()

LocalSteps = tfs.keras.LocalSteps
SGD = keras.optimizers.SGD
LossScale = keras.optimizers.LossScaleOptimizer


def _ring():
  return tfs.MultiWorkerRingStrategy(devices=[virtual_devices.name(0)])


def _model(make_optimizer, strategy=None):
  keras.utils.set_random_seed(1)
  strategy = strategy or _ring()
  with strategy.scope():
    model = common.linear(3, 2)
    model.compile(make_optimizer(), 'mse')
  return model


def _data(rows=24):
  x = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
  return x, x[:, :2] * 3


def _fit(model, **options):
  model.fit(*_data(), batch_size=4, shuffle=False, verbose=0, **options)


class RefusalTest(tf_case.TestCase):
  @parameterized.named_parameters(
    ('zero', lambda: LocalSteps('sgd', 0), 'at least 1, got every=0'),
    ('misspelled', lambda: LocalSteps('adamm', 2), "optimizer='adamm'"),
    ('option', lambda: LocalSteps('sgd', 2, clipnorm=1.0), 'clipnorm'),
    (
      'inside_local_steps',
      lambda: LocalSteps(LossScale(LocalSteps('sgd', 2)), 2),
      r'wraps no other, got LocalSteps\(LossScale',
    ),
    (
      'around_another_wrapper',
      lambda: LocalSteps(tfs.keras.LazyRows('sgd'), 2),
      r'wraps no other, got LocalSteps\(LazyRows',
    ),
    (
      'outer_wraps',
      lambda: LocalSteps('sgd', 2, outer=LossScale(SGD())),
      'wraps no other, got outer=LossScaleOptimizer',
    ),
    (
      'outer_average',
      lambda: LocalSteps('sgd', 2, outer=SGD(1.0, use_ema=True)),
      'use_ema=True.*inner',
    ),
    (
      'outer_of_several',
      lambda: LocalSteps('sgd', 2, keras.optimizers.MultiOptimizer(SGD)),
      r'one rule.*outer=MultiOptimizer.*SGD\(1.0\)',
    ),
    ('one_for_both', lambda: _twice(SGD()), 'two optimizers, got the same'),
  )
  def test_invalid_arguments_are_refused(self, make, message):
    with self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, message):
      make()

  @parameterized.named_parameters(
    (
      'mirrored',
      lambda: tfs.create_strategy('ring_mirrored'),
      'a ring of several workers.*LocalSteps under .*Strategy.*'
      "a worker for each device and use .*'multi_worker_ring'",
    ),
    (
      'sharded',
      lambda: tfs.MultiWorkerRingStrategy(
        devices=[virtual_devices.HOST], shard_optimizer_state=True
      ),
      'without shard_optimizer_state, got LocalSteps under '
      '.*leave out shard_optimizer_state',
    ),
  )
  def test_unsupported_strategy_is_refused(self, make, message):
    with (
      make().scope(),
      self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, message),
    ):
      LocalSteps('sgd', 2)

  def test_elastic_strategy_is_refused(self):
    def train(job):
      with job.strategy.scope():
        LocalSteps('sgd', 2)

    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError,
      'that stay the same.*LocalSteps under ElasticRingStrategy.*'
      "'multi_worker_ring'.*could not repeat",
    ):
      tfs.elastic.run(train, tfs.ElasticOptions())

  def test_use_without_a_strategy_is_refused(self):
    optimizer, variable = LocalSteps('sgd', 2), keras.Variable([1.0])
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'LocalSteps in no strategy'
    ):
      optimizer.apply([tf.constant([1.0])], [variable])

  @parameterized.parameters(
    ('another', 'Adam beside LocalSteps'),
    ('eager', 'eagerly.*run_eagerly=True'),
  )
  def test_unsupported_model_is_refused(self, kind, message):
    model = _model(lambda: LocalSteps('sgd', 2))
    if kind == 'eager':
      model.run_eagerly = True
    else:
      with model.distribute_strategy.scope():
        model.another = keras.optimizers.Adam()
    with self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, message):
      _fit(model)

  @parameterized.parameters('run', 'step')
  def test_step_without_the_optimizer_is_refused(self, call):
    strategy = tfs.MultiWorkerRingStrategy(devices=virtual_devices.names(2))
    model = _model(lambda: LocalSteps('sgd', 2), strategy)

    def apply():
      gradients = [tf.ones([3, 2]), tf.ones([2])]
      model.optimizer.apply(gradients, model.trainable_variables)

    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, r'strategy.step\(fn, \[optimizer\]\)'
    ):
      strategy.run(apply) if call == 'run' else strategy.step(apply)()


def _twice(optimizer):
  return LocalSteps(optimizer, 2, outer=optimizer)


class LocalStepsTest(tf_case.TestCase):
  @pytest.mark.smoke
  def test_synchronizes_every_n_steps_and_at_the_end(self):
    # Each epoch has six steps, and synchronizes after the fourth and at its end.
    model = _model(lambda: LocalSteps('sgd', 4))
    _fit(model, epochs=3)
    optimizer = model.optimizer
    self.assertEqual(int(optimizer.outer.iterations), 6)
    self.assertEqual(int(optimizer.iterations), 18)
    self.assertEqual(int(optimizer.steps), 0)

  def test_synchronizes_before_weights_are_read(self):
    model = _model(lambda: LocalSteps('sgd', 8))
    x, y = _data()
    calls = {
      0: lambda: model.evaluate(x, y, verbose=0),
      2: lambda: model.predict(x, verbose=0),
      4: lambda: model.test_on_batch(x, y),
    }

    def read(batch, logs):
      if batch in calls:
        before = model.get_weights()
        calls[batch]()
        self.assertEqual(int(model.optimizer.steps), 0)
        self.assertNotAllClose(before, model.get_weights())

    _fit(
      model, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=read)]
    )
    # Only after these three steps and at the end.
    self.assertEqual(int(model.optimizer.outer.iterations), 4)

  def test_weights_set_between_fits_become_the_anchor(self):
    model = _model(lambda: LocalSteps(SGD(0.0), 4))
    _fit(model)
    other = [w + 1 for w in model.get_weights()]
    model.set_weights(other)
    _fit(model)
    self.assertAllClose(model.get_weights(), other, rtol=0, atol=1e-6)

  def test_frozen_weights_are_not_averaged(self):
    model = _model(lambda: LocalSteps('sgd', 2))
    with model.distribute_strategy.scope():
      frozen = keras.layers.Dense(3, name='frozen')
      frozen.trainable = False
      norm = keras.layers.BatchNormalization()
      whole = keras.Sequential([keras.Input([3]), frozen, norm, model])
    names = [v.name for v in local_steps.moving_statistics(whole)]
    self.assertEqual(names, ['moving_mean', 'moving_variance'])

  def test_attributes_are_delegated_to_the_inner_optimizer(self):
    inner = keras.optimizers.Adam(0.25)
    optimizer = LocalSteps(inner, 3)
    optimizer.learning_rate = 0.5
    self.assertEqual(float(inner.learning_rate), 0.5)
    optimizer.loss_scale_factor = 4.0
    self.assertEqual(inner.loss_scale_factor, 4.0)
    self.assertEqual(float(optimizer.scale_loss(2.0)), 8.0)
    self.assertIs(optimizer.iterations, inner.iterations)

  def test_saved_model(self):
    def optimizer():
      outer = SGD(0.5, momentum=0.125)
      return LocalSteps(keras.optimizers.Adam(0.01), 3, outer, name='mine')

    model = _model(optimizer)
    _fit(model)
    path = self.path('model.keras')
    model.save(path)
    # Loads outside a strategy, to predict.
    alone = keras.models.load_model(path)
    x, _ = _data()
    self.assertAllClose(alone(x), model(x))
    with _ring().scope():
      again = keras.models.load_model(path)
    before, after = model.optimizer, again.optimizer
    for a, b in zip(before.variables, after.variables, strict=True):
      self.assertAllEqual(a, b)
    self.assertEqual(before.get_config(), after.get_config())
    self.assertEqual((after.every, after.outer.momentum), (3, 0.125))


if __name__ == '__main__':
  tf.test.main()
