"""A `fit` that was resumed, and the one after it."""

import contextlib
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests import virtual_devices

virtual_devices.configure_logical_cpus()


class ResumeFitTest(tf.test.TestCase):
  def test_only_the_first_fit_goes_on(self):
    strategy = mock.Mock(scope=contextlib.nullcontext)
    strategy.options.checkpoint_dir = self.create_tempdir().full_path
    strategy.recovery.restore.return_value = {
      'epoch': 2,
      'epoch_steps': 0,
      'splits': [],
    }
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile('sgd', 'mse', jit_compile=False)
    x = np.ones([4, 3], np.float32)

    def fit(**options):
      history = model.fit(x, x[:, :1], batch_size=4, verbose=0, **options)
      return history.epoch

    callback = tfs.ResumeFit(strategy)
    self.assertEqual(fit(epochs=4, callbacks=[callback]), [2, 3])
    self.assertEqual(fit(epochs=2), [0, 1])


if __name__ == '__main__':
  tf.test.main()
