"""Converts a source file to serialized examples of one or several splits.

MNIST's formats are built in. For other files a user's function yields examples.

Example:

  >>> import os, tempfile
  >>> from examples.datasets.extract import converters
  >>> def lines(path):
  ...   with open(path, 'rb') as f:
  ...     yield from f
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   path = os.path.join(directory, 'a.txt')
  ...   with open(path, 'wb') as f:
  ...     _ = f.write(b'one\\ntwo\\n')
  ...   (unit,) = converters.find_units(path, lines, 'train')
  ...   list(unit.convert())
  [('train', b'one\\n'), ('train', b'two\\n')]
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import tensorflow as tf

from examples.datasets import idx, npz, tfrecord
from examples.datasets import images as images_lib
from tf_strategies import errors

# Function of a path that yields the examples of the file in order, serialized or
# not.
ConvertFn = Callable[[str], Iterable[bytes | tf.train.Example]]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclasses.dataclass(frozen=True)
class Unit:
  """Files that are converted together, usually one file.

  Attributes:
    paths: absolute paths.
    convert: function that yields (split, serialized example).
  """

  paths: tuple[str, ...]
  convert: Callable[[], Iterator[tuple[str, bytes]]]


def find_units(
  sources: Paths, convert_fn: ConvertFn | None, split: str
) -> list[Unit]:
  """Finds the source files and their converters.

  Args:
    sources: as in `extract`.
    convert_fn: as in `extract`.
    split: split of the examples of `convert_fn`.

  Raises:
    DataError: if a path is missing, or its format is not built in.
    UnsupportedOptionError: if `split` is unknown.
  """
  tfrecord.check_split(split)
  paths = _find(sources, is_directory_whole=convert_fn is None)
  if convert_fn is not None:
    return [
      Unit((path,), functools.partial(_convert, convert_fn, path, split))
      for path in paths
    ]
  return [unit for path in paths for unit in _built_in(path)]


def _find(sources: Paths, is_directory_whole: bool) -> list[str]:
  """Returns all files as absolute paths, sorted, without duplicates."""
  several = (
    [sources] if isinstance(sources, str | os.PathLike) else list(sources)
  )
  found = set()
  for source in map(os.fspath, several):
    if os.path.isdir(source):
      matches = [source]
      if not (is_directory_whole and idx.is_idx_directory(source)):
        matches = [
          entry.path
          for entry in os.scandir(source)
          if entry.is_file() and not entry.name.startswith('.')
        ]
    else:
      matches = [source] if os.path.isfile(source) else glob.glob(source)
    if not matches:
      raise errors.DataError(
        f'source={source}: no such file; expected files, a pattern such as '
        "'raw/*.npz', or a directory of files"
      )
    found.update(map(os.path.abspath, matches))
  if not found:
    raise errors.DataError('no source: expected at least one file')
  return sorted(found)


def _built_in(path: str) -> list[Unit]:
  if os.path.isdir(path):
    return [
      Unit(pair, functools.partial(_convert_idx, *pair, split))
      for split, pair in idx.find_pairs(path).items()
    ]
  if not path.endswith('.npz'):
    raise errors.DataError(
      f'source={path}: of no format that is built in; expected an .npz in the '
      'layout of Keras, a directory of IDX files, or a convert_fn '
      '(--convert=module:function) that yields the examples of such a file'
    )
  return [Unit((path,), functools.partial(_convert_npz, path))]


def _convert(convert_fn, path, split):
  for example in convert_fn(path):
    if isinstance(example, tf.train.Example):
      example = example.SerializeToString(deterministic=True)
    if not isinstance(example, bytes):
      raise errors.DataError(
        f'{path}: its convert_fn yielded a {type(example).__name__}; expected '
        'bytes or a tf.train.Example'
      )
    yield split, example


def _convert_npz(path):
  data = npz.load_npz(path)
  for split in tfrecord.SPLITS:
    yield from _serialize(split, getattr(data, split))


def _convert_idx(images_path, labels_path, split):
  images = idx.read_idx(images_path, num_dims=3)
  labels = idx.read_idx(labels_path, num_dims=1)
  yield from _serialize(
    split, images_lib.build_split(os.path.dirname(images_path), images, labels)
  )


def _serialize(split, examples: images_lib.Images):
  for image, label in zip(examples.images, examples.labels, strict=True):
    yield split, tfrecord.serialize_image(image.tobytes(), int(label))
