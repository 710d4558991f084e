"""The result of every reader: validated, read-only NumPy arrays of images.

Example:

  >>> import numpy as np
  >>> from examples.datasets import images
  >>> split = images.Images(
  ...   np.zeros([3, 28, 28, 1], np.uint8), np.array([0, 1, 1], np.int64)
  ... )
  >>> split.num_examples
  3
  >>> split.take(2).labels.tolist()
  [0, 1]
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import data, errors

IMAGE_SHAPE = (28, 28, 1)
IMAGE_BYTES = 28 * 28

# The name of a data set is part of file names, which are parsed.
_NAME = re.compile(r'[A-Za-z0-9_]+')


class Images(data.Arrays):
  """One split: read-only 28x28 gray images and their labels, without a copy.

  Its batches have images float32 [b, 28, 28, 1] in [0, 1] and
  labels int64 [b].

  Args:
    images: uint8 [n, 28, 28, 1], n >= 1.
    labels: int64 [n], none negative.

  Raises:
    DataError: if the type, dtype, shape or length is wrong, or a label is negative.
  """

  def __init__(self, images: np.ndarray, labels: np.ndarray):
    _check_array('images', images, np.uint8, ('n',) + IMAGE_SHAPE)
    _check_array('labels', labels, np.int64, ('n',))
    if len(images) != len(labels):
      raise errors.DataError(
        f'{len(images)} images but {len(labels)} labels: expected one label '
        'per image'
      )
    if not len(images):
      raise errors.DataError('no examples: expected at least one image')
    if labels.min() < 0:
      _raise_label(labels, labels < 0, 'of at least 0')
    super().__init__((images, labels), scale)

  @property
  def images(self) -> np.ndarray:
    """uint8 [n, 28, 28, 1]."""
    return self.components[0]

  @property
  def labels(self) -> np.ndarray:
    """int64 [n]."""
    return self.components[1]

  def take(self, count: int) -> Images:
    """Returns the first `count` examples, or all if there are fewer.

    Args:
      count: number of examples to keep, at least 1.

    Returns:
      Views of the same memory: O(1).

    Raises:
      DataError: if `count` is below 1.
    """
    if count < 1:
      raise errors.DataError(
        f'take(count={count}): expected a count of at least 1'
      )
    return Images(self.images[:count], self.labels[:count])


def scale(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Converts uint8 images to float32 in [0, 1]. Other types do not change."""
  if images.dtype == tf.uint8:
    images = tf.cast(images, tf.float32) / 255.0
  return images, labels


@dataclasses.dataclass(frozen=True, eq=False)
class ImageClassificationData:
  """A data set for image classification.

  Attributes:
    name: letters, digits and underscores. It is part of TFRecord file names.
    train: the training split.
    test: the held-out split.
    num_classes: labels are in [0, num_classes).

  Raises:
    DataError: if the name is malformed or a label is out of range.
  """

  name: str
  train: Images
  test: Images
  num_classes: int

  def __post_init__(self):
    if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
      raise errors.DataError(
        f'name={self.name!r}: expected letters, digits and underscores'
      )
    if self.num_classes < 2:
      raise errors.DataError(
        f'num_classes={self.num_classes}: expected at least 2'
      )
    for split in ('train', 'test'):
      labels = getattr(self, split).labels
      if labels.max() >= self.num_classes:
        _raise_label(
          labels,
          labels >= self.num_classes,
          f'from 0 to {self.num_classes - 1} (num_classes={self.num_classes})',
          split,
        )


def build(
  where: str,
  name: str,
  train: tuple[Any, Any],
  test: tuple[Any, Any],
  num_classes: int,
) -> ImageClassificationData:
  """Builds a data set from the arrays of a file. Errors name the file.

  Args:
    where: the file or directory. Every message begins with it.
    name: the data set's name.
    train: images uint8 [n, 28, 28] or [n, 28, 28, 1], labels of any integer
      dtype [n].
    test: the same for the held-out split.
    num_classes: labels are in [0, num_classes).

  Returns:
    The validated data. Images are not copied.

  Raises:
    DataError: like `Images` and `ImageClassificationData`, with `where`.
  """
  try:
    splits = []
    for split, (images, labels) in (('train', train), ('test', test)):
      try:
        splits.append(Images(_as_images(images), _as_labels(labels)))
      except errors.DataError as e:
        raise errors.DataError(f'{split}: {e}') from e
    return ImageClassificationData(name, splits[0], splits[1], num_classes)
  except errors.DataError as e:
    raise errors.DataError(f'{where}: {e}') from e


def build_split(where: str, images: Any, labels: Any) -> Images:
  """Builds one split, like `build`.

  Raises:
    DataError: like `Images`, with `where`.
  """
  try:
    return Images(_as_images(images), _as_labels(labels))
  except errors.DataError as e:
    raise errors.DataError(f'{where}: {e}') from e


def _as_images(images: np.ndarray) -> np.ndarray:
  if images.ndim == 3:
    images = images[..., np.newaxis]
  return np.ascontiguousarray(images) if images.ndim else images


def _as_labels(labels: np.ndarray) -> np.ndarray:
  # Converts only integers: float labels would silently lose their fraction.
  if np.issubdtype(labels.dtype, np.integer):
    return labels.astype(np.int64)
  return labels


def _check_array(name: str, value: Any, dtype: Any, shape: tuple):
  expected = f'{np.dtype(dtype).name} [{", ".join(map(str, shape))}]'
  if not isinstance(value, np.ndarray):
    raise errors.DataError(
      f'{name} is a {type(value).__name__}: expected a NumPy array, {expected}'
    )
  if (
    value.dtype != dtype
    or value.ndim != len(shape)
    or value.shape[1:] != shape[1:]
  ):
    raise errors.DataError(
      f'{name} is {value.dtype.name} {list(value.shape)}: expected {expected}'
    )


def _raise_label(labels, is_bad, allowed: str, split: str | None = None):
  index = int(np.argmax(is_bad))
  prefix = f'{split}: ' if split else ''
  raise errors.DataError(
    f'{prefix}label {int(labels[index])} of example {index}: expected labels '
    f'{allowed}'
  )
