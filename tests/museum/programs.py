"""The programs of the exhibits, shortened from the reports.

Each runs inside or outside a strategy's scope and returns the resulting
numbers. This module does not import `tf_strategies`.
"""

import gc
import json
import os

import keras
import numpy as np
import psutil
import tensorflow as tf

from tests.programs import common

layers = keras.layers

_CLASSES = 4


def _rows(count, width):
  rng = np.random.default_rng(5)
  x = rng.normal(size=(count, width)).astype('f4')
  return x, rng.integers(0, _CLASSES, count)


def _tokens(count, length=6):
  rng = np.random.default_rng(6)
  return rng.integers(0, 9, (count, length)), rng.integers(0, _CLASSES, count)


def _dense():
  return keras.Sequential(
    [
      layers.Input([6]),
      layers.Dense(8, 'relu'),
      layers.Dense(_CLASSES, dtype='float32'),
    ]
  )


def _train(model, x, y, optimizer, batch=16, **compiled):
  """Returns the results of `fit` and `evaluate`, and the weights.

  Args:
    model: model, not compiled.
    x: inputs.
    y: targets.
    optimizer: optimizer of the model.
    batch: rows in a global batch.
    **compiled: further arguments of `compile`.
  """
  model.compile(optimizer, **{'loss': common.crossentropy(), **compiled})
  history = model.fit(x, y, batch, epochs=2, shuffle=False, verbose=0)
  evaluated = model.evaluate(x, y, batch, verbose=0)
  return history.history, evaluated, model.get_weights()


def _fit_repeated(model, width):
  """Returns the history of `fit` with a repeated data set and a step count."""
  dataset = tf.data.Dataset.from_tensor_slices(_rows(64, width))
  return common.fit(model, dataset.repeat().batch(16), steps_per_epoch=6)


def _sgd():
  return keras.optimizers.SGD(0.1, momentum=0.9)


def _adam():
  return keras.optimizers.Adam(1e-2)


def scaled_loss():
  """Trains with a `LossScaleOptimizer`, which applies gradients in a condition."""
  optimizer = keras.optimizers.LossScaleOptimizer(_sgd())
  return _train(_dense(), *_rows(44, 6), optimizer)


def accumulated():
  """Accumulates gradients over two steps and applies them in a condition."""
  optimizer = keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2)
  return _train(_dense(), *_rows(60, 6), optimizer)


def compiled_mixed():
  """Trains with `mixed_float16`, which scales the loss, and `jit_compile=True`."""
  keras.config.set_dtype_policy('mixed_float16')
  return _train(_dense(), *_rows(32, 6), _adam(), jit_compile=True)


def compiled_mixed_images():
  """Trains a convolution with XLA, mixed precision and metrics."""
  keras.config.set_dtype_policy('mixed_float16')
  model = keras.Sequential(
    [
      layers.Input([6, 6, 1]),
      layers.Conv2D(4, 3, activation='relu'),
      layers.GlobalAveragePooling2D(),
      layers.Dense(_CLASSES, dtype='float32'),
    ]
  )
  x, y = _rows(32, 36)
  x = x.reshape(-1, 6, 6, 1)
  return _train(model, x, y, _sgd(), metrics=['accuracy'], jit_compile=True)


def compiled_embedding():
  """Trains an Embedding, whose gradients are gathered, with `jit_compile=True`."""
  model = keras.Sequential(
    [
      layers.Input([6], dtype='int32'),
      layers.Embedding(9, 4),
      layers.Flatten(),
      layers.Dense(_CLASSES),
    ]
  )
  return _train(model, *_tokens(32), _sgd(), jit_compile=True)


def transformer():
  """Trains a Transformer. Adam gets its Embeddings' gradients as `IndexedSlices`."""
  inputs = keras.Input([6], dtype='int32')
  x = common.Positions(9, 6, 4)(inputs)
  x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
  x = layers.GlobalAveragePooling1D()(x)
  model = keras.Model(inputs, layers.Dense(_CLASSES)(x))
  return _train(model, *_tokens(44), _adam(), metrics=['accuracy'])


def dropout():
  """Trains with dropout, whose random state is an integer variable."""
  model = keras.Sequential(
    [
      layers.Input([6]),
      layers.Dense(16, 'gelu'),
      layers.Dropout(0.2),
      layers.Dense(_CLASSES),
    ]
  )
  return _train(model, *_rows(44, 6), _sgd())


def many_steps():
  """Counts metrics over more steps than a doubling float32 can represent."""
  model = common.linear(6, _CLASSES)
  optimizer = keras.optimizers.SGD(1e-2)
  return _train(model, *_rows(560, 6), optimizer, 4, metrics=['accuracy'])


def identity():
  """Evaluates a model without weights whose loss is always 1."""
  model = keras.Sequential([keras.Input([1]), layers.Identity()])
  model.compile('sgd', 'mse')
  x, y = np.ones([800, 1], 'f4'), np.zeros([800, 1], 'f4')
  history = model.fit(x, y, 4, verbose=0)
  return history.history['loss'], model.evaluate(x, y, 4, verbose=0)


