"""A cache of examples on disk that survives kills, damage and changed sources.

A cache on disk is a checkpoint that TensorFlow writes while the first epoch
runs, and names when it is whole: `<cache>.index` and
`<cache>.data-00000-of-00001`. A process that is killed before leaves
`<cache>_0.lockfile`, on which the next one would fail in its first step. A file
that was truncated later would fail in some step of some epoch. So the files are
checked when a dataset is made, and removed if they are of no use.

The name of a cache says what it holds: <prefix>-<data>-<key>-<version>. Another
key belongs to another pipeline and stays. Another version of the same key holds
sources that have changed since, and is removed unless a process fills it.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import glob
import hashlib
import os
import re
import threading
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf
from absl import logging

from tf_strategies import errors

# TensorFlow's file cache numbers elements with seven digits.
MAX_EXAMPLES = 10**7
_VERSION = re.compile(r'[0-9a-f]{12}')
# What TensorFlow and this file append to a cache's name.
_SUFFIX = re.compile(
  r'\.index|\.data-\d+-of-\d+|\.owner|'
  r'(_\d+)?\.lockfile|_\d+\.(index|data-\d+-of-\d+)(\.tempstate\d+)?'
  r'|\.(index|data-\d+-of-\d+)\.tempstate\d+'
)

# The caches that this process fills or has filled, by name: the open file
# whose lock says so. The kernel gives the lock back when the process ends.
_owned: dict[str, int] = {}
_owned_lock = threading.Lock()


class Name(NamedTuple):
  """Where a cache is, in parts."""

  stem: str
  version: str  # Changes with what is cached.

  @property
  def path(self) -> str:
    """What TensorFlow is told."""
    return f'{self.stem}-{self.version}'


def name_of(
  prefix: str | os.PathLike[str],
  data: str,
  key: Sequence[object],
  content: Sequence[object],
) -> Name:
  """Names the cache of some data.

  `key` tells this pipeline from others with the same prefix; `content` changes
  when the examples do.
  """
  stem = f'{os.path.abspath(prefix)}-{data}-{_digest(key)[:8]}'
  return Name(stem, _digest(content)[:12])


def on_disk(
  examples: tf.data.Dataset, name: Name, num_examples: int
) -> tf.data.Dataset:
  """Caches `num_examples` in their order, after removing files of no use."""
  if num_examples > MAX_EXAMPLES:
    raise errors.UnsupportedOptionError(
      f"cache='disk' with {num_examples} examples",
      f'{MAX_EXAMPLES} examples at most, which is what its files can number',
      "write cache='memory' or cache='none', or use more input pipelines",
    )
  try:
    os.makedirs(os.path.dirname(name.path), exist_ok=True)
    _remove_stale(name)
    if not _is_whole(examples, name, num_examples):
      _remove_unfinished(name, is_ours=_take(name))
  except OSError as e:
    raise errors.DataError(
      f'{name.path}: cannot be written ({e}). Fix: pass a cache_path in a '
      'directory with room for the decoded examples'
    ) from e
  return examples.cache(name.path)


def _is_whole(examples, name: Name, num_examples: int) -> bool:
  """Whether a finished cache is there and all of it can be read."""
  if not os.path.exists(f'{name.path}.index'):
    return False
  try:
    reader = tf.train.load_checkpoint(name.path)
    last = _last_key(reader, examples, num_examples)
    if last is not None:
      # It is at the end of the file; its checksum is verified.
      reader.get_tensor(last)
      return True
    problem = f'it does not hold {num_examples} examples'
  # TensorFlow's reader raises an IndexError for a file that ends too early, an
  # OpError or a ValueError for others.
  except Exception as e:
    problem = (str(e).splitlines() or [repr(e)])[0]
  logging.warning(
    'The cache %s is truncated or damaged (%s). It is removed, and the next '
    'epoch writes it again.',
    name.path,
    problem,
  )
  return False


def _last_key(reader, examples, num_examples: int) -> str | None:
  """The key of the last of the examples' values; None if it is not the last."""
  components = len(tf.nest.flatten(examples.element_spec))
  width = len(str(components - 1))

  def key(example, component):
    return f'{example:7d}_{component:{width}d}'

  last = key(num_examples - 1, components - 1)
  has_more = reader.has_tensor(key(num_examples, 0))
  return last if reader.has_tensor(last) and not has_more else None


