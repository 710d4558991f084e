"""Trains with Keras's `fit` on all GPUs of a host, or on four logical CPUs.

  python examples/fit_devices.py

It needs scikit-learn (`pip install '.[examples]'`).
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tf_strategies as tfs


def main():
  """Trains, and prints the accuracy on the training data."""
  devices = None  # All GPUs.
  if not tf.config.list_physical_devices('GPU'):
    [cpu] = tf.config.list_physical_devices('CPU')
    parts = [tf.config.LogicalDeviceConfiguration()] * 4
    tf.config.set_logical_device_configuration(cpu, parts)
    devices = [f'CPU:{i}' for i in range(4)]

  keras.utils.set_random_seed(1)
  strategy = tfs.create_strategy('ring_mirrored', devices=devices)
  with strategy.scope():
    layers = [keras.layers.Dense(64, 'relu'), keras.layers.Dense(10, 'softmax')]
    model = keras.Sequential([keras.Input([64]), *layers])
    optimizer = keras.optimizers.Adam(3e-3, global_clipnorm=1.0)
    loss = 'sparse_categorical_crossentropy'
    model.compile(optimizer, loss, metrics=['accuracy'])

  x, y = load_digits(return_X_y=True)
  # The global batch: each device gets a share of the 64 rows.
  model.fit(x / 16, y, batch_size=64, epochs=10, verbose=0)
  accuracy = model.evaluate(x / 16, y, return_dict=True, verbose=0)['accuracy']
  print(f'{strategy.num_replicas_in_sync} replicas: accuracy {accuracy:.3f}')


if __name__ == '__main__':
  main()
