"""Images from an `.npz` file in the layout of the Keras data sets.

Source: https://keras.io/api/datasets/mnist; the file is
https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz.

Example:

  >>> import os, tempfile
  >>> import numpy as np
  >>> from examples.datasets import npz
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   path = os.path.join(directory, 'small.npz')
  ...   images = np.zeros([4, 28, 28], np.uint8)
  ...   labels = np.arange(4, dtype=np.uint8)
  ...   np.savez(path, x_train=images, y_train=labels, x_test=images[:1],
  ...            y_test=labels[:1])
  ...   npz.load_npz(path).train.labels.tolist()
  [0, 1, 2, 3]
"""

import os
import zipfile
import zlib

import numpy as np

from examples.datasets import images as images_lib
from tf_strategies import errors

KEYS = ('x_train', 'y_train', 'x_test', 'y_test')
KERAS_MNIST_URL = (
  'https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz'
)


def load_npz(
  path: str | os.PathLike[str], name: str = 'mnist', num_classes: int = 10
) -> images_lib.ImageClassificationData:
  """Loads `x_train, y_train, x_test, y_test` from an `.npz` file.

  Args:
    path: the file. Images are uint8 [n, 28, 28] or [n, 28, 28, 1], labels of
      any integer dtype [n].
    name: the name of the data set.
    num_classes: labels are in [0, num_classes).

  Returns:
    The data set. Takes O(bytes of the file). Pickled objects are not loaded.

  Raises:
    DataError: if the file is missing, not an `.npz`, or truncated, if a key is
      missing, or if its arrays are not such images and labels.
  """
  where = os.fspath(path)
  if not os.path.isfile(where):
    raise errors.DataError(
      f'{where}: no such file; expected an .npz with {", ".join(KEYS)}, such '
      f'as {KERAS_MNIST_URL}'
    )
  try:
    with np.load(where, allow_pickle=False) as archive:
      missing = [key for key in KEYS if key not in archive]
      if missing:
        raise errors.DataError(
          f'{where}: lacks {", ".join(missing)} (it holds '
          f'{", ".join(sorted(archive)) or "nothing"}); expected '
          f'{", ".join(KEYS)}, as in {KERAS_MNIST_URL}'
        )
      x_train, y_train, x_test, y_test = (archive[key] for key in KEYS)
  except errors.DataError:
    raise
  except (
    # NumPy and zipfile raise these for a truncated file, another format with this
    # extension (np.load then returns an array, which is not a context manager), a
    # pickle, and a flipped bit.
    AttributeError,
    EOFError,
    NotImplementedError,
    OSError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
  ) as e:
    raise errors.DataError(
      f'{where}: not a readable .npz file ({e}); expected {", ".join(KEYS)}, '
      f'as in {KERAS_MNIST_URL}'
    ) from e
  return images_lib.build(
    where, name, (x_train, y_train), (x_test, y_test), num_classes
  )
