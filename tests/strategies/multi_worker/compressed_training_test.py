"""Training with compressed gradients on real workers.

The tests check bits, bytes, resuming and NaN.
"""

import contextlib
import functools
import tempfile

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests import processes, tf_case, tiers, virtual_devices
from tf_strategies.collectives import schedule

virtual_devices.configure()

_NAME = 'bfloat16'
_UNITS, _BATCH, _STEPS = 256, 36, 4
# With this scale, gradients of a few units overflow.
_SCALE = 2.0**126


@contextlib.contextmanager
def _training(name=_NAME, devices=1, seed=1, scale=None, rate=0.02):
  """Yields a strategy and a model."""
  # Some buckets hold several tensors; some tensors need their own.
  options = tfs.RingOptions(compression=name, bucket_bytes=1 << 16)
  strategy = tfs.MultiWorkerRingStrategy(
    options=options, devices=virtual_devices.names(devices)
  )
  keras.backend.clear_session()
  keras.utils.set_random_seed(seed)
  with contextlib.closing(strategy):
    with strategy.scope():
      model = keras.Sequential(
        [
          keras.Input([_UNITS]),
          keras.layers.Dense(_UNITS, 'relu'),
          keras.layers.Dense(8),
        ]
      )
      optimizer = keras.optimizers.SGD(rate, momentum=0.9)
      if scale is not None:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, scale)
      model.compile(optimizer, 'mse', metrics=['mae'])
      model.optimizer.build(model.trainable_variables)
    yield strategy, model


def _data(epoch=0):
  x = np.random.default_rng(epoch).normal(size=[_STEPS * _BATCH, _UNITS])
  x = x.astype(np.float32)
  return x, np.tanh(x[:, :8])


def _fit(model, epoch, target_scale=1, **options):
  x, y = _data(epoch)
  options = {'batch_size': _BATCH, 'shuffle': False, 'verbose': 0, **options}
  return model.fit(x, target_scale * y, **options).history


def _trained(name):
  """Trains two epochs with `fit`. Also returns the bytes of each step."""
  with _training(name) as (strategy, model):
    sent = []
    note = keras.callbacks.LambdaCallback(
      on_train_batch_end=lambda batch, logs: sent.append(
        strategy.process_group.bytes_sent
      )
    )
    _fit(model, 0, callbacks=[note])
    history = _fit(model, 1)
    return {
      'weights': model.get_weights(),
      'bytes': np.diff(sent).tolist(),
      'loss': history['loss'][-1],
    }


def _reported(name):
  """Returns the reports of a `fit` that does not change the weights."""
  with _training(name, rate=0.0) as (_, model):
    return _fit(model, 0)


def _looped():
  """Trains with a custom loop on two devices per worker."""
  with _training(devices=2) as (strategy, model):
    variables = model.trainable_variables

    def replica_step(x, y):
      with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
      model.optimizer.apply(tape.gradient(loss, variables), variables)

    step = tf.function(lambda *batch: strategy.run(replica_step, batch))
    dataset = tf.data.Dataset.from_tensor_slices(_data()).batch(_BATCH)
    for batch in strategy.experimental_distribute_dataset(dataset):
      step(*batch)
    return model.get_weights()


def _resumed(directory):
  """Trains one epoch, saves, and trains the second epoch in another strategy."""
  with _training() as (_, model):
    _fit(model, 0)
    tfs.Run(directory, model).save(epoch=1)
  with _training(seed=2) as (_, model):
    tfs.Run(directory, model).restore()
    _fit(model, 1)
    return model.get_weights()


def _scaled():
  """Starts with a loss scale so large that the first steps overflow and are skipped."""
  with _training(scale=_SCALE) as (_, model):
    before = model.get_weights()
    _fit(model, 0, target_scale=100, epochs=4)
    return {
      'weights': model.get_weights(),
      'moved': np.abs(model.get_weights()[0] - before[0]).max(),
      'scale': float(model.optimizer.dynamic_scale.numpy()),
    }


def _work(rank, directory):
  del rank
  return {
    'exact': _trained('none'),
    'exact_reports': _reported('none'),
    'trained': _trained(_NAME),
    'reports': _reported(_NAME),
    'looped': _looped(),
    'scaled': _scaled(),
    'resumed': _resumed(directory),
  }


@functools.cache
def _results(count):
  with tempfile.TemporaryDirectory() as directory:
    return processes.run_workers(_work, count, args=(directory,), deadline=300)


class CompressedTrainingTest(tf_case.TestCase):
  def assert_same(self, one, other):
    """Checks that two structures are equal in every bit."""
    tf.nest.map_structure(np.testing.assert_array_equal, one, other)

  @tiers.parameters(2, tiers.soak(3))
  def test_workers_are_equal_and_runs_resume_exactly(self, count):
    first, *others = _results(count)
    for other in others:
      for kind in ('trained', 'scaled'):
        self.assert_same(first[kind]['weights'], other[kind]['weights'])
      self.assert_same(first['looped'], other['looped'])
    for found in (first, *others):
      self.assert_same(found['resumed'], found['trained']['weights'])

  @tiers.parameters(2, tiers.soak(3))
  def test_bytes_sent_equal_the_formula(self, count):
    shapes = [(_UNITS, _UNITS), (_UNITS,), (_UNITS, 8), (8,)]
    sent = 0
    for shape in shapes:
      first, *others = (
        2 * size for size in schedule.chunk_sizes(np.prod(shape), count)
      )
      sent += sum(others) + (count - 1) * first
    steps = _results(count)[0]['trained']['bytes']
    self.assertLen(set(steps), 1)
    # The remaining bytes are the metrics. With three workers, small buckets are sent
    # directly to all, which takes more bytes.
    most = 100 if count == 2 else 4000
    self.assertBetween(steps[0] - sent, 0, most, (steps[0], sent))

  def test_reports_are_exact_and_losses_close_to_uncompressed(self):
    for found in _results(2):
      self.assertEqual(found['exact_reports'], found['reports'])
      self.assertLess(found['trained']['loss'], 1.01 * found['exact']['loss'])

  @tiers.parameters(2, tiers.soak(3))
  def test_loss_scaling_detects_overflow_and_training_continues(self, count):
    for result in _results(count):
      scaled = result['scaled']
      # The scale was halved at least once, and then training continued.
      self.assertLess(scaled['scale'], _SCALE)
      self.assertBetween(scaled['moved'], 1e-4, 100)


if __name__ == '__main__':
  tf.test.main()