def evaluated_by_hand():
  """Compares the loss of `predict`, computed by hand, with `evaluate` and `fit`."""
  rng = np.random.default_rng(7)
  x = rng.uniform(-1, 1, (12, 1)).astype('f4')
  y = rng.uniform(-1, 1, (12, 10)).astype('f4')
  inputs = keras.Input([1])
  model = keras.Model(inputs, layers.Dense(10)(inputs))
  model.compile('sgd', 'mse')

  def by_hand():
    return np.mean((model.predict(x, 12, verbose=0) - y) ** 2)

  first = by_hand(), model.evaluate(x, y, 12, verbose=0)
  history = model.fit(x, y, 12, epochs=3, verbose=0)
  return first, history.history, by_hand()


def sequences():
  """Trains convolutions and BatchNormalization. No replica is empty."""
  model = keras.Sequential(
    [
      layers.Input([12, 4]),
      # The gradient of a bias would be rounding noise, which Adam amplifies.
      layers.Conv1D(6, 3, padding='same', use_bias=False),
      layers.BatchNormalization(),
      layers.Activation('gelu'),
      layers.GlobalMaxPooling1D(),
      layers.Dense(_CLASSES),
    ]
  )
  x, y = _rows(50, 48)
  return _train(model, x.reshape(-1, 12, 4), y, _adam())


def two_layers():
  """Trains two dense layers on flat images with Adam, and measures accuracy."""
  inputs = keras.Input([784])
  x = layers.Dense(32, 'relu')(inputs)
  x = layers.Dense(32, 'relu')(x)
  model = keras.Model(inputs, layers.Dense(_CLASSES)(x))
  optimizer = keras.optimizers.Adam()
  data = _rows(96, 784)
  return _train(model, *data, optimizer, 32, metrics=['accuracy'])


def tutorial():
  """Follows the tutorial for several workers."""
  model = keras.Sequential(
    [
      layers.Input([36]),
      layers.Reshape([6, 6, 1]),
      layers.Conv2D(4, 3, activation='relu'),
      layers.Flatten(),
      layers.Dense(8, 'relu'),
      layers.Dense(_CLASSES),
    ]
  )
  model.compile(_sgd(), common.crossentropy(), metrics=['accuracy'])
  return _fit_repeated(model, 36), model.get_weights()


def regression_of_a_trainer():
  """Trains a regression on data that another framework sharded for each worker."""
  x = np.linspace(0, 1, 64, dtype='f4')[:, None]
  config = json.loads(os.environ.get('TF_CONFIG', '{"task": {"index": 0}}'))
  if not tf.distribute.has_strategy():
    # One step takes four rows of the first worker's shard, then four of the
    # second's.
    x = x.reshape(2, 8, 4, 1).transpose(1, 0, 2, 3).reshape(64, 1)
  else:
    x = np.split(x, 2)[config['task']['index']]
  # The trainer creates datasets from generators, so their length is unknown.
  dataset = tf.data.Dataset.from_generator(
    lambda: zip(x, 2 * x + 1, strict=True),
    output_signature=(tf.TensorSpec([1]), tf.TensorSpec([1])),
  ).batch(8)
  options = tf.data.Options()
  options.experimental_distribute.auto_shard_policy = (
    tf.data.experimental.AutoShardPolicy.OFF
  )
  model = keras.Sequential(
    [layers.Input([1]), layers.Dense(10), layers.Dense(1)]
  )
  model.compile(
    keras.optimizers.SGD(0.05), 'mse', metrics=['mean_squared_error']
  )
  found = [
    model.fit(dataset.with_options(options), verbose=0).history
    for _ in range(3)
  ]
  return found, model.get_weights()


class ThreeLayers(keras.Model):
  """Three dense layers, as a subclass of `Model`."""

  def __init__(self):
    super().__init__()
    self.all = [layers.Dense(8, 'relu'), layers.Dense(8), layers.Dense(4)]

  def call(self, inputs):
    for layer in self.all:
      inputs = layer(inputs)
    return inputs


def growth():
  """Returns the growth of the process in KiB per epoch, after the first epochs."""
  x, y = _rows(64, 6)
  dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
  model = ThreeLayers()
  model.compile(_adam(), common.crossentropy(), metrics=['accuracy'])

  def memory_after(epochs):
    model.fit(dataset, epochs=epochs, verbose=0)
    gc.collect()
    return psutil.Process().memory_info().rss / 1024

  before = memory_after(40)
  return (memory_after(80) - before) / 80


def fit_on_servers():
  """Trains on parameter servers, which hold Adam's counter and learning rate."""
  model = _dense()
  model.compile(_adam(), common.crossentropy())
  _fit_repeated(model, 6)
  iterations = model.optimizer.iterations.numpy()
  # Asynchronous steps do not give one device's weights.
  return iterations, [np.isfinite(w) for w in model.get_weights()]


def is_made():
  """Returns nothing. The exhibit checks that the strategy can be created."""
  return ()
