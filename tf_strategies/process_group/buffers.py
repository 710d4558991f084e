"""Aligned arrays, and scratch memory that is used again."""

from __future__ import annotations

import numpy as np

ALIGNMENT = 64


def aligned_empty(shape: int | tuple[int, ...], dtype) -> np.ndarray:
  """An uninitialised array whose first byte lies at a multiple of 64.

  TensorFlow takes such an array without a copy, and vector additions run on
  whole cache lines.

  Example:

    >>> aligned_empty(3, 'float32').ctypes.data % 64
    0

  Args:
    shape: of the array.
    dtype: of the array.

  Returns:
    A C-contiguous array.
  """
  dtype = np.dtype(dtype)
  shape = (shape,) if isinstance(shape, int) else tuple(shape)
  num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
  raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
  start = -raw.ctypes.data % ALIGNMENT
  return raw[start : start + num_bytes].view(dtype).reshape(shape)