def _take(name: Name) -> bool:
  """Makes this process the one that fills the cache; whether it was before."""
  with _owned_lock:
    if name.path in _owned:
      return True
    owner = os.open(f'{name.path}.owner', os.O_RDWR | os.O_CREAT, 0o666)
    try:
      fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      pid = os.read(owner, 32).decode(errors='replace').strip()
      os.close(owner)
      raise errors.UnsupportedOptionError(
        f'cache_path={name.stem!r}, which process {pid or "?"} fills now',
        'a prefix for each process that fills a cache',
        "put the worker's number into cache_path, or wait until the first "
        'epoch of the other process is over',
      ) from None
    except OSError as e:
      # No locks on this file system: nobody can tell a killed process from a
      # slow one, so nothing may be removed behind its back.
      os.close(owner)
      if _unfinished(name):
        raise errors.DataError(
          f'{name.path}: has unfinished files and its file system has no locks '
          f'({e}). Fix: remove these files if no process writes them'
        ) from e
      return False
    os.truncate(owner, 0)
    os.write(owner, b'%d\n' % os.getpid())
    _owned[name.path] = owner
    return False


def _remove_unfinished(name: Name, is_ours: bool) -> None:
  """Removes what a killed process left, or a cache that cannot be read."""
  found = _unfinished(name)
  if _has_lockfile(found):
    if is_ours:  # An iterator of this process is at it.
      return
    logging.warning(
      'The cache %s is unfinished, because its process was killed. It is '
      'removed, and the next epoch writes it again.',
      name.path,
    )
  _remove(found)


def _remove_stale(name: Name) -> None:
  """Removes caches of what the sources were before they changed."""
  versions = collections.defaultdict(list)
  for path in glob.glob(glob.escape(name.stem) + '-*'):
    rest = path[len(name.stem) + 1 :]
    if _VERSION.fullmatch(rest[:12]) and _SUFFIX.fullmatch(rest[12:]):
      versions[rest[:12]].append(path)
  versions.pop(name.version, None)
  for version, paths in versions.items():
    _remove_version(Name(name.stem, version), paths)


def _remove_version(old: Name, paths: Sequence[str]) -> None:
  """Removes the files of a cache, unless a process fills it."""
  lock = f'{old.path}.owner'
  files = [path for path in paths if path != lock]
  with _owned_lock:
    if old.path in _owned:
      # The lock stays: a data set of this process may fill the cache again.
      if not _has_lockfile(files):
        _remove_files(old, files)
      return
    owner = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    try:
      if _is_free(owner, files):
        _remove_files(old, [*files, lock])
    finally:
      os.close(owner)


def _is_free(owner: int, files: Sequence[str]) -> bool:
  """Locks the cache of no other process; False if it is that of another."""
  try:
    fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False  # It fills the cache, or has filled it and is still there.
  except OSError:  # No locks on this file system.
    return not _has_lockfile(files)
  return True


def _remove_files(old: Name, paths: Sequence[str]) -> None:
  if f'{old.path}.index' in paths:
    logging.warning(
      'The cache %s is of sources that have changed. It is removed.', old.path
    )
  _remove(paths)


def _has_lockfile(paths: Sequence[str]) -> bool:
  """Whether TensorFlow's mark of a cache that is being filled is there."""
  return any(path.endswith('.lockfile') for path in paths)


def _unfinished(name: Name) -> list[str]:
  """The files of a cache, but for the one that is its lock."""
  return [
    path
    for path in glob.glob(glob.escape(name.path) + '*')
    if _SUFFIX.fullmatch(path[len(name.path) :]) and path[-6:] != '.owner'
  ]


def _remove(paths: Sequence[str]) -> None:
  for path in paths:
    with contextlib.suppress(FileNotFoundError):
      os.remove(path)


def _digest(parts: Sequence[object]) -> str:
  return hashlib.sha256(repr(list(parts)).encode()).hexdigest()
