"""Tables in checkpoints: rows go between servers and files, block by block.

A table is a large variable, or a table without a vocabulary. The chief reads and
writes all files, so tasks need no common file system. It holds a block of rows beside
its variables. Rows that were saved on some servers are restored on any others.

A variable is one array. A table without a vocabulary is several arrays with as many
rows each: ids, rows, and each slot of the optimizer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.checkpoint import checkpointer, model_state
from tf_strategies.keras.tables import row_table
from tf_strategies.strategies.parameter_server import variables

# Smaller variables are read and written as a whole.
_TABLE_BYTES = 1 << 20
_BLOCK_BYTES = 2 << 20


def arrays_of(
  named: Mapping[str, Any],
) -> Iterator[tuple[str, np.ndarray | checkpointer.Blocks]]:
  """Yields the arrays of variables and columns by name; no step may be running.

  Raises:
    DataError: rows were lost with their server.
  """
  # Each column has its rows in the order of the same ids.
  ids_of = functools.cache(_ids_of)
  for name, variable in named.items():
    if isinstance(variable, row_table.Column):
      ids = ids_of(variable.table)
      shape = sum(int(each.shape[0]) for each in ids), *variable.shape[1:]
      blocks = _blocks_of_column(variable, ids)
      yield name, checkpointer.Blocks(variable.dtype, shape, blocks)
    elif parts := _parts_of_table(variable):
      shape, dtype = tuple(variable.shape), tf.as_dtype(variable.dtype).name
      yield name, checkpointer.Blocks(dtype, shape, _blocks_of(parts))
    else:
      array = np.asarray(variable.numpy())
      # With a first dimension of 1 where replicas have parts.
      has_parts = model_state.has_parts(variable)
      yield name, array[None] if has_parts else array


def restore(
  arrays: checkpointer.StoredArrays, named: Mapping[str, Any]
) -> None:
  """Assigns variables and columns their arrays."""
  # The other columns of a table belong to its ids.
  for name, variable in sorted(
    named.items(),
    key=lambda item: getattr(item[1], 'key', None) != row_table.IDS,
  ):
    if isinstance(variable, row_table.Column):
      if variable.key == row_table.IDS:
        variable.assign(arrays[name])
        continue
      for begin, count in _cuts(arrays.specs[name].shape, 4):
        rows = arrays.rows(name, begin, count)
        variable.table.load(rows, variable.key, begin)
    elif parts := _parts_of_table(variable):
      first = 0
      for part in parts:
        for begin, count in _cuts(part.shape, part.dtype.size):
          rows = arrays.rows(name, first + begin, count)
          numbers = np.arange(begin, begin + count)
          numbers, rows = _tf_internal.on_host(numbers, rows)
          with tf.device(part.device):
            tf.raw_ops.ResourceScatterUpdate(
              resource=part.handle, indices=numbers, updates=rows
            )
        _end_sparse_access(part)
        part.is_lost = False
        first += part.shape[0]
    else:
      has_parts = model_state.has_parts(variable)
      variable.assign(arrays[name][0] if has_parts else arrays[name])


def _parts_of_table(variable: Any) -> Sequence[variables.ServerVariable]:
  """Returns the parts of a large variable, in the order of rows; none of others."""
  shape, dtype = variable.shape, tf.as_dtype(variable.dtype)
  is_table = (
    shape and dtype != tf.string and not model_state.has_parts(variable)
  )
  if not is_table or math.prod(shape) * dtype.size < _TABLE_BYTES:
    return ()
  return getattr(model_state.value_of(variable), 'parts', ())


def _cuts(shape: Sequence[int], item_bytes: int) -> Iterator[tuple[int, int]]:
  """Yields the first row and the number of rows of each block of an array."""
  row_bytes = max(1, math.prod(shape[1:]) * item_bytes)
  count = max(1, _BLOCK_BYTES // row_bytes)
  for begin in range(0, shape[0], count):
    yield begin, min(count, shape[0] - begin)


def _blocks_of(
  parts: Sequence[variables.ServerVariable],
) -> Iterator[np.ndarray]:
  for part in parts:
    part.check_is_whole()
    for begin, count in _cuts(part.shape, part.dtype.size):
      [numbers] = _tf_internal.on_host(np.arange(begin, begin + count))
      with tf.device(part.device):
        rows = part.rows_directly(numbers)
      yield rows.numpy()
    _end_sparse_access(part)


def _end_sparse_access(part: variables.ServerVariable) -> None:
  """Gathering made reads of the whole copy it, until rows are written again."""
  with tf.device(part.device):
    tf.raw_ops.DisableCopyOnRead(resource=part.handle)


def _ids_of(table: row_table.RowTable) -> list[tf.Tensor]:
  """Returns the ids that each shard of a table has."""
  for shard in table.shards:
    shard.check_is_whole()
  return [shard.stored()[0] for shard in table.shards]


def _blocks_of_column(
  column: row_table.Column, ids: Sequence[tf.Tensor]
) -> Iterator[np.ndarray]:
  for shard, of_shard in zip(column.table.shards, ids, strict=True):
    for begin, count in _cuts([of_shard.shape[0], *column.shape[1:]], 8):
      with tf.device(shard.device):
        rows = of_shard[begin : begin + count]
      if column.key != row_table.IDS:
        rows = shard.stored_of(rows, column.key)
      yield rows.numpy()
