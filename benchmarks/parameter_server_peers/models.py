"""Models of several sizes, and their data."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

_SHAPE = (28, 28, 1)
_CLASSES = 10
_ROWS = 2048
# Distance of the classes. At a larger distance, a few steps would separate them.
_DISTANCE = 0.3
_PREFETCH = 4


def _cnn() -> list[keras.layers.Layer]:
  layers = keras.layers
  return [
    layers.Conv2D(16, 3, activation='relu'),
    layers.MaxPooling2D(),
    layers.Conv2D(32, 3, activation='relu'),
    layers.MaxPooling2D(),
    layers.Flatten(),
    layers.Dense(120, activation='relu'),
    layers.Dense(_CLASSES),
  ]


def _mlp_25mb() -> list[keras.layers.Layer]:
  return [
    keras.layers.Flatten(),
    keras.layers.Dense(4000, 'relu', use_bias=False),
    keras.layers.Dense(784, 'relu', use_bias=False),
    keras.layers.Dense(_CLASSES, use_bias=False),
  ]


def _deep(width: int) -> Callable[[], list[keras.layers.Layer]]:
  """Returns a function that creates layers with 50 variables."""

  def build():
    return [
      keras.layers.Flatten(),
      *(keras.layers.Dense(width, 'relu') for _ in range(24)),
      keras.layers.Dense(_CLASSES),
    ]

  return build


_LAYERS = {
  'cnn': _cnn,
  'mlp_25mb': _mlp_25mb,
  'layers_50': _deep(32),
  'mlp_25mb_50': _deep(504),
}


def build(name: str) -> keras.Model:
  """Builds a model. Its initial weights are always the same.

  Args:
    name: one of `catalogue.MODELS`.
  """
  keras.utils.set_random_seed(1)
  return keras.Sequential([keras.Input(_SHAPE), *_LAYERS[name]()])


def optimizer(name: str) -> keras.optimizers.Optimizer:
  """Returns Adam, or for 25 MB SGD with momentum, which has one slot less."""
  if '25mb' in name:
    return keras.optimizers.SGD(0.01, momentum=0.9)
  return keras.optimizers.Adam()


def loss() -> keras.losses.Loss:
  """Returns the loss of all models."""
  return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def arrays() -> tuple[np.ndarray, np.ndarray]:
  """Returns noisy images of ten classes, and their classes."""
  rng = np.random.default_rng(0)
  classes = rng.integers(0, _CLASSES, _ROWS)
  means = _DISTANCE * rng.standard_normal((_CLASSES, *_SHAPE))
  images = means[classes] + rng.standard_normal((_ROWS, *_SHAPE))
  return images.astype(np.float32), classes


def dataset(batch_rows: int) -> tf.data.Dataset:
  """Returns an infinite data set of batches of the arrays.

  Args:
    batch_rows: number of rows per batch.
  """
  return (
    tf.data.Dataset.from_tensor_slices(arrays())
    .cache()
    .repeat()
    .batch(batch_rows, drop_remainder=True)
    .prefetch(_PREFETCH)
  )
