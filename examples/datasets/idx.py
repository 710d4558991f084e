"""Images from the four IDX files in which MNIST was first published.

An IDX file is a big-endian header (two zero bytes, a type code, the number of
dimensions, then each dimension as uint32) and the values row by row.
Source: http://yann.lecun.com/exdb/mnist.

Example:

  >>> import os, struct, tempfile
  >>> from examples.datasets import idx
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   path = os.path.join(directory, 'labels')
  ...   with open(path, 'wb') as f:
  ...     _ = f.write(struct.pack('>II', 0x801, 3) + bytes([5, 0, 4]))
  ...   idx.read_idx(path, num_dims=1).tolist()
  [5, 0, 4]
"""

import gzip
import os
import struct
import zlib

import numpy as np

from examples.datasets import images as images_lib
from tf_strategies import errors

# split -> (images, labels). Each file may have the suffix `.gz`.
FILES = {
  'train': ('train-images-idx3-ubyte', 'train-labels-idx1-ubyte'),
  'test': ('t10k-images-idx3-ubyte', 't10k-labels-idx1-ubyte'),
}
_UINT8 = 0x08


def is_idx_directory(directory: str | os.PathLike[str]) -> bool:
  """Returns whether at least one of the four files exists, compressed or not."""
  return any(
    _find(directory, name) is not None
    for pair in FILES.values()
    for name in pair
  )


def load_idx(
  directory: str | os.PathLike[str], name: str = 'mnist', num_classes: int = 10
) -> images_lib.ImageClassificationData:
  """Loads the four MNIST files of a directory.

  Args:
    directory: directory with `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`,
      `t10k-images-idx3-ubyte` and `t10k-labels-idx1-ubyte`, each plain or
      with `.gz`. If both exist, the plain file is read.
    name: the name of the data set.
    num_classes: labels are in [0, num_classes).

  Returns:
    The data set. O(bytes of the files).

  Raises:
    DataError: if a file is missing, truncated or not an IDX file of bytes, or does
      not contain 28x28 images or one label for each.
  """
  splits = {}
  for split, (images_path, labels_path) in find_pairs(directory).items():
    images = read_idx(images_path, num_dims=3)
    labels = read_idx(labels_path, num_dims=1)
    splits[split] = (images, labels)
  return images_lib.build(
    os.fspath(directory), name, splits['train'], splits['test'], num_classes
  )


def find_pairs(
  directory: str | os.PathLike[str],
) -> dict[str, tuple[str, str]]:
  """Returns the paths of images and labels by split.

  Raises:
    DataError: if a file is missing.
  """
  return {
    split: (_require(directory, images), _require(directory, labels))
    for split, (images, labels) in FILES.items()
  }


def read_idx(path: str | os.PathLike[str], num_dims: int) -> np.ndarray:
  """Reads one IDX file of unsigned bytes.

  Args:
    path: the file. The suffix `.gz` means gzip.
    num_dims: required number of dimensions (3 for images, 1 for labels).

  Returns:
    A uint8 array with the dimensions in the file's header. Takes O(bytes).

  Raises:
    DataError: if the file is missing, truncated or too long, its gzip stream is
      damaged, or its magic number is wrong.
  """
  where = os.fspath(path)
  content = _read(where)
  header = 4 + 4 * num_dims
  expected_magic = _UINT8 << 8 | num_dims
  if len(content) < header:
    raise errors.DataError(
      f'{where}: {len(content)} bytes; expected an IDX header of {header} bytes'
    )
  magic, *dims = struct.unpack(f'>{1 + num_dims}I', content[:header])
  if magic != expected_magic:
    raise errors.DataError(
      f'{where}: magic number 0x{magic:08x}; expected 0x{expected_magic:08x} '
      f'(unsigned bytes in {num_dims} dimension{"s" if num_dims > 1 else ""})'
    )
  # Python integers: a damaged header cannot overflow them.
  size = 1
  for dim in dims:
    size *= dim
  if len(content) - header != size:
    raise errors.DataError(
      f'{where}: {len(content) - header} bytes of values; expected {size} for '
      f'the dimensions {dims} in its header'
    )
  return np.frombuffer(content, np.uint8, offset=header).reshape(dims)


def _read(where: str) -> bytes:
  try:
    if where.endswith('.gz'):
      with gzip.open(where, 'rb') as f:
        return f.read()
    with open(where, 'rb') as f:
      return f.read()
  except (EOFError, gzip.BadGzipFile, zlib.error) as e:
    raise errors.DataError(
      f'{where}: truncated or damaged gzip file ({e}); expected a complete '
      'IDX file, fetch it again'
    ) from e
  except OSError as e:
    raise errors.DataError(
      f'{where}: cannot be read ({e}); expected an IDX file'
    ) from e


def _find(directory: str | os.PathLike[str], name: str) -> str | None:
  for suffix in ('', '.gz'):
    path = os.path.join(directory, name + suffix)
    if os.path.isfile(path):
      return path
  return None


def _require(directory: str | os.PathLike[str], name: str) -> str:
  path = _find(directory, name)
  if path is None:
    raise errors.DataError(
      f'{os.fspath(directory)}: lacks {name}.gz (or {name}); expected the four '
      'MNIST files '
      + ', '.join(f'{n}.gz' for pair in FILES.values() for n in pair)
    )
  return path
