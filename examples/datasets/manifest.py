"""The manifest of a directory that `extract` filled: the source of each shard.

It is a JSON file next to the shards with its own checksum, and is replaced atomically.
A truncated or edited manifest is detected and written again.

Example:

  >>> import tempfile
  >>> from examples.datasets import manifest
  >>> settings = manifest.Settings('mnist', 'builtin', 8192)
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   manifest.write(directory, manifest.Manifest(settings, (), True))
  ...   manifest.read_complete(directory).settings.name
  'mnist'
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os

from tf_strategies import errors

FILE = 'manifest.json'
FORMAT = 'tf_strategies.data.extract'
VERSION = 1
_CHUNK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Source:
  """A source file as it was when it was converted."""

  path: str
  size: int
  mtime_ns: int
  sha256: str


@dataclasses.dataclass(frozen=True)
class Shard:
  """A shard as it was written. Its time is that of its newest source."""

  name: str
  split: str
  examples: int
  size: int
  mtime_ns: int
  sha256: str


@dataclasses.dataclass(frozen=True)
class Entry:
  """Files that are converted together: one file, or several related files.

  Attributes:
    sources: the files.
    shards: their shards.
  """

  sources: tuple[Source, ...]
  shards: tuple[Shard, ...]

  @property
  def key(self) -> tuple[str, ...]:
    """The paths of the sources."""
    return tuple(source.path for source in self.sources)


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings that determine the shards, besides the sources.

  Attributes:
    name: the data set's name.
    converter: identifies the conversion function.
    examples_per_shard: maximum number of examples in a shard.
  """

  name: str
  converter: str
  examples_per_shard: int


@dataclasses.dataclass(frozen=True)
class Manifest:
  """The result of an extraction.

  Attributes:
    settings: settings of the extraction.
    entries: entries in the order of their sources.
    is_complete: whether the extraction was completed.
  """

  settings: Settings
  entries: tuple[Entry, ...]
  is_complete: bool

  @property
  def shards(self) -> tuple[Shard, ...]:
    """Returns all shards, in the order of the sources."""
    return tuple(s for entry in self.entries for s in entry.shards)


def is_extracted(directory: str | os.PathLike[str]) -> bool:
  """Returns whether `extract` has written to this directory."""
  return os.path.isfile(os.path.join(directory, FILE))


def read(directory: str | os.PathLike[str]) -> Manifest:
  """Reads the manifest of a directory.

  Raises:
    DataError: if it is missing, truncated, edited or of another version.
  """
  path = os.path.join(directory, FILE)
  try:
    with open(path, encoding='utf-8') as f:
      content = json.load(f)
    header = (content['format'], content['version'])
    if header != (FORMAT, VERSION):
      raise errors.DataError(
        f'{path}: is {header[0]!r} of version {header[1]!r}; expected '
        f'{FORMAT!r} of version {VERSION}, extract again'
      )
    if content['sha256'] != _checksum(content['data']):
      raise ValueError('its checksum is another one')
    return _from_json(content['data'])
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
    if isinstance(e, errors.DataError):
      raise
    raise errors.DataError(
      f'{path}: not a manifest ({e!r}); expected the one that `python -m '
      'examples.datasets.extract` writes, extract again'
    ) from e


def read_complete(directory: str | os.PathLike[str]) -> Manifest:
  """Reads the manifest of a directory with complete data.

  Raises:
    DataError: like `read`, and if the extraction was not completed, or a shard is
      missing or its size has changed.
  """
  where = os.fspath(directory)
  manifest = read(where)
  if not manifest.is_complete:
    raise errors.DataError(
      f'{where}: its extraction was interrupted; expected a complete one, run '
      '`python -m examples.datasets.extract` again'
    )
  for shard in manifest.shards:
    path = os.path.join(where, shard.name)
    size = os.path.getsize(path) if os.path.isfile(path) else None
    if size != shard.size:
      raise errors.DataError(
        f'{path}: {"missing" if size is None else f"{size} bytes"}; expected '
        f'{shard.size} bytes as they were extracted, run `python -m '
        'examples.datasets.extract` again'
      )
  return manifest


def is_intact(where: str, shard: Shard, checksum: bool = False) -> bool:
  """Returns whether a shard is unchanged, see `is_same`."""
  return is_same(os.path.join(where, shard.name), shard, checksum)


def is_same(path: str, was: Source | Shard, checksum: bool = False) -> bool:
  """Returns whether a file is unchanged.

  Args:
    path: the file.
    was: its earlier size, time and checksum.
    checksum: whether to read a file of the same size and time as well.

  Returns:
    False if the size differs. If the time is the same, True unless `checksum` is
    set and the checksum differs. If the time differs, for example after a copy,
    whether the checksum is the same.
  """
  try:
    status = os.stat(path)
    if status.st_size != was.size:
      return False
    if status.st_mtime_ns == was.mtime_ns and not checksum:
      return True
    return sha256_of(path) == was.sha256
  except OSError:
    return False


def write(directory: str | os.PathLike[str], manifest: Manifest) -> None:
  """Replaces the manifest atomically: readers see the old or the new one."""
  data = dataclasses.asdict(manifest)
  content = {
    'format': FORMAT,
    'version': VERSION,
    'sha256': _checksum(json.loads(json.dumps(data))),
    'data': data,
  }
  path = os.path.join(directory, FILE)
  temporary = f'{path}.tmp'
  try:
    with open(temporary, 'w', encoding='utf-8') as f:
      json.dump(content, f, indent=1, sort_keys=True)
      f.write('\n')
      f.flush()
      os.fsync(f.fileno())
    os.replace(temporary, path)
  finally:
    with contextlib.suppress(FileNotFoundError):
      os.remove(temporary)


def sha256_of(path: str) -> str:
  """Returns the checksum of a file, which is read in pieces."""
  digest = hashlib.sha256()
  with open(path, 'rb') as f:
    while chunk := f.read(_CHUNK_BYTES):
      digest.update(chunk)
  return digest.hexdigest()


def _checksum(data) -> str:
  return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _from_json(data) -> Manifest:
  return Manifest(
    Settings(**data['settings']),
    tuple(
      Entry(
        tuple(Source(**source) for source in entry['sources']),
        tuple(Shard(**shard) for shard in entry['shards']),
      )
      for entry in data['entries']
    ),
    data['is_complete'],
  )
