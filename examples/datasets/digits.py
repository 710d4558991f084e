"""The handwritten digits of scikit-learn: real data without a download.

1,797 digits of 43 writers, 8x8 pixels of 17 grey levels, converted to the size
and the range of MNIST. Source: E. Alpaydin, C. Kaynak, "Optical Recognition
of Handwritten Digits", UCI Machine Learning Repository, 1998,
https://doi.org/10.24432/C50P49.

Example:

  >>> from examples.datasets import digits
  >>> data = digits.load_digits()
  >>> data.train.num_examples, data.test.num_examples
  (1437, 360)
"""

import numpy as np

from examples.datasets import images as images_lib
from tf_strategies import errors

NUM_CLASSES = 10
_MAX_LEVEL = 16.0
_TEST_EVERY = 5
_SPLIT_SEED = 20
_SIZE = images_lib.IMAGE_SHAPE[0]


def load_digits() -> images_lib.ImageClassificationData:
  """Loads scikit-learn's digits, resized to 28x28, in a fixed split.

  Every fifth example of each class, in a fixed random order, is a test example.
  So there are 1,437 training and 360 test examples, the same on every machine, with
  equal proportions of the classes.

  Returns:
    The data set 'digits' of 10 classes. O(n) time, about 0.1 s.

  Raises:
    DataError: if scikit-learn is not installed.
  """
  try:
    from sklearn import datasets
  except ImportError as e:
    raise errors.DataError(
      "dataset='digits': scikit-learn is not installed; expected it beside "
      "TensorFlow, in the checkout run: pip install '.[examples]'"
    ) from e
  bunch = datasets.load_digits()
  images = resize_bilinear(bunch.images * (255.0 / _MAX_LEVEL), _SIZE)
  labels = bunch.target.astype(np.int64)
  train, test = stratified_split(labels)
  return images_lib.build(
    'digits',
    'digits',
    (images[train], labels[train]),
    (images[test], labels[test]),
    NUM_CLASSES,
  )


def resize_bilinear(images: np.ndarray, size: int) -> np.ndarray:
  """Resizes square images as `tf.image.resize(..., 'bilinear')` does.

  Uses NumPy, so that the pixels do not depend on TensorFlow's version or device.

  Args:
    images: float [n, s, s] in [0, 255].
    size: the new height and width.

  Returns:
    uint8 [n, size, size], rounded to the nearest. O(n * size**2 * s).
  """
  weights = _bilinear_weights(images.shape[1], size)
  rows = np.einsum('ih,nhw->niw', weights, images)
  pixels = np.einsum('jw,niw->nij', weights, rows)
  # Sums in another order differ in the last bit. Without the first rounding, values
  # of k + 0.5 could be rounded differently on other machines.
  return np.rint(np.round(pixels, 6)).astype(np.uint8)


def stratified_split(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Splits 4 to 1 in every class, always in the same way.

  Args:
    labels: int64 [n].

  Returns:
    The ascending indices of the training and of the test examples.
    O(n log n).
  """
  # Not default_rng: NumPy guarantees only for RandomState that the numbers are the
  # same in all versions.
  shuffled = np.random.RandomState(_SPLIT_SEED).permutation(len(labels))
  by_class = shuffled[np.argsort(labels[shuffled], kind='stable')]
  is_test = np.zeros(len(labels), bool)
  is_test[by_class[::_TEST_EVERY]] = True
  return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def _bilinear_weights(old: int, new: int) -> np.ndarray:
  """Returns the [new, old] matrix of linear interpolation with half-pixel centers."""
  centres = (np.arange(new) + 0.5) * old / new - 0.5
  low = np.floor(centres)
  fraction = centres - low
  weights = np.zeros([new, old])
  # Beyond the outermost centers, both neighbors are the edge pixel.
  below = np.clip(low, 0, old - 1).astype(int)
  above = np.clip(low + 1, 0, old - 1).astype(int)
  np.add.at(weights, (np.arange(new), below), 1 - fraction)
  np.add.at(weights, (np.arange(new), above), fraction)
  return weights
