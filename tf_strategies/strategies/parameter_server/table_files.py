"""Large variables in checkpoints: their rows go between servers and files.

A server that sees the directory of the checkpoints writes and reads the rows that
it holds. For one that does not, the coordinator does, block by block. So nobody
holds more than a block beside the variables, and rows that were saved on some
servers are read on any others. Rows that have not changed since they were saved are
not written again: a checkpoint shares the files of the one before.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import math
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from absl import logging

from tf_strategies import _tf_internal
from tf_strategies.checkpoint import checkpointer, model_state, pieces
from tf_strategies.strategies.parameter_server import (
  partitioned,
  row_table_files,
  variables,
)

# What is smaller is saved with all others, by the coordinator.
_TABLE_BYTES = 1 << 20
# Of what is in memory at a time, on a server; and in the coordinator.
_SERVER_BLOCK_BYTES = 32 << 20
_COORDINATOR_BLOCK_BYTES = 2 << 20
# A checkpoint writes all rows of a table again if more than this part of them has
# changed, or after so many that shared its files: damage to one costs no more.
_MAX_CHANGED = 0.5
_MAX_SHARED = 10
_COORDINATOR = '/device:CPU:0'

_T = TypeVar('_T')
_Part = tuple[variables.ServerVariable, int]  # With its first row.


def is_table(shape: Sequence[int], dtype: tf.DType) -> bool:
  """Returns whether a variable is saved by its server."""
  if not shape or dtype == tf.string:
    return False
  return math.prod(shape) * dtype.size >= _TABLE_BYTES


def parts_of(variable: Any) -> list[_Part] | None:
  """The parts of a variable on servers, with the first row of each."""
  value = model_state.value_of(variable)
  if isinstance(value, partitioned.PartitionedVariable):
    return list(zip(value.parts, value.offsets, strict=True))
  if isinstance(value, variables.ServerVariable):
    return [(value, 0)]
  return None


def names_of(
  tables: Iterable[str], row_tables: Iterable[row_table_files.Named]
) -> set[str]:
  """The names of what has files of its own in a checkpoint."""
  names = (name for each in row_tables for name in each.names.values())
  return {*tables, *names}


def tables_among(named: Mapping[str, Any]) -> dict[str, list[_Part]]:
  """The parts of those variables that are tables."""
  found = {}
  for name, variable in named.items():
    parts = parts_of(variable)
    if (
      parts is not None
      and not model_state.has_parts(variable)
      and is_table(variable.shape, tf.as_dtype(variable.dtype))
    ):
      found[name] = parts
  return found


class TableFiles:
  """Saves tables of servers to files, and restores them."""

  def __init__(self, num_servers: int):
    self._servers = range(num_servers)
    # The newest checkpoint; each table as it was when it was written whole, whose
    # files that has.
    self._newest = ''
    self._whole: dict[str, pieces.Table] = {}
    # How many checkpoints since all tables were written whole.
    self._shared = 0
    # What was written whole, but not yet committed: parts or shards by name.
    self._written: dict[str, list[Any]] = {}
    self._blind: frozenset[int] = frozenset()

  def forget(self) -> None:
    """What was saved is not what servers hold: the next save writes all."""
    self._whole = {}

  def save(
    self,
    directory: str,
    tables: Mapping[str, list[_Part]],
    row_tables: Sequence[row_table_files.Named] = (),
  ) -> dict[str, pieces.Table]:
    """Writes the rows of tables into a directory; no step may be running.

    `commit` must be called once they are part of a checkpoint.
    """
    self._written = {}
    if not tables and not row_tables:
      return {}
    directory = os.path.abspath(directory)
    for part in [
      *(part for parts in tables.values() for part, _ in parts),
      *(shard for named in row_tables for shard in named.table.shards),
    ]:
      part.check_is_whole()
    sees = self._servers_that_see(directory)
    found: dict[str, pieces.Table] = {}
    work: list[tuple[int, Callable[[], Any]]] = []
    for number, (name, parts) in enumerate(tables.items()):
      # No other checkpoint's file has this name.
      stem = f't{number}-{uuid.uuid4().hex[:12]}'
      holders = [part for part, _ in parts]
      shares = self._shares(directory, [name], holders, _rows(parts))
      write = self._write_changed if shares else self._write_all
      for index, (part, first) in enumerate(parts):
        file = f'{stem}-{index}'
        work.append(
          (
            part.server,
            functools.partial(write, directory, file, part, first),
          )
        )
    for named in row_tables:
      work += self._writes_of(named, directory)
    written = iter(self._do(work, sees))
    for name, parts in tables.items():
      results = tuple(each for _ in parts for each in next(written))
      if name in self._written:
        first, _ = parts[0]
        shape = (_rows(parts), *first.shape[1:].as_list())
        found[name] = pieces.Table(first.dtype.name, shape, results)
      else:
        found[name] = self._whole[name]._replace(changes=results)
    for named in row_tables:
      shards = [next(written) for _ in named.table.shards]
      is_all = named.names[row_table_files.IDS] in self._written
      before = {} if is_all else self._whole
      found |= row_table_files.joined(named, before, shards)
    return found

  def _writes_of(self, named: row_table_files.Named, directory: str):
    shards, names = named.table.shards, list(named.names.values())
    sizes = [shard.size() for shard in shards]
    shares = self._shares(directory, names, shards, sum(sizes))
    first, stem = 0, f'r{uuid.uuid4().hex[:12]}'
    if shares:
      # Behind those that are there.
      first = self._whole[names[0]].shape[0]
      sizes = [shard.changed.count() for shard in shards]
    work = []
    for number, shard in enumerate(shards):
      write = functools.partial(
        row_table_files.write,
        directory,
        f'{stem}-{number}',
        named,
        shard,
        first,
        not shares,
      )
      work.append((shard.server, write))
      first += sizes[number]
    return work

  def commit(self, path: str, tables: Mapping[str, pieces.Table]) -> None:
    """What `save` wrote is part of a checkpoint."""
    self._newest = os.path.abspath(path)
    self._whole = {
      name: table if name in self._written else self._whole[name]
      for name, table in tables.items()
    }
    is_whole = len(self._written) == len(tables)
    self._shared = 0 if is_whole else self._shared + 1
    for parts in self._written.values():
      for part in parts:
        if part.changed is not None:
          part.changed.forget()
    self._written = {}

  def _shares(
    self,
    directory: str,
    names: Sequence[str],
    parts: Sequence[Any],
    rows: int,
  ) -> bool:
    """Takes over the files of arrays, where only some of their rows changed.

    Returns whether it did; else parts are to be written whole.
    """
    shares = (
      self._shared < _MAX_SHARED
      and all(name in self._whole for name in names)
      and all(part.changed is not None for part in parts)
      and sum(part.changed.count() for part in parts) <= _MAX_CHANGED * rows
      and all(self._link(directory, name) for name in names)
    )
    if not shares:
      self._written |= {**dict.fromkeys(names, ()), names[0]: parts}
    return shares

  def _link(self, directory: str, name: str) -> bool:
    """Takes over the files of an array; returns whether that worked."""
    try:
      for piece in self._whole[name].pieces:
        for old, new in zip(
          pieces.paths(self._newest, piece),
          pieces.paths(directory, piece),
          strict=True,
        ):
          os.link(old, new)
    except OSError as e:
      logging.warning(
        '%s is saved whole, since the file system has no links: %s', name, e
      )
      return False
    return True

  def _write_all(self, directory, file, part, first, scope, block_bytes):
    """Writes all rows of a part."""
    size = int(part.shape[0])
    count = _rows_in(block_bytes, part)
    found = []
    for begin in range(0, size, count):
      rows = _gather(part, begin, min(begin + count, size))
      with scope():
        name = f'{file}-{begin}'
        found.append(pieces.write(directory, name, first + begin, rows))
    _end_sparse_access(part)
    return found

  def _write_changed(self, directory, file, part, first, scope, block_bytes):
    """Writes the rows of a part that changed."""
    numbers = part.changed.numbers()
    count = _rows_in(block_bytes, part)
    found = []
    for begin in range(0, int(numbers.shape[0]), count):
      with tf.device(part.device):
        block = numbers[begin : begin + count]
        rows = part.rows_directly(block)
        block += first
      with scope():
        name = f'{file}-changed-{begin}'
        found.append(
          pieces.Change(
            pieces.write(directory, f'{name}-numbers', 0, block),
            pieces.write(directory, name, 0, rows),
          )
        )
    _end_sparse_access(part)
    return found

  def check(self, path: str, tables: Mapping[str, pieces.Table]) -> None:
    """Compares all checksums, each server those of some files.

    Raises:
      DataError: a file is damaged.
    """
    path = os.path.abspath(path)
    sees = self._servers_that_read(path)
    readers = sorted(sees) or [0]

    def check(piece, dtype, scope, block_bytes):
      del block_bytes
      with scope():
        pieces.check(path, piece, dtype)

    found = [each for table in tables.values() for each in table.all_pieces]
    work = [
      (
        readers[i % len(readers)],
        functools.partial(check, piece, dtype),
      )
      for i, (piece, dtype) in enumerate(found)
    ]
    self._do(work, sees)

  def restore(
    self,
    path: str,
    arrays: checkpointer.StoredArrays,
    parts: Mapping[str, Sequence[_Part]],
    row_tables: Sequence[row_table_files.Named] = (),
    only_lost: bool = False,
  ) -> None:
    """Writes rows of a checkpoint into parts of variables, by name, and tables.

    Of these, if `only_lost`, into the shards that were lost.
    """
    path = os.path.abspath(path)
    sees = self._servers_that_read(path) if arrays.tables else frozenset()
    work = []

    def add(server, name, read, *arguments):
      # Arrays are in one file, whose position one reader moves.
      reader = server if name in arrays.tables else None
      work.append((reader, functools.partial(read, path, arrays, *arguments)))

    for name, found in parts.items():
      for part, first in found:
        add(part.server, name, self._read, name, part, first)
    for named in row_tables:
      for shard in named.table.shards:
        if shard.is_lost or not only_lost:
          name = named.names[row_table_files.IDS]
          add(shard.server, name, self._read_shard, named, shard)
    self._do(work, sees)

  def _read_shard(self, path, arrays, named, shard, scope, block_bytes):
    del block_bytes
    ids = named.names[row_table_files.IDS]
    size = arrays.specs[ids].shape[0]
    if ids in arrays.tables:
      blocks = [(p.first, p.rows) for p in arrays.tables[ids].pieces]
    else:
      widths = [arrays.specs[name].shape[1:] for name in named.names.values()]
      row_bytes = 4 * max(math.prod(width) for width in widths)
      count = max(1, _COORDINATOR_BLOCK_BYTES // row_bytes)
      blocks = [(i, min(count, size - i)) for i in range(0, size, count)]

    def rows_of(name, first, rows):
      found = _blocks(path, arrays, name, first, rows, rows, scope)
      with scope():
        return tf.concat([values for _, values in found], 0)

    row_table_files.read(named, shard, blocks, rows_of, scope)

  def _read(self, path, arrays, name, part, first, scope, block_bytes):
    size = int(part.shape[0])
    count = _rows_in(_COORDINATOR_BLOCK_BYTES, part)
    for numbers, rows in _blocks(path, arrays, name, first, size, count, scope):
      part.write_rows_directly(numbers, rows)
    _end_sparse_access(part)
    part.is_lost = False

  def _do(
    self, work: Sequence[tuple[int | None, Callable]], sees: frozenset[int]
  ) -> list[Any]:
    """Does all work of (server, action): each server its own, at the same time.

    None for the coordinator.

    What the coordinator does for servers that see no files it does in turn.
    """
    queues: dict[int | None, list[int]] = {}
    for index, (server, _) in enumerate(work):
      queues.setdefault(server if server in sees else None, []).append(index)
    results: dict[int, Any] = {}

    def run(server):
      device = (
        _COORDINATOR if server is None else variables.server_device(server)
      )
      block = (
        _COORDINATOR_BLOCK_BYTES if server is None else _SERVER_BLOCK_BYTES
      )
      with _tf_internal.own_executor(), tf.init_scope():
        for index in queues[server]:
          results[index] = work[index][1](
            scope=lambda: tf.device(device), block_bytes=block
          )

    if len(queues) == 1:
      run(next(iter(queues)))
    elif queues:
      with concurrent.futures.ThreadPoolExecutor(
        len(queues), 'tfs-table-files'
      ) as threads:
        # Of several errors that of a lost server says why.
        done = [threads.submit(run, server) for server in queues]
        failed = [f.exception() for f in done if f.exception() is not None]
      for kind in (tf.errors.OpError, BaseException):
        for error in failed:
          if isinstance(error, kind):
            raise error
    return [results[i] for i in range(len(work))]

  def _servers_that_see(self, directory: str) -> frozenset[int]:
    """The servers that write where this process reads, and read what it writes."""
    token = uuid.uuid4().hex
    probe = os.path.join(directory, f'probe-{token}')
    with open(probe, 'w') as f:
      f.write(token)

    def sees(server):
      answer = f'{probe}-{server}'
      with tf.device(variables.server_device(server)):
        if tf.io.read_file(probe).numpy() != token.encode():
          return False
        tf.io.write_file(answer, token)
      try:
        with open(answer) as f:
          return f.read() == token
      finally:
        os.remove(answer)

    try:
      return self._asked(sees, directory)
    finally:
      os.remove(probe)

  def _servers_that_read(self, path: str) -> frozenset[int]:
    """The servers that see a checkpoint."""
    manifest = os.path.join(path, 'manifest.json')
    with open(manifest, 'rb') as f:
      content = f.read()

    def sees(server):
      with tf.device(variables.server_device(server)):
        # Whether it is the same one is computed there.
        return bool(tf.io.read_file(manifest) == content)

    return self._asked(sees, path)

  def _asked(self, sees: Callable[[int], bool], directory) -> frozenset[int]:
    found = set()
    for server in self._servers:
      with contextlib.suppress(*_UNSEEN), _tf_internal.own_executor():
        if sees(server):
          found.add(server)
    blind = frozenset(self._servers) - found
    if blind != self._blind:
      self._blind = blind
      directory = os.path.dirname(directory)
      if blind:
        logging.warning(
          'Servers %s do not see %s: the coordinator writes and reads their rows, '
          'in blocks. In a directory that all tasks see they do it themselves.',
          sorted(blind),
          directory,
        )
      else:
        logging.info('All servers see %s.', directory)
    return frozenset(found)


# What a server raises for a file that is not there, or not to be written.
_UNSEEN = (
  tf.errors.NotFoundError,
  tf.errors.PermissionDeniedError,
  tf.errors.FailedPreconditionError,
  tf.errors.UnimplementedError,
  tf.errors.InvalidArgumentError,
  OSError,
)


def _rows(parts: Sequence[_Part]) -> int:
  return sum(int(part.shape[0]) for part, _ in parts)


def _rows_in(block_bytes: int, variable) -> int:
  row = variable.shape[1:].num_elements() * variable.dtype.size
  return max(1, block_bytes // max(1, row))


def _gather(part, begin: int, end: int) -> tf.Tensor:
  with tf.device(part.device):
    return part.rows_directly(tf.range(begin, end, dtype=tf.int64))


def _end_sparse_access(part) -> None:
  """Gathering made reads of the whole copy it, until rows are written again."""
  with tf.device(part.device):
    tf.raw_ops.DisableCopyOnRead(resource=part.handle)


def _blocks(
  path, arrays, name, first, size, count, scope
) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
  """As `pieces.rows_of`; of what is no table `count` rows at a time."""
  if name in arrays.tables:
    yield from pieces.rows_of(path, arrays.tables[name], first, size, scope)
    return
  for begin in range(0, size, count):
    rows = min(count, size - begin)
    values = arrays.rows(name, first + begin, rows)
    with tf.device(_COORDINATOR):
      numbers = tf.range(begin, begin + rows, dtype=tf.int64)
      yield numbers, tf.constant(values)
