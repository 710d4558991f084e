"""Checks of the arguments of collectives."""

from __future__ import annotations

import numpy as np

from tf_strategies import errors, option_checks

_MAX_DIMENSIONS = 32


def check_array(array: np.ndarray, what: str) -> None:
  """Refuses what is no array, or one of Python objects."""
  if not isinstance(array, np.ndarray) or array.dtype.hasobject:
    raise errors.UnsupportedOptionError(
      f'{what} of {type(array).__name__}',
      'NumPy arrays of numbers',
      'convert it with np.asarray',
    )


def check_name(name: str) -> None:
  """Refuses a name that is no string."""
  option_checks.check(
    isinstance(name, str),
    f'name={name!r}',
    'a string',
    "leave it out, or name=''",
  )


def check_gathered(array: np.ndarray, name: str) -> None:
  """Refuses what `all_gather` cannot take."""
  check_array(array, 'all_gather')
  check_name(name)
  if not 1 <= array.ndim <= _MAX_DIMENSIONS:
    raise errors.UnsupportedOptionError(
      f'all_gather of an array of shape {array.shape}',
      'one dimension or more',
      'pass array.reshape(1) for a scalar',
    )


def check_root(root: int, world_size: int) -> None:
  """Refuses a root that is no rank."""
  option_checks.check_int(
    'root',
    root,
    0,
    world_size - 1,
    fix='pass the rank whose values all are to get',
  )


def check_out(
  name: str, out: np.ndarray | None, array: np.ndarray, dtype: np.dtype
) -> None:
  """Refuses an `out`, or another array to fill, that does not fit the array."""
  if out is None:
    return
  if (
    not isinstance(out, np.ndarray)
    or out.shape != array.shape
    or out.dtype != dtype
    or not out.flags.c_contiguous
    or not out.flags.writeable
    or np.may_share_memory(out, array)
  ):
    raise errors.UnsupportedOptionError(
      f'{name} of {getattr(out, "dtype", type(out))}'
      f'{list(getattr(out, "shape", ()))}',
      f'a writable, contiguous {dtype}{list(array.shape)} that does not '
      'overlap the input',
      'leave it out to get a new array',
    )
