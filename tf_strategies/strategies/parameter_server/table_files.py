"""Tables in checkpoints: rows go between servers and files.

A table is a large variable, or a table without a vocabulary. A server that sees the
directory of the checkpoints writes and reads the rows that it holds. For one that does
not, the coordinator does, block by block. So nobody holds more than a block beside the
variables, and rows that were saved on some servers are read on any others.

A variable is one array. A table without a vocabulary is several arrays with as many
rows each: ids, rows, and each slot of the optimizer. They are cut into pieces at the
same rows, so whoever has read a piece of the ids knows whether it needs the others.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from tf_strategies import _tf_internal
from tf_strategies.checkpoint import checkpointer, model_state, pieces
from tf_strategies.keras.tables import row_table
from tf_strategies.strategies.parameter_server import partitioned, variables

# The coordinator saves smaller variables together.
_TABLE_BYTES = 1 << 20
# Bytes in memory at a time, on a server and in the coordinator.
_SERVER_BLOCK_BYTES = 32 << 20
_COORDINATOR_BLOCK_BYTES = 2 << 20
_COORDINATOR = '/device:CPU:0'

_Part = tuple[variables.ServerVariable, int]  # With its first row.
# Takes the name of an array, the number of a shard's first row, and rows.
_Write = Callable[[str, int, tf.Tensor], None]


class _Site(NamedTuple):
  """A task that writes or reads files, and how many bytes it holds at a time."""

  device: str
  block_bytes: int


def _is_large(shape: Sequence[int], dtype: tf.DType) -> bool:
  """Returns whether a variable is saved by its server."""
  if not shape or dtype == tf.string:
    return False
  return math.prod(shape) * dtype.size >= _TABLE_BYTES


def parts_of(variable: Any) -> list[_Part]:
  """Returns the parts of a variable on servers, each with its first row."""
  value = model_state.value_of(variable)
  if isinstance(value, partitioned.PartitionedVariable):
    return list(zip(value.parts, value.offsets, strict=True))
  if isinstance(value, variables.ServerVariable):
    return [(value, 0)]
  return []


class VariableRows:
  """The rows of a variable that one server holds."""

  def __init__(self, name: str, holder: variables.ServerVariable, first: int):
    self.holder = holder
    self.specs = {name: (holder.dtype.name, tuple(holder.shape[1:]))}
    self._name, self._first = name, first
    self._row_bytes = holder.shape[1:].num_elements() * holder.dtype.size

  def size(self) -> int:
    """Returns the number of rows."""
    return int(self.holder.shape[0])

  def save(self, write: _Write, block_bytes: int) -> None:
    """Passes all rows to `write`, in blocks."""
    count = _rows_in(block_bytes, self._row_bytes)
    for begin in range(0, self.size(), count):
      end = min(begin + count, self.size())
      with tf.device('/device:CPU:0'):
        numbers = tf.range(begin, end, dtype=tf.int64)
      with tf.device(self.holder.device):
        rows = self.holder.rows_directly(numbers)
      write(self._name, begin, rows)
    self._end_sparse_access()

  def restore(self, stored: _Stored) -> None:
    """Assigns the rows that a checkpoint has."""
    for begin, rows in stored.blocks(self._name, self._first, self.size()):
      self.holder.write_rows_directly(begin, rows)
    self._end_sparse_access()
    self.holder.is_lost = False

  def _end_sparse_access(self) -> None:
    """Gathering made reads of the whole copy it, until rows are written again."""
    with tf.device(self.holder.device):
      tf.raw_ops.DisableCopyOnRead(resource=self.holder.handle)


class TableRows:
  """The rows of a table without a vocabulary that one server holds.

  Args:
    table: the table.
    names: of its columns in a checkpoint, by key.
    holder: one of its shards.
  """

  def __init__(
    self,
    table: row_table.RowTable,
    names: Mapping[str, str],
    holder: partitioned.ServerShard,
  ):
    self.holder = holder
    self._table, self._names = table, names
    self.specs = {
      names[column.key]: (column.dtype, column.shape[1:])
      for column in [*table.columns(), *table.slot_columns()]
      if column.key in names
    }
    widths = [math.prod(shape) for _, shape in self.specs.values()]
    self._row_bytes = 4 * max(widths)

  def size(self) -> int:
    """Returns the number of rows."""
    return self.holder.size()

  def save(self, write: _Write, block_bytes: int) -> None:
    """Passes all rows to `write`, in blocks."""
    ids, _ = self.holder.stored()
    count = _rows_in(block_bytes, self._row_bytes)
    for begin in range(0, int(ids.shape[0]), count):
      with tf.device(self.holder.device):
        block = ids[begin : begin + count]
      for key, name in self._names.items():
        is_ids = key == row_table.IDS
        rows = block if is_ids else self.holder.stored_of(block, key)
        write(name, begin, rows)

  def restore(self, stored: _Stored) -> None:
    """Replaces all rows by the rows of a checkpoint that belong to the shard."""
    self.holder.clear()
    number = self._table.shards.index(self.holder)
    ids_name = self._names[row_table.IDS]
    for piece in stored.arrays.specs[ids_name].pieces:
      first, count = piece.first, piece.rows
      ids = stored.rows(ids_name, first, count)
      with tf.device(stored.device):
        mine = tf.where(self._table.owner(ids) == number)[:, 0]
        ids = tf.gather(ids, mine)
      if not int(mine.shape[0]):
        continue
      for key, name in self._names.items():
        if key != row_table.IDS:
          rows = stored.rows(name, first, count)
          with tf.device(stored.device):
            rows = tf.gather(rows, mine)
          self.holder.store(ids, {key: rows})
    self.holder.is_lost = False


# The rows of a table, server by server.
Table = Sequence[VariableRows | TableRows]


def tables_among(named: Mapping[str, Any]) -> list[Table]:
  """Returns the tables among variables and columns by name."""
  found: list[Table] = []
  columns: dict[row_table.RowTable, dict[str, str]] = {}
  for name, variable in named.items():
    if isinstance(variable, row_table.Column):
      columns.setdefault(variable.table, {})[variable.key] = name
    elif (
      (parts := parts_of(variable))
      and not model_state.has_parts(variable)
      and _is_large(variable.shape, tf.as_dtype(variable.dtype))
    ):
      found.append([VariableRows(name, *part) for part in parts])
  for table, names in columns.items():
    found.append([TableRows(table, names, shard) for shard in table.shards])
  return found


class _Stored(NamedTuple):
  """The arrays of a checkpoint, as a task with this device reads them."""

  path: str
  arrays: checkpointer.StoredArrays
  device: str

  def blocks(
    self, name: str, first: int, size: int
  ) -> Iterator[tuple[int, tf.Tensor]]:
    """Yields blocks of rows; see `pieces.rows_of`."""
    table = self.arrays.specs[name]
    return pieces.rows_of(self.path, table, first, size, self.device)

  def rows(self, name: str, first: int, count: int) -> tf.Tensor:
    """Returns rows of an array as one tensor."""
    found = [rows for _, rows in self.blocks(name, first, count)]
    with tf.device(self.device):
      return tf.concat(found, 0)


class TableFiles:
  """Saves tables of servers to files, and restores them."""

  def __init__(self, num_servers: int):
    self._servers = range(num_servers)
    self._blind: frozenset[int] = frozenset()

  def save(
    self, directory: str, tables: Sequence[Table]
  ) -> dict[str, pieces.Table]:
    """Writes the rows of tables into a directory; no step may be running."""
    if not tables:
      return {}
    directory = os.path.abspath(directory)
    for shard in (shard for table in tables for shard in table):
      shard.holder.check_is_whole()
    sees = self._servers_that_see(directory)
    work: list[tuple[int, Callable[[_Site], Any]]] = []
    for number, table in enumerate(tables):
      first = 0
      for index, shard in enumerate(table):
        stem = f't{number}-{index}'
        write = functools.partial(_write, directory, stem, shard, first)
        work.append((shard.holder.server, write))
        first += shard.size()
    written = iter(self._do(work, sees))
    found: dict[str, pieces.Table] = {}
    for table in tables:
      parts = [next(written) for _ in table]
      for name, (dtype, inner) in table[0].specs.items():
        of_name = tuple(piece for part in parts for piece in part[name])
        rows = sum(piece.rows for piece in of_name)
        found[name] = pieces.Table(dtype, (rows, *inner), of_name)
    return found

  def check(self, path: str, tables: Mapping[str, pieces.Table]) -> None:
    """Compares all checksums, each server those of some files.

    Raises:
      DataError: a file is damaged.
    """
    path = os.path.abspath(path)
    sees = self._servers_that_see(path)
    readers = sorted(sees) or [0]

    def check(site, piece, dtype):
      with tf.device(site.device):
        pieces.check(path, piece, dtype)

    found = [(p, t.dtype) for t in tables.values() for p in t.pieces]
    work = [
      (
        readers[i % len(readers)],
        functools.partial(check, piece=piece, dtype=dtype),
      )
      for i, (piece, dtype) in enumerate(found)
    ]
    self._do(work, sees)

  def restore(
    self,
    path: str,
    arrays: checkpointer.StoredArrays,
    tables: Sequence[Table],
  ) -> None:
    """Assigns tables the rows of a checkpoint."""
    path = os.path.abspath(path)
    work = [
      (shard.holder.server, functools.partial(_restore, shard, path, arrays))
      for table in tables
      for shard in table
    ]
    if work:
      self._do(work, self._servers_that_see(path))

  def _do(
    self,
    work: Sequence[tuple[int, Callable[[_Site], Any]]],
    sees: frozenset[int],
  ) -> list[Any]:
    """Does all work of (server, action): each server its own, at the same time.

    The coordinator does, in turn, the work of servers that see no files.
    """
    queues: dict[int | None, list[int]] = {}
    for index, (server, _) in enumerate(work):
      queues.setdefault(server if server in sees else None, []).append(index)
    results: dict[int, Any] = {}

    def run(server):
      site = _Site(_COORDINATOR, _COORDINATOR_BLOCK_BYTES)
      if server is not None:
        site = _Site(variables.server_device(server), _SERVER_BLOCK_BYTES)
      with _tf_internal.own_executor(), tf.init_scope():
        for index in queues[server]:
          results[index] = work[index][1](site)

    if len(queues) == 1:
      run(next(iter(queues)))
    elif queues:
      with concurrent.futures.ThreadPoolExecutor(
        len(queues), 'tfs-table-files'
      ) as threads:
        # If there are several errors, the error of a lost server is the cause.
        done = [threads.submit(run, server) for server in queues]
        failed = [f.exception() for f in done if f.exception() is not None]
      for kind in (tf.errors.OpError, BaseException):
        for error in failed:
          if isinstance(error, kind):
            raise error
    return [results[i] for i in range(len(work))]

  def _servers_that_see(self, directory: str) -> frozenset[int]:
    """Returns the servers that write where this process reads, and the reverse."""
    token = uuid.uuid4().hex
    probe = os.path.join(directory, f'probe-{token}')
    with open(probe, 'w') as f:
      f.write(token)
    try:
      found = {s for s in self._servers if self._sees(s, probe, token)}
    finally:
      os.remove(probe)
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

  def _sees(self, server: int, probe: str, token: str) -> bool:
    """Returns whether a server reads a file of this process, and the reverse."""
    answer = f'{probe}-{server}'
    device = variables.server_device(server)
    with contextlib.suppress(*_UNSEEN):
      with _tf_internal.on_task(device, probe, answer, token) as [read, *write]:
        if tf.io.read_file(read).numpy() != token.encode():
          return False
        tf.io.write_file(*write)
      try:
        with open(answer) as f:
          return f.read() == token
      finally:
        os.remove(answer)
    return False


# What a server raises for a file that is not there, or not to be written.
_UNSEEN = (
  tf.errors.NotFoundError,
  tf.errors.PermissionDeniedError,
  tf.errors.FailedPreconditionError,
  tf.errors.UnimplementedError,
  tf.errors.InvalidArgumentError,
  OSError,
)


def _write(
  directory: str,
  stem: str,
  shard: VariableRows | TableRows,
  first: int,
  site: _Site,
) -> dict[str, list[pieces.PieceFile]]:
  """Writes the rows of a shard, from number `first` on; returns pieces by name."""
  found = {name: [] for name in shard.specs}

  def write(name, begin, rows):
    file = f'{stem}-{list(found).index(name)}-{begin}'
    with tf.device(site.device):
      piece = pieces.write(directory, file, first + begin, rows)
    found[name].append(piece)

  shard.save(write, site.block_bytes)
  return found


def _restore(
  shard: VariableRows | TableRows,
  path: str,
  arrays: checkpointer.StoredArrays,
  site: _Site,
) -> None:
  shard.restore(_Stored(path, arrays, site.device))


def _rows_in(block_bytes: int, row_bytes: int) -> int:
  return max(1, block_bytes // max(1, row_bytes))
