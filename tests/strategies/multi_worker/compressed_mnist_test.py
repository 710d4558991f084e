"""Compressed gradients train a model of the real MNIST as whole ones do."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_strategies as tfs
from tests import processes, virtual_devices

virtual_devices.configure()

_ROWS, _BATCH, _EPOCHS = 10_000, 50, 2
# By what, the most that the test loss is of the one without.
_MOST = {
  'none': 1.0,
  'int8': 1.03,
}


def _load(path):
  with np.load(path) as arrays:
    x = arrays['x_train'][:_ROWS], arrays['x_test']
    y = arrays['y_train'][:_ROWS], arrays['y_test']
  return [a.reshape(len(a), -1).astype(np.float32) / 255 for a in x], y


def _work(rank, path):
  del rank
  x, y = _load(path)
  found = {}
  for compression in _MOST:
    strategy = tfs.MultiWorkerRingStrategy(
      options=tfs.RingOptions(compression=compression),
      devices=[virtual_devices.name(0)],
    )
    keras.utils.set_random_seed(1)
    with strategy.scope():
      model = keras.Sequential(
        [
          keras.Input([784]),
          keras.layers.Dense(128, 'relu'),
          keras.layers.Dense(10),
        ]
      )
      model.compile(
        keras.optimizers.SGD(0.02, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      )
    before = strategy.process_group.bytes_sent
    model.fit(x[0], y[0], _BATCH, epochs=_EPOCHS, verbose=0)
    sent = strategy.process_group.bytes_sent - before
    loss = model.evaluate(x[1], y[1], 1000, verbose=0)
    found[compression] = loss, sent, model.get_weights()
    strategy.close()
  return found


@pytest.mark.soak
class CompressedMnistTest(tf.test.TestCase):
  def test_losses_are_near_those_of_whole_gradients(self):
    path = os.environ.get('TFS_MNIST_NPZ')
    if not path:
      self.skipTest('TFS_MNIST_NPZ does not name a copy of mnist.npz')
    results = processes.run_workers(_work, 2, args=(path,), deadline=240)
    exact, whole, _ = results[0]['none']
    for compression, most in _MOST.items():
      loss, sent, weights = results[0][compression]
      print(
        f'{compression}: test loss {loss:.4f}, {sent / whole:.3f} of the bytes'
      )
      self.assertLessEqual(loss, most * exact + 1e-6, compression)
      other = results[1][compression]
      tf.nest.map_structure(np.testing.assert_array_equal, weights, other[2])
      self.assertAlmostEqual(loss, other[0], 5)
    self.assertLess(exact, 0.35)
    self.assertLessEqual(results[0]['int8'][1], 0.27 * whole)


if __name__ == '__main__':
  tf.test.main()
