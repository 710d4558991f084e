"""Refuses arguments that no collective can take, before anything is sent."""

from __future__ import annotations

import numpy as np

from tf_strategies import errors
from tf_strategies.collectives import schedule, simulator

_MAX_DIMENSIONS = 32


def check_dtype(array: np.ndarray, what: str) -> None:
  """Refuses what is no array, or one of Python objects."""
  if not isinstance(array, np.ndarray) or array.dtype.hasobject:
    raise errors.UnsupportedOptionError(
      f'{what} of {type(array).__name__}',
      'NumPy arrays of numbers',
      'convert it with np.asarray',
    )


def check_gathered(array: np.ndarray) -> None:
  """Refuses what `all_gather` cannot take."""
  check_dtype(array, 'all_gather')
  if not 1 <= array.ndim <= _MAX_DIMENSIONS:
    raise errors.UnsupportedOptionError(
      f'all_gather of an array of shape {array.shape}',
      'one dimension or more',
      'pass array.reshape(1) for a scalar',
    )


def dtype_text(dtype: np.dtype) -> str:
  """A dtype's name, with its byte order where that is foreign."""
  return dtype.name if dtype.isnative else dtype.str


def row_bytes(array: np.ndarray) -> int:
  """Bytes of one step along the first dimension."""
  return array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))


def check_root(root: int, world_size: int) -> None:
  """Refuses a root that is no rank."""
  if not schedule.is_int(root) or not 0 <= root < world_size:
    raise errors.UnsupportedOptionError(
      f'root={root!r}',
      f'a rank from 0 to {world_size - 1}',
      'pass the rank whose values all are to get',
    )


def check_reduced(array: np.ndarray, op: str, what: str) -> None:
  """Refuses what `all_reduce` and `reduce_scatter` cannot take."""
  check_dtype(array, what)
  if array.ndim != 1 or not array.flags.c_contiguous:
    raise errors.UnsupportedOptionError(
      f'{what} of an array of shape {array.shape} and strides {array.strides}',
      'one dimension, contiguous',
      'pass np.ascontiguousarray(array).reshape(-1)',
    )
  # bfloat16 and its like are of kind V, with additions of their own.
  if array.dtype.kind not in 'iufcV' or array.dtype.names:
    raise errors.UnsupportedOptionError(
      f'{what} of dtype {array.dtype}',
      'integers, floats and complex numbers',
      'cast it to a numeric dtype first',
    )
  if op not in simulator.REDUCTIONS:
    raise errors.UnsupportedOptionError(
      f'op={op!r}',
      f'one of {", ".join(map(repr, simulator.REDUCTIONS))}',
      "leave it out for 'sum'",
    )


def check_out(out: np.ndarray | None, array: np.ndarray) -> None:
  """Refuses an `out` that does not fit the array."""
  if out is None:
    return
  if (
    not isinstance(out, np.ndarray)
    or out.shape != array.shape
    or out.dtype != array.dtype
    or not out.flags.c_contiguous
    or not out.flags.writeable
    or np.may_share_memory(out, array)
  ):
    raise errors.UnsupportedOptionError(
      f'out of {getattr(out, "dtype", type(out))}'
      f'{list(getattr(out, "shape", ()))}',
      f'a writable, contiguous {array.dtype}{list(array.shape)} that does not '
      'overlap the input',
      'leave it out to get a new array',
    )
