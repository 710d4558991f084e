"""`ChiefOnly`: one worker writes files, and all workers restore the state."""

import contextlib
import io
import os
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_strategies as tfs
from tests import processes, tf_case, tiers
from tests.programs import common

_EPOCHS = 3


class _Describe(keras.callbacks.Callback):
  """Writes as soon as it has a model, like TensorBoard."""

  def __init__(self, path):
    super().__init__()
    self.path = path

  def set_model(self, model):
    super().set_model(model)
    os.makedirs(self.path)


def _model(strategy, seed):
  keras.utils.set_random_seed(seed)
  with strategy.scope():
    model = common.linear(3, 2)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), 'mse')
  return model


def _fit(model, callbacks):
  x = np.linspace(-1, 1, 36, dtype=np.float32).reshape([12, 3])
  model.fit(
    x, x[:, :2], 4, _EPOCHS, verbose=0, shuffle=False, callbacks=callbacks
  )


def _shown(rank):
  """Returns whether `fit`, `evaluate` and `predict` print by default and if verbose."""
  model = _model(tfs.MultiWorkerRingStrategy(), rank)
  x = np.ones([4, 3], np.float32)
  shown = []
  for verbose in ('auto', 2):
    for method, args in (
      (model.fit, (x, x[:, :2])),
      (model.evaluate, (x, x[:, :2])),
      (model.predict, (x,)),
    ):
      with contextlib.redirect_stdout(io.StringIO()) as printed:
        method(*args, verbose=verbose)
      shown.append('/step' in printed.getvalue())
  return shown


class _Look(keras.callbacks.Callback):
  """Checks whether the file that the previous callback wrote is complete."""

  def __init__(self, path):
    super().__init__()
    self.path, self.damaged = path, []

  def on_epoch_end(self, epoch, logs=None):
    self.damaged.append(zipfile.ZipFile(self.path).testzip())


def _plain_callbacks(rank, name, directory):
  """Fits with plain Keras callbacks. Some are not on all workers."""
  strategy = tfs.create_strategy(name)
  path = os.path.join(directory, 'model.keras')
  saved = keras.callbacks.ModelCheckpoint(
    path, monitor='loss', save_best_only=True
  )
  own = os.path.join(directory, f'own_{rank}.keras')
  look = _Look(path)
  _fit(_model(strategy, 1), [saved, look])
  # One callback only on the chief, and one with a different path on each
  # worker.
  extra = [keras.callbacks.CSVLogger(os.path.join(directory, 'chief.csv'))]
  _fit(_model(strategy, 3), extra if rank == 0 else [])
  _fit(_model(strategy, 3), [keras.callbacks.ModelCheckpoint(own)])
  return saved.best, look.damaged, os.path.exists(own)


class _Slower(keras.callbacks.Callback):
  def on_epoch_end(self, epoch, logs=None):
    self.model.optimizer.learning_rate = 0.05


class _Stopper(keras.callbacks.CSVLogger):
  def on_epoch_end(self, epoch, logs=None):
    super().on_epoch_end(epoch, logs)
    self.model.stop_training = True


def _change_training(rank, directory, is_wrapped):
  """Returns the error of `fit` with a callback that changes training."""
  model = _model(tfs.MultiWorkerRingStrategy(), 1)
  callback = (
    tfs.keras.ChiefOnly(_Slower())
    if is_wrapped
    else _Stopper(os.path.join(directory, 'log.csv'))
  )
  try:
    _fit(model, [callback])
  except Exception as e:
    return str(e)
  return None


def _train_twice(rank, directory):
  """Trains with a callback that writes before the first event, and in the scope.

  The last save is on the chief only.
  """
  mine = os.path.join(directory, str(rank))
  os.makedirs(mine)
  strategy = tfs.MultiWorkerRingStrategy()
  describe = tfs.keras.ChiefOnly(_Describe(os.path.join(mine, 'described')))
  _fit(_model(strategy, 1), [describe])
  path = os.path.join(directory, 'model.weights.h5')
  saved = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
  with strategy.scope():
    model = _model(strategy, 1)
    _fit(model, [saved])
    if rank == 0:
      model.save(os.path.join(directory, 'model.keras'))
    _fit(model, [])
  return os.listdir(mine), int(model.optimizer.iterations.numpy())


class ChiefOnlyTest(tf_case.TestCase):
  @tiers.named_parameters(
    ('ring', 'multi_worker_ring'),
    tiers.soak('collective', 'multi_worker_collective'),
  )
  def test_keras_callbacks_write_once(self, name):
    args = name, self.directory
    results = processes.run_workers(_plain_callbacks, 2, args=args)
    best = results[0][0]
    self.assertIsNotNone(best)
    for result in results:
      self.assertEqual(result, (best, [None] * _EPOCHS, True))
    self.assertTrue(os.path.exists(self.path('chief.csv')))

  @pytest.mark.smoke
  def test_only_the_chief_shows_progress_by_default(self):
    chief, other = processes.run_workers(_shown, 2)
    self.assertEqual(chief, [True] * 6)
    self.assertEqual(other, [False] * 3 + [True] * 3)

  @pytest.mark.smoke
  def test_only_the_chief_writes_inside_the_scope(self):
    results = processes.run_workers(_train_twice, 2, args=(self.directory,))
    steps = _EPOCHS * 3
    self.assertEqual(results, [(['described'], 2 * steps), ([], 2 * steps)])
    saved = keras.models.load_model(self.path('model.keras'))
    self.assertEqual(int(saved.optimizer.iterations.numpy()), steps)

  @tiers.parameters((True, '_Slower'), tiers.soak(False, '_Stopper'))
  def test_callback_that_changes_training_at_run_time_is_refused(
    self, is_wrapped, name
  ):
    chief, other = processes.run_workers(
      _change_training, 2, args=(self.directory, is_wrapped)
    )
    self.assertRegex(str(chief), rf'ChiefOnly\({name}\).*changes the training')
    self.assertRegex(str(other), 'Rank 0')

  def test_callbacks_that_change_training_are_refused(self):
    optimizer = keras.optimizers.SGD(use_ema=True)
    model = common.linear(3, 1)
    model.compile('sgd', 'mse')
    for callback in (
      keras.callbacks.EarlyStopping(),
      keras.callbacks.ReduceLROnPlateau(),
      keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
      keras.callbacks.TerminateOnNaN(),
      keras.callbacks.SwapEMAWeights(optimizer),
      type('Mine', (keras.callbacks.EarlyStopping,), {})(),
      tfs.Run(self.directory, model),
    ):
      with self.assertRaisesRegex(
        tfs.errors.UnsupportedOptionError,
        rf'ChiefOnly\({type(callback).__name__}\).*changes the training',
      ):
        tfs.keras.ChiefOnly(callback)

  def test_callback_is_called_without_workers(self):
    calls = []
    record = keras.callbacks.LambdaCallback(
      on_epoch_begin=lambda epoch, logs: calls.append(('begin', epoch)),
      on_train_batch_end=lambda batch, logs: calls.append(('batch', batch)),
    )
    model = common.linear(3, 2)
    model.compile('sgd', 'mse')
    x = np.ones([4, 3], np.float32)
    model.fit(
      x, x[:, :2], 2, verbose=0, callbacks=[tfs.keras.ChiefOnly(record)]
    )
    self.assertEqual(calls, [('begin', 0), ('batch', 0), ('batch', 1)])


if __name__ == '__main__':
  tf.test.main()
