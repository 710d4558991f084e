"""A `fit` that was resumed, and the one after it."""

import contextlib
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_strategies as tfs
from tests import virtual_devices
from tf_strategies.checkpoint.position import Position
from tf_strategies.fault_tolerance import resume_fit

virtual_devices.configure()


class ResumeFitTest(tf.test.TestCase):
  def test_only_the_first_fit_goes_on(self):
    strategy = mock.Mock(tf.distribute.Strategy)
    strategy.scope = contextlib.nullcontext
    for name in ('recovery', 'mark_finished', 'save'):
      setattr(strategy, name, mock.Mock())
    strategy.recovery.restore.return_value = Position(2)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile('sgd', 'mse', jit_compile=False)
    x = np.ones([4, 3], np.float32)

    def fit(**options):
      history = model.fit(x, x[:, :1], batch_size=4, verbose=0, **options)
      return history.epoch

    callback = tfs.ResumeFit(strategy)
    self.assertEqual(fit(epochs=4, callbacks=[callback]), [2, 3])
    self.assertEqual(fit(epochs=2), [0, 1])

  @pytest.mark.smoke
  def test_run_checkpoint(self):
    directory = self.create_tempdir().full_path
    x = np.arange(48, dtype=np.float32).reshape([16, 3]) / 10
    batches = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)

    def build():
      keras.backend.clear_session()
      keras.utils.set_random_seed(1)
      model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
      model.compile('adam', 'mse', jit_compile=False)
      return model, tfs.RunCheckpoint(directory, model)

    straight, _ = build()
    straight.fit(batches, epochs=3, verbose=0)

    model, checkpoint = build()
    model.fit(batches, epochs=1, verbose=0)
    model.fit(batches.take(2), verbose=0)
    checkpoint.save(epoch=1, step=2)

    model, checkpoint = build()
    epoch, _ = checkpoint.restore()
    # Two callbacks that resume do it once.
    callbacks = [
      tfs.ResumeFit(checkpoint),
      tfs.PreemptionCheckpoint(checkpoint),
    ]
    history = model.fit(
      batches, initial_epoch=epoch, epochs=3, callbacks=callbacks, verbose=0
    )
    self.assertEqual(history.epoch, [1, 2])
    self.assertEqual(int(model.optimizer.iterations.numpy()), 12)
    for expected, found in zip(straight.weights, model.weights, strict=True):
      np.testing.assert_array_equal(expected.numpy(), found.numpy())
    self.assertEqual(checkpoint.restore(), Position(3))

  def test_epoch_of_which_nothing_is_left(self):
    """Of data whose length nobody knows, as parameter servers read them."""
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile('sgd', 'mse', steps_per_execution=2, jit_compile=False)
    model.make_train_function()
    x = np.ones([4, 3], np.float32)

    def run(count):
      batches = ((x, x[:, :1]) for _ in range(count))
      resume_fit.skip_steps(model, 2)
      model.train_function(batches)
      model.train_function(batches)
      return int(model.optimizer.iterations.numpy())

    with self.assertRaises(StopIteration):
      run(2)
    self.assertEqual(run(5), 2)  # Of the three that are left, a group.


if __name__ == '__main__':
  tf.test.main()
