"""Aligned arrays over memory that is used again."""

import math
import sys

import numpy as np

ALIGNMENT = 64
_PAGE = 4096
_MOST_BLOCKS = 64


class Pool:
  """Gives aligned arrays, over memory that it gives out again when it is free.

  The first byte of an array lies at a multiple of 64: TensorFlow takes such an array
  without a copy, and vector additions run on whole cache lines.

  Fresh memory of 100 MB costs more than moving it: the system clears each page
  when it is first touched. An array that was given out, and every view of it,
  holds a reference to the memory; when the pool's own are the last, the memory
  is free.

  Example:

    >>> pool = Pool()
    >>> first = pool.take(5, 'int32')
    >>> place, kept = first.ctypes.data, first[1:]
    >>> del first
    >>> second = pool.take(5, 'int32')
    >>> second.ctypes.data == place
    False
    >>> del kept
    >>> pool.take(5, 'int32').ctypes.data == place
    True

  Args:
    max_bytes: the most that the pool keeps.
  """

  def __init__(self, max_bytes: int = 1 << 30):
    self._max_bytes = max_bytes
    # Aligned views of memory, the most recently used first.
    self._blocks: list[np.ndarray] = []

  def take(self, shape: int | tuple[int, ...], dtype) -> np.ndarray:
    """Returns an uninitialised, C-contiguous array."""
    sizes = (shape,) if isinstance(shape, int) else shape
    num_bytes = math.prod(sizes) * np.dtype(dtype).itemsize
    return self._block(num_bytes)[:num_bytes].view(dtype).reshape(shape)

  def _block(self, num_bytes: int) -> np.ndarray:
    for index, block in enumerate(self._blocks):
      # Not one much larger: it may be held for long.
      is_near = num_bytes <= block.size <= 2 * num_bytes + _PAGE
      # NumPy's views of views refer to the array that owns the memory.
      if is_near and sys.getrefcount(block.base) <= _UNUSED:
        self._blocks.insert(0, self._blocks.pop(index))
        return block
    block = _allocate(max(-(-num_bytes // _PAGE), 1) * _PAGE)
    self._blocks.insert(0, block)
    total = 0
    for index, kept in enumerate(self._blocks):
      total += kept.size
      if total > self._max_bytes or index == _MOST_BLOCKS:
        # The oldest is given up.
        del self._blocks[index:]
        break
    return block


def _allocate(size: int) -> np.ndarray:
  """Returns fresh memory that begins at a multiple of 64."""
  owner = np.empty(size + ALIGNMENT, np.uint8)
  start = -owner.ctypes.data % ALIGNMENT
  return owner[start : start + size]


# References to the memory of an unused block: its own, and the ones of counting.
_SPARE = _allocate(1)
_UNUSED = sys.getrefcount(_SPARE.base)
