"""Converts all or only changed source files to TFRecord shards.

  python -m examples.datasets.extract --source=mnist.npz \
    --output_dir=mnist_tfrecords --mode=partial

Every source file has its own shards. A manifest lists them with the size, time and
checksum of the file. So if a file is changed, added or removed, only its own shards
are written. If a run is killed, readers refuse the directory until the next run has
completed it, with the same bytes.

Example:

  >>> import os, tempfile
  >>> from examples import datasets
  >>> def lines(path):
  ...   with open(path, 'rb') as f:
  ...     yield from f
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   path = os.path.join(directory, 'a.txt')
  ...   with open(path, 'wb') as f:
  ...     _ = f.write(b'one\\ntwo\\n')
  ...   for _ in range(2):
  ...     report = datasets.extract(
  ...       path, os.path.join(directory, 'out'), convert_fn=lines, name='toy')
  ...     print(report.converted == (path,), report.examples)
  True 2
  False 2
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import inspect
import os
import re
import time
from collections.abc import Callable

import tensorflow as tf
from absl import logging

from examples.datasets import manifest as manifest_lib
from examples.datasets.extract import converters, shards
from tf_strategies import errors

MODES = ('partial', 'full')
EXAMPLES_PER_SHARD = 8192
_NAME = re.compile(r'[A-Za-z0-9_]+')
_LOCK = '.extract.lock'
# Seconds of work that a killed run may lose, since the manifest lacks it.
_SAVE_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class Report:
  """The result of an extraction.

  Attributes:
    converted: source files whose shards were written.
    unchanged: source files whose shards did not change.
    removed: missing source files, whose shards were removed.
    examples: number of examples in all shards now.
    shards: number of shards now.
  """

  converted: tuple[str, ...]
  unchanged: tuple[str, ...]
  removed: tuple[str, ...]
  examples: int
  shards: int


def extract(
  sources: converters.Paths,
  directory: str | os.PathLike[str],
  convert_fn: converters.ConvertFn | None = None,
  *,
  mode: str = 'partial',
  name: str = 'mnist',
  split: str = 'train',
  checksum: bool = False,
  examples_per_shard: int = EXAMPLES_PER_SHARD,
  progress: Callable[[str], None] | None = None,
) -> Report:
  """Converts source files to TFRecord shards with a manifest beside them.

  Args:
    sources: a file, a pattern, a directory, or a list of these. Without a
      `convert_fn`, `.npz` files in the layout of Keras and directories of
      MNIST's IDX files. Shards of files that are no longer in `sources` are
      removed from the directory.
    directory: output directory; created if it is missing.
    convert_fn: called with the path of a source file, yields its examples in
      order, as bytes or `tf.train.Example`. If its source code changes, all files
      are converted again. Changes of functions that it calls are not detected: use
      mode='full' then.
    mode: 'partial' converts files that are new or changed since the last run,
      or whose shards are missing, truncated or edited; 'full' converts all.
    name: name of the data set, which is part of the names of shards.
    split: split of the examples of `convert_fn`.
    checksum: whether to compare the checksums of files whose size and time are
      unchanged. Checksums are always compared if only the time has changed.
    examples_per_shard: maximum number of examples in a shard.
    progress: function that is called with a line for each source file.

  Returns:
    A report. Takes O(bytes of changed files), and O(files).

  Raises:
    DataError: if a source is missing or cannot be converted, or if the directory
      cannot be written, contains another data set, or is in use by another process.
    UnsupportedOptionError: if an option is out of range.
  """
  _check(mode, name, examples_per_shard)
  units = converters.find_units(sources, convert_fn, split)
  settings = manifest_lib.Settings(
    name=name,
    converter=_name_of(convert_fn) if convert_fn else 'built in',
    examples_per_shard=int(examples_per_shard),
  )
  where = os.fspath(directory)
  for unit in units:
    if os.path.dirname(unit.paths[0]) == os.path.abspath(where):
      raise errors.DataError(
        f'{where}: holds the source {unit.paths[0]} too; expected another '
        'directory than that of the sources'
      )
  try:
    os.makedirs(where, exist_ok=True)
    with _locked(where):
      extraction = _Extraction(where, settings, checksum, progress)
      return extraction.run(units, is_full=mode == 'full')
  except (OSError, tf.errors.OpError) as e:
    raise errors.DataError(
      f'{where}: cannot be extracted to ({e}); expected readable sources and a '
      'directory with room for the shards'
    ) from e


def _name_of(convert_fn: converters.ConvertFn) -> str:
  """Returns a name that changes with the source of the function."""
  function = inspect.unwrap(convert_fn)
  try:
    source = inspect.getsource(function)
  except (OSError, TypeError):
    source = getattr(function, '__qualname__', type(function).__qualname__)
  return hashlib.sha256(source.encode()).hexdigest()[:16]


class _Extraction:
  """One run. The manifest never lists shards that differ from its entries."""

  def __init__(self, where, settings, checksum, progress):
    self._where = where
    self._settings = settings
    self._checksum = checksum
    self._progress = progress or (lambda line: None)
    self._saved_at = 0.0

  def run(self, units, is_full: bool) -> Report:
    """Converts changed files, or all, and removes the shards of missing files."""
    old = self._read_manifest()
    kept = {} if is_full else self._find_unchanged(units, old)
    keys = {unit.paths for unit in units}
    gone = [entry for entry in old.entries if entry.key not in keys]
    unchanged = [
      path for unit in units for path in unit.paths if unit.paths in kept
    ]
    changed = [unit for unit in units if unit.paths not in kept]
    if changed or gone or not old.is_complete:
      # Before anything else, since the shards change from here on.
      self._save(units, kept, is_complete=False)
      for entry in gone:
        self._progress(f'removed {_label(entry.key)}')
      self._remove_all_but(kept)
    for unit in units:
      if unit.paths in kept:
        self._progress(f'unchanged {_label(unit.paths)}')
        continue
      kept[unit.paths] = self._convert(unit)
      if time.monotonic() - self._saved_at > _SAVE_SECONDS:
        self._save(units, kept, is_complete=False)
    done = self._save(units, kept, is_complete=True)
    return Report(
      converted=tuple(path for unit in changed for path in unit.paths),
      unchanged=tuple(unchanged),
      removed=tuple(path for entry in gone for path in entry.key),
      examples=sum(shard.examples for shard in done.shards),
      shards=len(done.shards),
    )

  def _read_manifest(self) -> manifest_lib.Manifest:
    """Returns the manifest of the last run, or an empty one if it is unusable."""
    nothing = manifest_lib.Manifest(self._settings, (), False)
    if not manifest_lib.is_extracted(self._where):
      return nothing
    try:
      manifest = manifest_lib.read(self._where)
    except errors.DataError as e:
      logging.warning('%s. All files are converted.', e)
      return nothing
    if manifest.settings.name != self._settings.name:
      raise errors.DataError(
        f'{self._where}: holds {manifest.settings.name!r}; expected '
        f'{self._settings.name!r} or an empty directory, write to another one'
      )
    return manifest

  def _find_unchanged(self, units, old):
    """Returns the entries that need no conversion, by their sources."""
    if old.settings != self._settings:
      logging.warning(
        '%s was extracted by another convert_fn or with another '
        'examples_per_shard. All files are converted.',
        self._where,
      )
      return {}
    known = {entry.key: entry for entry in old.entries}
    found = {u.paths: self._as_it_was(known.get(u.paths)) for u in units}
    return {paths: entry for paths, entry in found.items() if entry}

  def _as_it_was(self, entry) -> manifest_lib.Entry | None:
    """Returns the entry if neither its sources nor its shards have changed."""
    if entry is None:
      return None
    for shard in entry.shards:
      if not manifest_lib.is_intact(self._where, shard, self._checksum):
        logging.warning(
          '%s is missing, truncated or edited; %s is converted again.',
          os.path.join(self._where, shard.name),
          _label(entry.key),
        )
        return None
    for source in entry.sources:
      if not manifest_lib.is_same(source.path, source, self._checksum):
        return None
    # Next time, a file with a new time but equal content need not be read.
    return dataclasses.replace(
      entry,
      sources=tuple(
        dataclasses.replace(s, mtime_ns=os.stat(s.path).st_mtime_ns)
        for s in entry.sources
      ),
    )

  def _convert(self, unit) -> manifest_lib.Entry:
    sources = tuple(map(_describe, unit.paths))
    written = shards.write(
      self._where,
      self._settings.name,
      unit.paths,
      unit.convert(),
      self._settings.examples_per_shard,
      max(source.mtime_ns for source in sources),
    )
    if sources != tuple(map(_describe, unit.paths)):
      raise errors.DataError(
        f'{_label(unit.paths)}: changed while it was converted; expected a '
        'source that rests, extract again'
      )
    counts = {}
    for shard in written:
      counts[shard.split] = counts.get(shard.split, 0) + shard.examples
    total = ' + '.join(f'{counts[s]} {s}' for s in sorted(counts, reverse=True))
    self._progress(
      f'converted {_label(unit.paths)}: {total or "0"} examples in '
      f'{len(written)} shards'
    )
    return manifest_lib.Entry(sources, written)

  def _save(self, units, kept, is_complete: bool) -> manifest_lib.Manifest:
    """Writes the manifest, unless it is already the same."""
    entries = tuple(kept[u.paths] for u in units if u.paths in kept)
    manifest = manifest_lib.Manifest(self._settings, entries, is_complete)
    with contextlib.suppress(errors.DataError):
      if manifest_lib.read(self._where) == manifest:
        return manifest
    manifest_lib.write(self._where, manifest)
    self._saved_at = time.monotonic()
    return manifest

  def _remove_all_but(self, kept) -> None:
    """Removes only the shards that the manifest does not list."""
    names = {s.name for entry in kept.values() for s in entry.shards}
    for file_name in os.listdir(self._where):
      if shards.is_shard(file_name) and file_name not in names:
        os.remove(os.path.join(self._where, file_name))


def _check(mode, name, examples_per_shard):
  if mode not in MODES:
    raise errors.UnsupportedOptionError(
      f'mode={mode!r}', "'partial' or 'full'", "write mode='partial'"
    )
  if not isinstance(name, str) or not _NAME.fullmatch(name):
    raise errors.UnsupportedOptionError(
      f'name={name!r}', 'letters, digits and underscores', "write name='mnist'"
    )
  if examples_per_shard < 1:
    raise errors.UnsupportedOptionError(
      f'examples_per_shard={examples_per_shard}',
      'an integer of at least 1',
      f'leave it out for {EXAMPLES_PER_SHARD}',
    )


@contextlib.contextmanager
def _locked(where: str):
  """Holds a lock against other extractions. It ends with the process."""
  with open(os.path.join(where, _LOCK), 'ab') as f:
    try:
      fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise errors.DataError(
        f'{where}: another process extracts to it; expected one at a time, '
        'wait for it or write to another directory'
      ) from None
    yield


def _describe(path: str) -> manifest_lib.Source:
  status = os.stat(path)
  return manifest_lib.Source(
    path, status.st_size, status.st_mtime_ns, manifest_lib.sha256_of(path)
  )


def _label(paths) -> str:
  return ' + '.join(paths)
