"""Checkpoints on disk that are whole or not there.

Each is a directory of two files: the bytes of all arrays in a row, and a
manifest with their names, shapes and checksums. It is written under another
name, brought to the disk, and renamed last, so a process that is killed at any
moment leaves the checkpoints that were there. What is damaged later, in a copy
that was cut short, say, is found by its checksum when it is read.

Example:

  >>> import tempfile
  >>> import numpy as np
  >>> from tf_strategies.checkpoint import checkpointer
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   store = checkpointer.Checkpointer(directory)
  ...   path = store.save({'weights': np.arange(3)}, {'epoch': 1})
  ...   found = store.newest()
  >>> found.metadata, found.arrays['weights'].tolist()
  ({'epoch': 1}, [0, 1, 2])
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import logging

from tf_strategies import errors

_MANIFEST = 'manifest.json'
_ARRAYS = 'arrays.bin'
_FORMAT = 1
_NAME = re.compile(r'checkpoint-(\d{8,})')
# What is being written or deleted has this in front of its name.
_UNFINISHED = 'unfinished-'


@dataclasses.dataclass(frozen=True, eq=False)
class StoredCheckpoint:
  """A checkpoint that was read and found to be whole.

  Attributes:
    path: of its directory.
    metadata: as it was saved.
    arrays: by name.
  """

  path: str
  metadata: dict[str, Any]
  arrays: dict[str, np.ndarray]


class Checkpointer:
  """The newest checkpoints of one directory; one process writes at a time.

  Args:
    directory: in a file system where a rename is atomic, as POSIX has it; made
      when something is saved.
    max_to_keep: older ones are deleted, once a newer one is on the disk.

  Raises:
    UnsupportedOptionError: `max_to_keep` is no positive integer.
  """

  def __init__(self, directory: str | os.PathLike[str], max_to_keep: int = 2):
    if not isinstance(max_to_keep, int) or max_to_keep < 1:
      raise errors.UnsupportedOptionError(
        f'max_to_keep={max_to_keep!r}',
        'an integer of at least 1',
        'leave it out for 2: one is left when the newest is damaged',
      )
    self._directory = os.fspath(directory)
    self._max_to_keep = max_to_keep

  def paths(self) -> list[str]:
    """The directories of all checkpoints, oldest first."""
    try:
      names = os.listdir(self._directory)
    except FileNotFoundError:
      return []
    numbers = sorted(
      int(match[1]) for match in map(_NAME.fullmatch, names) if match
    )
    return [self._path(number) for number in numbers]

  def save(
    self, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any]
  ) -> str:
    """Writes a checkpoint, and deletes those that are not kept.

    Args:
      arrays: by name.
      metadata: whatever JSON can hold.

    Returns:
      Its path.

    Raises:
      OSError: it cannot be written; those that were there are untouched.
    """
    os.makedirs(self._directory, exist_ok=True)
    self._delete_unfinished()
    before = self.paths()
    number = 1 + (_number(before[-1]) if before else 0)
    path = self._path(number)
    temporary = self._unfinished(path)
    os.mkdir(temporary)
    contents = {
      'format': _FORMAT,
      'metadata': dict(metadata),
      **_write_arrays(os.path.join(temporary, _ARRAYS), arrays),
    }
    _write_manifest(os.path.join(temporary, _MANIFEST), contents)
    _sync(temporary)
    os.rename(temporary, path)
    _sync(self._directory)
    for old in [*before, path][: -self._max_to_keep]:
      # By another name first: one that is half deleted is not a torn one.
      os.rename(old, self._unfinished(old))
    self._delete_unfinished()
    return path

  def newest(self) -> StoredCheckpoint | None:
    """Reads the newest checkpoint that is whole; None if there is none.

    Newer ones that are torn are left where they are, with a warning each.

    Raises:
      OSError: a file is there and cannot be read: it may be whole.
    """
    paths = self.paths()
    for path in reversed(paths):
      try:
        return _read(path)
      except (FileNotFoundError, errors.DataError) as e:
        logging.warning(
          'Skipped checkpoint %s, which is torn: %s. %s',
          path,
          e,
          'There is none before it.'
          if path == paths[0]
          else 'The one before it is tried.',
        )
    return None

  def _path(self, number: int) -> str:
    return os.path.join(self._directory, f'checkpoint-{number:08d}')

  def _unfinished(self, path: str) -> str:
    return os.path.join(self._directory, _UNFINISHED + os.path.basename(path))

  def _delete_unfinished(self) -> None:
    for name in os.listdir(self._directory):
      if name.startswith(_UNFINISHED):
        shutil.rmtree(os.path.join(self._directory, name))


def _number(path: str) -> int:
  return int(_NAME.fullmatch(os.path.basename(path))[1])


def _write_arrays(
  path: str, arrays: Mapping[str, np.ndarray]
) -> dict[str, Any]:
  """Writes all bytes in a row; returns what the manifest says of them."""
  digest = hashlib.sha256()
  entries = []
  size = 0
  with open(path, 'wb') as f:
    for name, array in arrays.items():
      data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
      f.write(data)
      digest.update(data)
      entries.append([name, array.dtype.name, list(array.shape)])
      size += data.size
    f.flush()
    os.fsync(f.fileno())
  return {'arrays': entries, 'bytes': size, 'sha256': digest.hexdigest()}


def _write_manifest(path: str, contents: Mapping[str, Any]) -> None:
  with open(path, 'w', encoding='utf-8') as f:
    json.dump({'contents': contents, 'sha256': _digest(contents)}, f)
    f.flush()
    os.fsync(f.fileno())


def _digest(contents: Mapping[str, Any]) -> str:
  return hashlib.sha256(
    json.dumps(contents, sort_keys=True).encode()
  ).hexdigest()


def _sync(directory: str) -> None:
  """Brings the names in a directory to the disk."""
  descriptor = os.open(directory, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _read(path: str) -> StoredCheckpoint:
  """Reads a checkpoint.

  Raises:
    DataError: it is damaged; says which file, and how.
    OSError: a file is missing, or cannot be read.
  """
  contents = _read_manifest(os.path.join(path, _MANIFEST))
  # np.fromfile would take what it cannot read for the end of the file.
  with open(os.path.join(path, _ARRAYS), 'rb') as f:
    data = np.frombuffer(f.read(), np.uint8)
  if data.size != contents['bytes']:
    raise errors.DataError(
      f'{_ARRAYS} has {data.size} bytes, expected {contents["bytes"]}'
    )
  if hashlib.sha256(data).hexdigest() != contents['sha256']:
    raise errors.DataError(f'{_ARRAYS} has another checksum than its manifest')
  arrays = {}
  start = 0
  for name, dtype_name, shape in contents['arrays']:
    dtype = _dtype(dtype_name)
    end = start + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    arrays[name] = np.frombuffer(data[start:end].tobytes(), dtype).reshape(
      shape
    )
    start = end
  return StoredCheckpoint(path, contents['metadata'], arrays)


def _dtype(name: str) -> np.dtype:
  if name == 'bfloat16':
    # NumPy alone does not know it. TensorFlow takes seconds to load, and whoever
    # has such variables has loaded it.
    import tensorflow as tf

    return np.dtype(tf.bfloat16.as_numpy_dtype)
  return np.dtype(name)


def _read_manifest(path: str) -> dict[str, Any]:
  try:
    with open(path, encoding='utf-8') as f:
      manifest = json.load(f)
    contents = manifest['contents']
    is_whole = manifest['sha256'] == _digest(contents)
  except (ValueError, KeyError, TypeError) as e:
    raise errors.DataError(f'{_MANIFEST} cannot be read ({e})') from e
  if not is_whole:
    raise errors.DataError(f'{_MANIFEST} has another checksum than it says')
  if contents['format'] != _FORMAT:
    raise errors.DataError(
      f'{_MANIFEST} has format {contents["format"]}, expected {_FORMAT}'
    )
  return contents
