"""Pieces of large arrays: files of some rows each, written wherever these are.

An array that is too large for one process is written by those who hold its rows.
Each piece is one tensor in a file of TensorFlow's format, which any TensorFlow
process can write and read by an operation, where the variables are. Its data file
has the bytes of the rows and nothing else. Of each piece a manifest has a checksum.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal, errors

_NAME = 'rows'
_HERE = '/device:CPU:0'
_SUFFIXES = ('.data-00000-of-00001', '.index')
# What TensorFlow raises for a file that is gone, cut, damaged or another one.
_DAMAGED = (
  tf.errors.NotFoundError,
  tf.errors.DataLossError,
  tf.errors.OutOfRangeError,
  tf.errors.InvalidArgumentError,
  tf.errors.FailedPreconditionError,
)
# And for one that cannot be written.
_REFUSED = (
  tf.errors.NotFoundError,
  tf.errors.PermissionDeniedError,
  tf.errors.ResourceExhaustedError,
  tf.errors.FailedPreconditionError,
)


class PieceFile(NamedTuple):
  """Consecutive rows of an array in a file."""

  # In the directory of the checkpoint, without TensorFlow's suffixes.
  file: str
  first: int
  rows: int
  digest: str


class Table(NamedTuple):
  """An array in pieces."""

  dtype: str
  shape: tuple[int, ...]
  pieces: tuple[PieceFile, ...]

  @classmethod
  def from_json(cls, value: Sequence[Any]) -> Table:
    """Returns the table that JSON made lists of."""
    dtype, shape, found = value
    return cls(dtype, tuple(shape), tuple(PieceFile(*piece) for piece in found))

  def files(self) -> list[str]:
    """Returns the files of all pieces, in the directory of the checkpoint."""
    return [piece.file + each for piece in self.pieces for each in _SUFFIXES]


def _place(directory: str, file: str) -> dict[str, tf.Tensor]:
  """Returns the arguments of TensorFlow's operations that name one tensor."""
  path, names, slices = _tf_internal.on_host(
    os.path.join(directory, file), [_NAME], ['']
  )
  return {'prefix': path, 'tensor_names': names, 'shape_and_slices': slices}


def write(directory: str, file: str, first: int, rows: tf.Tensor) -> PieceFile:
  """Writes rows from number `first` on, where the device of the scope is.

  Raises:
    OSError: the file system refuses that.
  """
  try:
    tf.raw_ops.SaveV2(**_place(directory, file), tensors=[rows])
  except _REFUSED as e:
    raise OSError(f'{rows.device}: {e.message}') from e
  return PieceFile(file, first, int(rows.shape[0]), digest(rows))


def read(directory: str, piece: PieceFile, dtype: str) -> tf.Tensor:
  """Returns the rows of a piece, read where the device of the scope is.

  Raises:
    DataError: the file is damaged.
  """
  try:
    (rows,) = tf.raw_ops.RestoreV2(
      **_place(directory, piece.file), dtypes=[tf.as_dtype(dtype)]
    )
  except _DAMAGED as e:
    raise errors.DataError(f'{piece.file} cannot be read ({e.message})') from e
  if rows.shape[0] != piece.rows:
    raise errors.DataError(
      f'{piece.file} has {rows.shape[0]} rows, expected {piece.rows}'
    )
  return rows


def check(directory: str, piece: PieceFile, dtype: str) -> None:
  """Reads a piece where the device of the scope is, and compares its checksum.

  Raises:
    DataError: the file is damaged.
  """
  found = digest(read(directory, piece, dtype))
  if found != piece.digest:
    raise errors.DataError(
      f'{piece.file} differs from its checksum in the manifest'
    )


def digest(rows: tf.Tensor) -> str:
  """Returns the checksum of a tensor's bytes (FarmHash, 64 bits)."""
  shape, method = _tf_internal.on_host([1, -1], 'farmhash64')
  bits = tf.raw_ops.Fingerprint(data=tf.reshape(rows, shape), method=method)
  return bits.numpy().tobytes().hex()


def check_all(directory: str, tables: Mapping[str, Table]) -> None:
  """Checks all pieces, in this process, one at a time."""
  with tf.device(_HERE):
    for table in tables.values():
      for piece in table.pieces:
        check(directory, piece, table.dtype)


def rows_of(
  directory: str,
  table: Table,
  first: int,
  rows: int,
  device: str,
) -> Iterator[tuple[int, tf.Tensor]]:
  """Yields the rows from `first` on in blocks, each with the number of its first row.

  Numbers count from `first`. Only one piece is in memory.

  Args:
    directory: of the checkpoint.
    table: what to read.
    first: number of the first row.
    rows: how many.
    device: where they are read.
  """
  last = first + rows
  for piece in table.pieces:
    begin, end = max(first, piece.first), min(last, piece.first + piece.rows)
    if begin >= end:
      continue
    with tf.device(device):
      values = read(directory, piece, table.dtype)
      if end - begin < piece.rows:
        bounds = [begin - piece.first], [end - piece.first], [1]
        values = tf.strided_slice(values, *_tf_internal.on_host(*bounds))
    yield begin - first, values


def array_of(directory: str, table: Table, first: int, rows: int) -> np.ndarray:
  """Returns rows from number `first` on, read in this process."""
  dtype = tf.as_dtype(table.dtype).as_numpy_dtype
  array = np.empty([rows, *table.shape[1:]], dtype)
  for begin, values in rows_of(directory, table, first, rows, _HERE):
    array[begin : begin + len(values)] = values.numpy()
  return array
