"""Synthetic images that a model can learn, for benchmarks and quick tests.

Example:

  >>> from examples.datasets import synthetic
  >>> data = synthetic.make_synthetic(num_train=64, num_test=16, seed=3)
  >>> data.train.images.shape, data.num_classes
  ((64, 28, 28, 1), 10)
"""

import numpy as np

from examples.datasets import images as images_lib
from tf_strategies import errors

_CELL = 4
_CELLS = images_lib.IMAGE_SHAPE[0] // _CELL
# Pattern and noise each take half of the range, so that their sum is a uint8.
_LEVELS = 128


def make_synthetic(
  num_train: int = 8192,
  num_test: int = 2048,
  num_classes: int = 10,
  seed: int = 0,
) -> images_lib.ImageClassificationData:
  """Creates images with a random pattern for each class, plus uniform noise.

  Labels repeat 0, 1, ..., num_classes - 1, so that every prefix contains the
  classes in equal shares. Training and test images have the same patterns but
  different noise.

  Args:
    num_train: number of training examples, at least 1.
    num_test: number of test examples, at least 1.
    num_classes: number of classes, at least 2.
    seed: seed of patterns and noise, at least 0.

  Returns:
    The data set 'synthetic'. Takes O(n) time and one byte per pixel.

  Raises:
    DataError: if a size or the seed is out of range.
  """
  for name, value, least in (
    ('num_train', num_train, 1),
    ('num_test', num_test, 1),
    ('num_classes', num_classes, 2),
    ('seed', seed, 0),
  ):
    if value < least:
      raise errors.DataError(
        f'synthetic: {name}={value}; expected at least {least}'
      )
  rng = np.random.default_rng(seed)
  cells = rng.integers(
    _LEVELS, size=[num_classes, _CELLS, _CELLS], dtype=np.uint8
  )
  patterns = cells.repeat(_CELL, axis=1).repeat(_CELL, axis=2)
  splits = []
  for n in (num_train, num_test):
    labels = np.arange(n, dtype=np.int64) % num_classes
    images = rng.integers(_LEVELS, size=(n,) + patterns.shape[1:], dtype='u1')
    images += patterns[labels]
    splits.append((images, labels))
  return images_lib.build(
    'synthetic', 'synthetic', splits[0], splits[1], num_classes
  )
