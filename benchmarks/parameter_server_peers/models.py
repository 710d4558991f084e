"""Models of several sizes, and their data."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

_SHAPE = (28, 28, 1)
_CLASSES = 10
_ROWS = 2048
# How far classes are apart: not so far that a few steps can tell them.
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
  """Makes layers with 50 variables."""

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
  """Builds a model; equal initial weights each time.

  Args:
    name: one of `catalogue.MODELS`.
  """
  keras.utils.set_random_seed(1)
  return keras.Sequential([keras.Input(_SHAPE), *_LAYERS[name]()])


def optimizer(name: str) -> keras.optimizers.Optimizer:
  """Returns an optimizer: Adam, but one with a slot less for 25 MB."""
  if '25mb' in name:
    return keras.optimizers.SGD(0.01, momentum=0.9)
  return keras.optimizers.Adam()


def loss() -> keras.losses.Loss:
  """Returns the loss of all models."""
  return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def arrays() -> tuple[np.ndarray, np.ndarray]:
  """Returns noisy images of ten classes, and the classes."""
  rng = np.random.default_rng(0)
  classes = rng.integers(0, _CLASSES, _ROWS)
  means = _DISTANCE * rng.standard_normal((_CLASSES, *_SHAPE))
  images = means[classes] + rng.standard_normal((_ROWS, *_SHAPE))
  return images.astype(np.float32), classes


def dataset(batch_rows: int) -> tf.data.Dataset:
  """Returns batches of the arrays, without an end.

  Args:
    batch_rows: of each batch.
  """
  return (
    tf.data.Dataset.from_tensor_slices(arrays())
    .cache()
    .repeat()
    .batch(batch_rows, drop_remainder=True)
    .prefetch(_PREFETCH)
  )
