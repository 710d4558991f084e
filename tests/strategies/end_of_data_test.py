"""An epoch ends at the end of its data, not on errors that look the same."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tf_strategies import errors
from tf_strategies.strategies import registry

virtual_devices.configure()

_BATCHES = 6


def _read_cut_file():
  # TensorFlow raises this error for a truncated file.
  raise tf.errors.OutOfRangeError(None, None, 'Read fewer bytes than requested')


def _read_ended_data():
  next(iter(tf.data.Dataset.range(0)))  # It is not the model's.


def _take_from_nothing():
  next(iter([]))


class _Fails(keras.callbacks.Callback):
  def __init__(self, action):
    super().__init__()
    self._action = action

  def on_train_batch_end(self, batch, logs=None):
    if batch == 2:
      self._action()


class HostFunction(keras.Sequential):
  """A step in which a Python function exhausts its own iterator."""

  def train_step(self, data):
    results = super().train_step(data)
    numbers = iter([0.0, 0.0])
    number = tf.numpy_function(
      lambda: np.float32(next(numbers)), [], tf.float32
    )
    return {**results, 'number': number}


class EndOfDataTest(tf.test.TestCase, parameterized.TestCase):
  def _fit(self, kind=keras.Sequential, callbacks=(), is_known=True):
    strategy = registry.create_strategy('ring_mirrored')
    with strategy.scope():
      model = kind([keras.Input([3]), keras.layers.Dense(1)])
      model.compile('sgd', 'mse')
    x = np.ones([8, 3], np.float32), np.ones([8, 1], np.float32)
    data = tf.data.Dataset.from_tensors(x).repeat(_BATCHES)
    if not is_known:
      data = data.filter(lambda *_: True)
    model.fit(data, epochs=2, verbose=0, callbacks=list(callbacks))
    return model

  @parameterized.parameters(
    (_read_ended_data, True),
    (_read_cut_file, True),
    (_read_cut_file, False),
    (_take_from_nothing, True),
    (_take_from_nothing, False),
  )
  def test_callback(self, action, is_known):
    with self.assertRaisesRegex(
      errors.DataError, 'Keras would take for the end of the data.*Fix'
    ):
      self._fit(callbacks=[_Fails(action)], is_known=is_known)

  def test_step(self):
    with self.assertRaisesRegex(errors.DataError, '(?s)StopIteration.*Fix'):
      self._fit(HostFunction)

  @parameterized.parameters(True, False)
  def test_the_end_itself(self, is_known):
    batches = []
    count = keras.callbacks.LambdaCallback(
      on_train_batch_end=lambda batch, logs: batches.append(batch)
    )
    self._fit(callbacks=[count], is_known=is_known)
    self.assertEqual(batches, 2 * list(range(_BATCHES)))


if __name__ == '__main__':
  tf.test.main()
