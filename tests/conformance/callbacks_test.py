"""Callbacks, saving and loading work under a strategy as without one."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import tiers
from tests.conformance import harness
from tests.conformance.harness import Feature

FEATURE = Feature('callbacks', rows=69)


class _InterruptionError(Exception):
  """Stands for a crash in the middle of a run."""


class _InterruptAt(keras.callbacks.Callback):
  def __init__(self, epoch, batch):
    super().__init__()
    self._at = epoch, batch
    self._epoch = None

  def on_epoch_begin(self, epoch, logs=None):
    self._epoch = epoch

  def on_train_batch_end(self, batch, logs=None):
    if (self._epoch, batch) == self._at:
      raise _InterruptionError


def _fit(model, epochs, callbacks=(), rows=69):
  x, y = harness.images(rows)
  return model.fit(
    x,
    y,
    batch_size=harness.GLOBAL_BATCH_SIZE,
    epochs=epochs,
    shuffle=False,
    verbose=0,
    callbacks=list(callbacks),
    validation_data=(x, y),
    validation_batch_size=harness.GLOBAL_BATCH_SIZE,
  )


class CallbacksTest(harness.ConformanceTest, parameterized.TestCase):
  def assert_same_weights(self, expected, actual, tolerance=1e-6):
    for want, got in zip(
      expected.get_weights(), actual.get_weights(), strict=True
    ):
      self.assertAllClose(want, got, 0, tolerance)

  def assert_same_optimizer_state(self, expected, actual):
    pairs = zip(
      expected.optimizer.variables, actual.optimizer.variables, strict=True
    )
    for want, got in pairs:
      np.testing.assert_array_equal(want.numpy(), got.numpy(), want.path)
    self.assertGreater(expected.optimizer.iterations.numpy(), 0)

  @tiers.named_parameters(*harness.every(tiers.soak))
  def test_model_checkpoint_saves_what_one_device_saves(self, case):
    saved = []
    for strategy in (None, case.create()):
      path = os.path.join(self.create_tempdir().full_path, 'best.keras')
      model = harness.build(FEATURE, strategy)
      _fit(model, 3, [keras.callbacks.ModelCheckpoint(path, monitor='loss')])
      saved.append(keras.models.load_model(path, compile=False))
      self.assert_same_weights(model, saved[-1], 0)
    self.assert_same_weights(*saved)

  @tiers.named_parameters(*harness.every(tiers.soak))
  def test_backup_and_restore_resumes_exactly(self, case):
    uninterrupted = harness.build(FEATURE, case.create())
    _fit(uninterrupted, 3)

    directory = self.create_tempdir().full_path
    backup = keras.callbacks.BackupAndRestore(directory)
    first = harness.build(FEATURE, case.create())
    with self.assertRaises(_InterruptionError):
      _fit(first, 3, [backup, _InterruptAt(epoch=1, batch=1)])
    second = harness.build(FEATURE, case.create())
    _fit(second, 3, [keras.callbacks.BackupAndRestore(directory)])
    self.assert_same_weights(uninterrupted, second, 0)
    self.assertEqual(
      uninterrupted.optimizer.iterations.numpy(),
      second.optimizer.iterations.numpy(),
    )
    self.assert_replicas_equal(second)

  @tiers.named_parameters(*harness.every())
  @pytest.mark.soak
  def test_early_stopping_and_tensorboard(self, case):
    histories = []
    for strategy in (None, case.create()):
      directory = self.create_tempdir().full_path
      model = harness.build(FEATURE, strategy)
      history = _fit(
        model,
        6,
        [
          keras.callbacks.EarlyStopping(
            monitor='loss', min_delta=1.0, patience=1
          ),
          keras.callbacks.TensorBoard(directory, write_graph=False),
        ],
      )
      histories.append(history.history)
      events = tf.io.gfile.glob(os.path.join(directory, '*', '*tfevents*'))
      self.assertLen(events, 2)  # train and validation
    self.assertLess(len(histories[0]['loss']), 6)
    self.assertEqual(len(histories[0]['loss']), len(histories[1]['loss']))
    for key, want in histories[0].items():
      self.assertAllClose(want, histories[1][key], 2e-6, 1e-6)

  @tiers.product(
    case=[
      harness.STRATEGIES[0],
      *tiers.every(tiers.soak, harness.STRATEGIES[1:]),
    ],
    inside=(True, tiers.soak(False)),
  )
  def test_saved_model_loads_inside_and_outside_the_scope(self, case, inside):
    strategy = case.create()
    model = harness.build(FEATURE, strategy)
    _fit(model, 1)
    path = os.path.join(self.create_tempdir().full_path, 'model.keras')
    model.save(path)
    with harness.scope_of(strategy if inside else None):
      loaded = keras.models.load_model(path)
    self.assert_same_weights(model, loaded, 0)
    self.assert_same_optimizer_state(model, loaded)
    # Both train on to the same weights, wherever each of them runs.
    _fit(model, 1)
    _fit(loaded, 1)
    self.assert_same_weights(model, loaded)

  @tiers.named_parameters(*harness.every(tiers.soak))
  def test_weights_and_checkpoints_move_between_one_and_many(self, case):
    directory = self.create_tempdir().full_path
    many = harness.build(FEATURE, case.create())
    _fit(many, 1)
    weights = os.path.join(directory, 'x.weights.h5')
    many.save_weights(weights)
    # The file does not tell a wrapped optimizer from a plain one.
    one = harness.build(FEATURE)
    one.optimizer.build(one.trainable_variables)
    one.load_weights(weights)
    self.assert_same_weights(many, one, 0)
    self.assert_same_optimizer_state(many, one)
    one.save_weights(weights)
    strategy = case.create()
    again = harness.build(FEATURE, strategy)
    with strategy.scope():
      again.optimizer.build(again.trainable_variables)
    again.load_weights(weights)
    self.assert_same_optimizer_state(many, again)
    self.assert_replicas_equal_after_restore(again)

    checkpoint = tf.train.Checkpoint(model=many).save(
      os.path.join(directory, 'ckpt')
    )
    other = harness.build(FEATURE, case.create())
    tf.train.Checkpoint(model=other).restore(checkpoint).expect_partial()
    self.assert_same_weights(many, other, 0)
    self.assert_replicas_equal_after_restore(other)

  def assert_replicas_equal_after_restore(self, model):
    for variable in model.variables:
      for copy in getattr(variable.value, 'values', ())[1:]:
        np.testing.assert_array_equal(
          variable.value.values[0].numpy(), copy.numpy(), variable.path
        )


if __name__ == '__main__':
  tf.test.main()
