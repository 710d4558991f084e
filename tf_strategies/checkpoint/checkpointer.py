"""`Checkpointer`: atomic checkpoints of named arrays in a directory.

A checkpoint is a directory with two files: `arrays.bin`, the bytes of all
arrays in a row, and `manifest.json`, their names, dtypes, shapes and checksums
with the caller's metadata. It is written under a temporary name, synced to the
disk and renamed last. A process that is killed at any point leaves the previous
checkpoints; checksums detect damage that happens later.

An array that no process holds whole is written in `Blocks`, and read by rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes  # noqa: F401 (With it NumPy knows bfloat16 by name.)
import numpy as np
from absl import logging

from tf_strategies import errors, option_checks
from tf_strategies.checkpoint import ownership

# Beside the checkpoints, after the last one; its content does not matter.
_FINISHED_FILE = 'finished'

_MANIFEST = 'manifest.json'
_ARRAYS = 'arrays.bin'
_FORMAT = 4  # Earlier ones had other files, or lacked the run.
_NAME = re.compile(r'checkpoint-(\d{8,})')
# Prefix of checkpoints that are being written or deleted.
_UNFINISHED = 'unfinished-'
_BLOCK_BYTES = 1 << 24


class ArraySpec(NamedTuple):
  """Type of an array, and its place in the file."""

  dtype: str
  shape: tuple[int, ...]
  offset: int


class Blocks(NamedTuple):
  """An array that is written block by block; each block is some of its rows."""

  dtype: str
  shape: tuple[int, ...]
  blocks: Iterable[np.ndarray]


class StoredArrays(Mapping[str, np.ndarray]):
  """Arrays by name; each access reads one of them from its file.

  The file stays open: the arrays outlive the deletion of their checkpoint.

  Attributes:
    specs: dtype and shape of each array.
  """

  def __init__(self, file: BinaryIO, specs: Mapping[str, ArraySpec]):
    self._file = file
    self.specs = specs

  def __getitem__(self, name: str) -> np.ndarray:
    shape = self.specs[name].shape
    return self.rows(name, 0, shape[0] if shape else 1).reshape(shape)

  def rows(self, name: str, first: int, count: int) -> np.ndarray:
    """Returns `count` rows of an array from row `first` on."""
    spec = self.specs[name]
    array = np.empty([count, *spec.shape[1:]], spec.dtype)
    row_bytes = array.itemsize * math.prod(spec.shape[1:])
    # np.fromfile takes a failed read for the end of the file.
    self._file.seek(spec.offset + first * row_bytes)
    data = array.reshape(-1).view(np.uint8)
    if self._file.readinto(data) != data.size:
      raise errors.DataError(
        f'{self._file.name} became shorter: {name!r} is cut'
      )
    return array

  def with_specs(self, specs: Mapping[str, ArraySpec]) -> StoredArrays:
    """Returns the arrays of some specs, with new names."""
    return StoredArrays(self._file, specs)

  def __iter__(self) -> Iterator[str]:
    return iter(self.specs)

  def __len__(self) -> int:
    return len(self.specs)


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
  """A checkpoint whose checksums were verified."""

  path: str
  metadata: dict[str, Any]
  arrays: StoredArrays
  run: str  # Name of the run that wrote it.


class Checkpointer:
  """Keeps the newest checkpoints of a directory, which has one writer at a time.

  The first `save` or `acquire` creates the directory, in a POSIX file system.

  Args:
    directory: the directory.
    max_to_keep: number of whole checkpoints to keep.
  """

  def __init__(self, directory: str | os.PathLike[str], max_to_keep: int = 2):
    option_checks.check_int(
      'max_to_keep',
      max_to_keep,
      1,
      fix='leave it out for 2: one is left when the newest is damaged',
    )
    option_checks.check_local_path(
      'directory', directory, "pass a path, such as 'checkpoints'"
    )
    self.directory = os.fspath(directory)
    self._max_to_keep = max_to_keep
    self._damaged: set[str] = set()
    self._ownership = ownership.of(self.directory)

  def acquire(self) -> None:
    """Makes this process the only one that writes; `save` does it too.

    Raises:
      InUseError: a live process of another run writes there.
      TakenOverError: another process has become the writer.
      StorageError: the directory cannot be written.
    """
    with _typed(self.directory, 'written'):
      self._ownership.acquire()

  def release(self) -> None:
    """Lets another process write."""
    self._ownership.release()

  def log_restored(self, found: Checkpoint, position: object) -> None:
    """Logs where a run continues, which run wrote that, and whether it has finished."""
    ending = '.'
    if self.is_finished and not self._damaged:
      ending = ', which has finished: nothing is left but what is new since.'
    run = 'this run' if found.run == ownership.run_id() else f'run {found.run}'
    logging.warning(
      'Resumed from %s, at %s, of %s%s', found.path, position, run, ending
    )

  def paths(self) -> list[str]:
    """Returns the directories of all checkpoints, oldest first."""
    try:
      names = os.listdir(self.directory)
    except FileNotFoundError:
      return []
    found = [
      os.path.join(self.directory, n) for n in names if _NAME.fullmatch(n)
    ]
    return sorted(found, key=_number)

  def save(
    self,
    arrays: Iterable[tuple[str, np.ndarray | Blocks]],
    metadata: Mapping[str, Any],
  ) -> str:
    """Writes a checkpoint, deletes those beyond `max_to_keep`; returns its path.

    Those that `newest` found damaged do not count as kept.

    Args:
      arrays: pairs of name and array, which are written one after the other: only
        one array, or block, needs to be in memory.
      metadata: for JSON.

    Raises:
      StorageError: it cannot be written; the previous checkpoints are untouched.
      InUseError, TakenOverError: as `acquire`.
    """
    self.acquire()
    with _typed(self.directory, 'written'):
      path = self._write(arrays, metadata)
    try:
      paths = self.paths()
      whole = [p for p in paths if p not in self._damaged]
      oldest = whole[-self._max_to_keep :][0]
      for old in paths[: paths.index(oldest)]:
        # Renamed first: a half-deleted checkpoint is not a damaged one.
        os.rename(old, self._unfinished(old))
    except OSError as e:
      logging.warning('Could not delete old checkpoints: %s', e)
    self._delete_unfinished()
    return path

  def _write(self, arrays, metadata) -> str:
    """Writes a checkpoint; returns its path."""
    os.makedirs(self.directory, exist_ok=True)
    self._delete_unfinished()
    number = 1 + max(map(_number, self.paths()), default=0)
    path = os.path.join(self.directory, f'checkpoint-{number:08d}')
    temporary = self._unfinished(path)
    os.mkdir(temporary)
    contents = {
      'format': _FORMAT,
      'metadata': dict(metadata),
      'run': ownership.run_id(),
      **_write_arrays(os.path.join(temporary, _ARRAYS), arrays),
    }
    with open(os.path.join(temporary, _MANIFEST), 'w', encoding='utf-8') as f:
      json.dump({'contents': contents, 'sha256': _digest(contents)}, f)
      f.flush()
      os.fsync(f.fileno())
    _sync(temporary)
    os.rename(temporary, path)
    _sync(self.directory)
    return path

  def newest(self, since: str | None = None) -> Checkpoint | None:
    """Opens the newest checkpoint that is whole; None without checkpoints.

    Logs a warning for each newer one that is damaged, and deletes nothing.

    Args:
      since: one of `paths()`: older ones are left alone.

    Raises:
      DataError: there are checkpoints and all are damaged.
      StorageError: a file exists and cannot be read: it may be whole.
    """
    oldest = 0 if since is None else _number(since)
    skipped: dict[str, str] = {}
    with _typed(self.directory, 'read'):
      for path in reversed(self.paths()):
        if _number(path) < oldest:
          break
        try:
          found = self.open(path)
        except (FileNotFoundError, NotADirectoryError, errors.DataError) as e:
          self._damaged.add(path)
          logging.warning(
            'Skipped checkpoint %s, which cannot be read: %s', path, e
          )
          skipped[path] = str(e)
          continue
        if skipped:
          logging.warning('Using the older checkpoint %s.', path)
        return found
    if not skipped:
      return None
    reasons = '; '.join(f'{path}: {why}' for path, why in skipped.items())
    raise errors.DataError(
      f'Expected a checkpoint that can be read in {self.directory}, got none '
      f'({reasons}). Fix: restore damaged files from a backup, use the version '
      'that wrote them, or, to restart from scratch, delete the directory.'
    )

  def open(self, path: str) -> Checkpoint:
    """Opens one of `paths()`, or raises a DataError that names the damage."""
    contents = _read_manifest(os.path.join(path, _MANIFEST))
    file = open(os.path.join(path, _ARRAYS), 'rb')  # noqa: SIM115
    try:
      digest = hashlib.sha256()
      while block := file.read(_BLOCK_BYTES):
        digest.update(block)
      if digest.hexdigest() != contents['sha256']:
        raise errors.DataError(
          f'{_ARRAYS} differs from the checksum in {_MANIFEST}'
        )
    except BaseException:
      file.close()
      raise
    specs: dict[str, ArraySpec] = {}
    offset = 0
    for name, dtype, shape in contents['arrays']:
      specs[name] = ArraySpec(dtype, tuple(shape), offset)
      offset += np.dtype(dtype).itemsize * math.prod(shape)
    arrays = StoredArrays(file, specs)
    return Checkpoint(path, contents['metadata'], arrays, contents['run'])

  @property
  def is_finished(self) -> bool:
    """Returns whether training is over: no newer checkpoint will follow."""
    return os.path.exists(os.path.join(self.directory, _FINISHED_FILE))

  def mark_finished(self, is_finished: bool = True) -> None:
    """Tells readers such as `SidecarEvaluator` whether training is over."""
    path = os.path.join(self.directory, _FINISHED_FILE)
    with _typed(self.directory, 'written'):
      if is_finished:
        os.makedirs(self.directory, exist_ok=True)
        open(path, 'w').close()
      else:
        with contextlib.suppress(FileNotFoundError):
          os.remove(path)

  def _unfinished(self, path: str) -> str:
    name = f'{_UNFINISHED}{os.path.basename(path)}-{uuid.uuid4().hex[:12]}'
    return os.path.join(self.directory, name)

  def _delete_unfinished(self) -> None:
    for name in os.listdir(self.directory):
      if name.startswith(_UNFINISHED):
        # What stays is not read, and the next `save` tries again.
        shutil.rmtree(os.path.join(self.directory, name), ignore_errors=True)


@contextlib.contextmanager
def _typed(directory: str, what: str) -> Iterator[None]:
  """Raises what the file system refuses as an error of this package."""
  try:
    yield
  except OSError as e:
    error = errors.StorageError(
      f'A checkpoint in {directory} cannot be {what}: {e}. Fix: make '
      'room, make it a directory that this user can write, or pass another one, '
      'and start the run again. Whole checkpoints were left as they are.'
    )
    error.errno, error.filename = e.errno, e.filename
    raise error from e


def _number(path: str) -> int:
  return int(_NAME.fullmatch(os.path.basename(path))[1])


def _write_arrays(
  path: str, arrays: Iterable[tuple[str, np.ndarray | Blocks]]
) -> dict[str, Any]:
  """Writes all bytes in a row; returns what the manifest says of them."""
  digest = hashlib.sha256()
  entries = []
  with open(path, 'wb') as f:
    for name, array in arrays:
      if not isinstance(array, Blocks):
        array = Blocks(array.dtype.name, array.shape, [array])
      for block in array.blocks:
        data = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
        f.write(data)
        digest.update(data)
      entries.append([name, array.dtype, list(array.shape)])
    f.flush()
    os.fsync(f.fileno())
  return {'arrays': entries, 'sha256': digest.hexdigest()}


def _digest(contents: Mapping[str, Any]) -> str:
  return hashlib.sha256(
    json.dumps(contents, sort_keys=True).encode()
  ).hexdigest()


def _sync(path: str) -> None:
  """Syncs a file, or the names in a directory, to the disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _read_manifest(path: str) -> dict[str, Any]:
  try:
    with open(path, encoding='utf-8') as f:
      manifest = json.load(f)
    contents = manifest['contents']
    is_whole = manifest['sha256'] == _digest(contents)
  except (ValueError, KeyError, TypeError, RecursionError) as e:
    raise errors.DataError(f'{_MANIFEST} cannot be read ({e})') from e
  if not is_whole:
    raise errors.DataError(f'{_MANIFEST} differs from its own checksum')
  if contents['format'] != _FORMAT:
    raise errors.DataError(
      f'{_MANIFEST} is of another version: it has format '
      f'{contents["format"]}, expected {_FORMAT}'
    )
  return contents
