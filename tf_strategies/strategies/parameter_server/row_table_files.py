"""Tables without a vocabulary in checkpoints: their rows, by server and in blocks.

Of a table there are arrays with as many rows each: ids, rows, and each slot of the
optimizer. They are cut into pieces at the same rows, so whoever has read a piece of
the ids knows whether it needs those of the others. The rows of a server come one after
the other; a server that is one of as many as saved them needs no others. Rows that
changed after all were written follow in pieces of their own: of equal ids the last
counts. One that was removed then has zeros, as a row that was never used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tf_strategies.checkpoint import pieces
from tf_strategies.keras.row_table import IDS, ROWS, Column, is_gone
from tf_strategies.strategies.parameter_server import server_table

_Scope = Callable[[], contextlib.AbstractContextManager]


class Named(NamedTuple):
  """A table, and the names of its columns in a checkpoint, by key."""

  table: server_table.ServerTable
  names: dict[str, str]


def tables_among(named: Mapping[str, Any]) -> list[Named]:
  """The tables whose columns are among named variables."""
  found: dict[int, Named] = {}
  for name, column in named.items():
    if isinstance(column, Column):
      table = found.setdefault(id(column.table), Named(column.table, {}))
      table.names[column.key] = name
  return list(found.values())


def write(
  directory: str,
  stem: str,
  named: Named,
  shard: server_table.ServerShard,
  first: int,
  is_all: bool,
  scope: _Scope,
  block_bytes: int,
) -> dict[str, list[pieces.Piece]]:
  """Writes rows of a shard, from number `first` on; returns pieces by key.

  All of them, or those that changed since that.
  """
  ids = shard.stored()[0] if is_all else shard.changed.ids()
  _, rows = named.table.columns()
  count = max(1, block_bytes // (4 * rows.shape[1]))
  found = {key: [] for key in named.names}
  for begin in range(0, int(ids.shape[0]), count):
    with tf.device(shard.device):
      block = ids[begin : begin + count]
    for number, key in enumerate(found):
      values = block
      if key != IDS:
        values = shard.stored_of(block, key)
      with scope():
        file = f'{stem}-{begin}-{number}'
        found[key].append(pieces.write(directory, file, first + begin, values))
  return found


def joined(
  named: Named,
  before: Mapping[str, pieces.Table],
  shards: list[dict[str, list[pieces.Piece]]],
) -> dict[str, pieces.Table]:
  """The columns of a table by name: those before, and what was written of shards."""
  found = {}
  for column in [*named.table.columns(), *named.table.slot_columns()]:
    if column.key in named.names:
      name = named.names[column.key]
      parts = before[name].pieces if name in before else ()
      for shard in shards:
        parts += tuple(shard[column.key])
      shape = (sum(piece.rows for piece in parts), *column.shape[1:])
      found[name] = pieces.Table(column.dtype, shape, parts)
  return found


def read(
  named: Named,
  shard: server_table.ServerShard,
  blocks: Iterator[tuple[int, int]],
  rows_of: Callable[[str, int, int], tf.Tensor],
  scope: _Scope,
) -> None:
  """Has a shard hold those rows of a checkpoint that are its, and no others.

  Args:
    named: the table.
    shard: of it.
    blocks: first row and number of rows, of all rows.
    rows_of: reads a block of the array of a name, in `scope`.
    scope: makes a scope with the device that reads.
  """
  shard.clear()
  number = named.table.shards.index(shard)
  for block in blocks:
    ids = rows_of(named.names[IDS], *block)
    with scope():
      mine = tf.where(named.table.owner(ids) == number)[:, 0]
      if not int(mine.shape[0]):
        continue
      ids = tf.gather(ids, mine)
    for key, name in named.names.items():
      if key == IDS:
        continue
      values = rows_of(name, *block)
      with scope():
        values = tf.gather(values, mine)
        if key == ROWS:
          gone = tf.boolean_mask(ids, is_gone(values))
      shard.store(ids, {key: values})
    if int(gone.shape[0]):
      shard.forget(gone)
  shard.is_lost = False
