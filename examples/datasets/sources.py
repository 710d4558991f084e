"""Loads a data set by its name and path, for all examples.

Example:

  >>> from examples.datasets import sources
  >>> sources.load('digits').train.images.shape
  (1437, 28, 28, 1)
"""

import difflib
import os

from examples.datasets import digits, idx, manifest, npz, synthetic, tfrecord
from examples.datasets import images as images_lib
from tf_strategies import errors

DATASETS = ('mnist', 'digits', 'synthetic')
_EXPECTED = (
  'an .npz file in the layout of Keras (mnist.npz, from '
  f'{npz.KERAS_MNIST_URL}), a directory with the four IDX files '
  '(train-images-idx3-ubyte.gz and its companions), or a directory that `python -m '
  'examples.datasets.extract` filled'
)


def load(
  dataset: str, data_path: str | os.PathLike[str] | None = None
) -> images_lib.ImageClassificationData:
  """Loads a data set into memory.

  Args:
    dataset: 'mnist', 'digits' (scikit-learn's, offline) or 'synthetic'.
    data_path: only for 'mnist': an `.npz` file, or a directory with IDX files or
      with shards of `extract`. By default MNIST is read from the Keras cache, or
      downloaded into it.

  Returns:
    Images uint8 [n, 28, 28, 1] and labels int64 [n] of both splits. Takes O(bytes).
    MNIST takes 55 MB, and 0.5 s from an `.npz`.

  Raises:
    DataError: if the data is missing, damaged or of another format. The message
      names the path, the expected data and its source.
    UnsupportedOptionError: if `dataset` is unknown or does not take a `data_path`.
  """
  if dataset not in DATASETS:
    close = difflib.get_close_matches(str(dataset), DATASETS, n=1)
    raise errors.UnsupportedOptionError(
      f'dataset={dataset!r}',
      'one of ' + ', '.join(repr(d) for d in DATASETS),
      f'write dataset={close[0] if close else "digits"!r}',
    )
  if dataset == 'mnist':
    return _load_mnist(data_path)
  if data_path is not None:
    raise errors.UnsupportedOptionError(
      f'dataset={dataset!r} with data_path={os.fspath(data_path)!r}',
      "dataset='mnist' with data_path",
      "leave data_path out, or write dataset='mnist'",
    )
  if dataset == 'digits':
    return digits.load_digits()
  return synthetic.make_synthetic()


def load_keras_mnist() -> images_lib.ImageClassificationData:
  """Loads MNIST from the Keras cache, or downloads it (11 MB) into the cache.

  Returns:
    60,000 training and 10,000 test examples of 10 classes.

  Raises:
    DataError: if it is not in the cache and cannot be downloaded.
  """
  import keras

  try:
    train, test = keras.datasets.mnist.load_data()
  # Keras raises a bare Exception for a failed download.
  except Exception as e:
    raise errors.DataError(
      f'MNIST is not in the Keras cache and its download failed ({e}); '
      f'expected a connection to {npz.KERAS_MNIST_URL}. Without one, pass '
      '--data_path with a copy of mnist.npz, or --dataset=digits'
    ) from e
  return images_lib.build('keras.datasets.mnist', 'mnist', train, test, 10)


def _load_mnist(data_path) -> images_lib.ImageClassificationData:
  if data_path is None:
    return load_keras_mnist()
  where = os.fspath(data_path)
  if os.path.isdir(where):
    return _load_directory(where)
  if not os.path.exists(where):
    raise errors.DataError(
      f'data_path={where}: no such file or directory; expected {_EXPECTED}'
    )
  if not where.endswith('.npz'):
    raise errors.DataError(
      f'data_path={where}: not an .npz file; expected {_EXPECTED}'
    )
  return npz.load_npz(where)


def _load_directory(where: str) -> images_lib.ImageClassificationData:
  has_idx = idx.is_idx_directory(where)
  has_tfrecords = manifest.is_extracted(where)
  if has_idx and has_tfrecords:
    raise errors.DataError(
      f'data_path={where}: holds both IDX files and TFRecord shards; expected '
      'one of them, move the other elsewhere'
    )
  if has_idx:
    return idx.load_idx(where)
  if has_tfrecords:
    return tfrecord.load_tfrecords(where)
  entries = sorted(os.listdir(where))
  archives = [entry for entry in entries if entry.endswith('.npz')]
  hint = (
    f' (pass the file itself: {os.path.join(where, archives[0])})'
    if archives
    else ''
  )
  raise errors.DataError(
    f'data_path={where}: '
    f'{"no data set in this directory" if entries else "an empty directory"}'
    f'{hint}; expected {_EXPECTED}'
  )
