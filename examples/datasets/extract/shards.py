"""Writes the shards of one source file. A shard is complete or does not exist.

Example:

  >>> import os, tempfile
  >>> from examples.datasets.extract import shards
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   examples = [('train', b'%d' % i) for i in range(5)]
  ...   written = shards.write(
  ...     directory, 'toy', ('/raw/a.txt',), examples, 3, mtime_ns=10**18)
  ...   [(shard.name, shard.examples) for shard in written]
  [('toy-train-a-357a528e-00000.tfrecord', 3), ('toy-train-a-357a528e-00001.tfrecord', 2)]
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Sequence

import tensorflow as tf

from examples.datasets import manifest as manifest_lib

_STEM_LENGTH = 40
_SHARD = re.compile(
  r'(?P<name>[A-Za-z0-9_]+)-(train|test)-[A-Za-z0-9_]{1,40}-[0-9a-f]{8}-\d{5,}'
  r'\.tfrecord(\.tmp)?'
)


def is_shard(file_name: str) -> bool:
  """Returns whether a file name is that of a finished or unfinished shard."""
  return bool(_SHARD.fullmatch(file_name))


def write(
  directory: str,
  name: str,
  source_paths: Sequence[str],
  examples: Iterable[tuple[str, bytes]],
  examples_per_shard: int,
  mtime_ns: int,
) -> tuple[manifest_lib.Shard, ...]:
  """Writes examples to shards whose names contain the name of their source.

  Each shard is written under a temporary name, synced to disk and renamed. It gets
  the modification time of its source, so that a second extraction of the same source
  gives the same files.

  Args:
    directory: output directory.
    name: name of the data set.
    source_paths: absolute paths. They determine the names of the shards.
    examples: (split, serialized example).
    examples_per_shard: maximum number of examples in a shard.
    mtime_ns: modification time of the shards.

  Returns:
    The written shards, in order. Takes O(examples), with one open shard per split.
  """
  key = hashlib.sha256('\0'.join(source_paths).encode()).hexdigest()[:8]
  base = os.path.basename(source_paths[0]).split('.')[0]
  stem = re.sub(r'\W', '_', base, flags=re.ASCII)[:_STEM_LENGTH] or '_'
  open_shards: dict[str, _Shard] = {}
  counts: dict[str, int] = {}
  written = []
  with contextlib.ExitStack() as stack:
    for split, example in examples:
      if split not in open_shards:
        number = counts.get(split, 0)
        counts[split] = number + 1
        shard_name = f'{name}-{split}-{stem}-{key}-{number:05d}.tfrecord'
        open_shards[split] = stack.enter_context(
          _Shard(directory, shard_name, split)
        )
      shard = open_shards[split]
      shard.add(example)
      if shard.examples == examples_per_shard:
        written.append(open_shards.pop(split).finish(mtime_ns))
    for shard in open_shards.values():
      written.append(shard.finish(mtime_ns))
  return tuple(sorted(written, key=lambda shard: (shard.split, shard.name)))


class _Shard:
  """A shard that is being written. It is removed unless it is finished."""

  def __init__(self, directory: str, name: str, split: str):
    self.examples = 0
    self._name = name
    self._split = split
    self._path = os.path.join(directory, name)
    self._writer = tf.io.TFRecordWriter(f'{self._path}.tmp')

  def add(self, example: bytes) -> None:
    """Appends an example."""
    self._writer.write(example)
    self.examples += 1

  def finish(self, mtime_ns: int) -> manifest_lib.Shard:
    """Renames the finished shard."""
    temporary = f'{self._path}.tmp'
    self._writer.close()
    with open(temporary, 'rb') as f:
      os.fsync(f.fileno())
    os.utime(temporary, ns=(mtime_ns, mtime_ns))
    shard = manifest_lib.Shard(
      name=self._name,
      split=self._split,
      examples=self.examples,
      size=os.path.getsize(temporary),
      mtime_ns=mtime_ns,
      sha256=manifest_lib.sha256_of(temporary),
    )
    os.replace(temporary, self._path)
    return shard

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self._writer.close()
    with contextlib.suppress(FileNotFoundError):
      os.remove(f'{self._path}.tmp')
