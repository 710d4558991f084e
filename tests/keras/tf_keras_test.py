"""tf_keras (Keras 2) models: `fit` raises, custom loops are exact."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import parameter_servers, tiers, virtual_devices

tf_keras = pytest.importorskip('tf_keras')
virtual_devices.configure()

_ROWS, _BATCH = 23, 8  # The last batch has 7 rows for 4 replicas.
_STRATEGIES = {
  'ring': lambda: tfs.RingMirroredStrategy(virtual_devices.names(4)),
  'one_replica': lambda: tfs.RingMirroredStrategy(virtual_devices.names(1)),
  'central': lambda: tfs.CentralStorageStrategy(
    virtual_devices.names(2), virtual_devices.HOST
  ),
  'multi_worker': lambda: tfs.MultiWorkerRingStrategy(
    devices=virtual_devices.names(2)
  ),
}


def _data():
  rng = np.random.default_rng(0)
  x = rng.normal(size=[_ROWS, 3]).astype('float32')
  return x, x @ np.float32([[1], [-2], [3]])


def _model(**options):
  tf_keras.utils.set_random_seed(1)
  model = tf_keras.Sequential(
    [tf_keras.layers.Input([3]), tf_keras.layers.Dense(1)]
  )
  model.compile(tf_keras.optimizers.Adam(0.1), 'mse', **options)
  return model


def _errors_on_servers(mode):
  # Keras 2 predicts only on the chief.
  strategy = tfs.ParameterServerStrategy(mode=mode)
  with strategy.scope():
    model = _model()
  x, y = (tf.constant(array) for array in _data())
  data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).repeat()
  found = []
  for call in (
    lambda: model.fit(data, steps_per_epoch=2, verbose=0),
    lambda: model.evaluate(data, steps=2, verbose=0),
  ):
    try:
      call()
      found.append('')
    except tfs.errors.UnsupportedVersionError as e:
      found.append(str(e))
  return found


def _train(strategy):
  """Returns the weights after a loop over batches. The last batch is uneven."""
  with strategy.scope():
    model = _model()
  data = tf.data.Dataset.from_tensor_slices(_data()).batch(_BATCH)
  data = strategy.experimental_distribute_dataset(data)

  def replica_step(x, y, rows):
    with tf.GradientTape() as tape:
      loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / rows
    variables = model.trainable_variables
    gradients = tape.gradient(loss, variables)
    model.optimizer.apply_gradients(zip(gradients, variables, strict=True))

  @tf.function
  def step(x, y, rows):
    strategy.run(replica_step, args=(x, y, rows))

  for i, (x, y) in enumerate(data):
    step(x, y, float(min(_BATCH, _ROWS - i * _BATCH)))
  return model.get_weights()


class TfKerasTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(
    *[(name, {}) for name in _STRATEGIES],
    ('ring', {'jit_compile': True}),
    ('ring', {'run_eagerly': True}),
    # AutoGraph replaces a ValueError raised in this loop.
    ('ring', {'steps_per_execution': 2}),
  )
  def test_fit_evaluate_and_predict_are_refused(self, name, options):
    with _STRATEGIES[name]().scope():
      model = _model(**options)
    x, y = _data()
    for call, *args in (
      (model.fit, x, y),
      (model.evaluate, x, y),
      (model.predict, x),
      (model.train_on_batch, x, y),
      (model.test_on_batch, x, y),
      (model.predict_on_batch, x),
    ):
      with self.assertRaisesRegex(
        tfs.errors.UnsupportedVersionError, 'tf_keras.*Keras 3.*strategy.run'
      ):
        call(*args)

  @tiers.parameters('async', tiers.soak('sync'))
  def test_fit_on_parameter_servers_is_refused(self, mode):
    with parameter_servers.Job(num_workers=1, num_ps=1) as job:
      for error in job.run(_errors_on_servers, (mode,)):
        self.assertIn('tf_keras', error)

  def test_fit_under_tensorflow_strategies_works(self):
    losses = []
    for strategy in (
      tf.distribute.OneDeviceStrategy(virtual_devices.name(0)),
      tf.distribute.MirroredStrategy(virtual_devices.names(1)),
    ):
      with strategy.scope():
        history = _model().fit(*_data(), shuffle=False, verbose=0).history
      losses += history['loss']
    self.assertAllClose(losses[0], losses[1])

  @parameterized.parameters(*_STRATEGIES)
  def test_custom_loop_equals_one_device(self, name):
    want = _train(tf.distribute.OneDeviceStrategy(virtual_devices.name(0)))
    for got, expected in zip(_train(_STRATEGIES[name]()), want, strict=True):
      self.assertAllClose(got, expected, 0, 1e-6)


if __name__ == '__main__':
  tf.test.main()
