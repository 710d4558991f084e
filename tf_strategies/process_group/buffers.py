"""Aligned arrays over memory that is used again."""

from __future__ import annotations

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
  is free. Where Python does not count references, nothing is used again.

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
    self._blocks: list[_Block] = []

  def take(self, shape: int | tuple[int, ...], dtype) -> np.ndarray:
    """Returns an uninitialised, C-contiguous array."""
    return self._block(_num_bytes(shape, dtype)).array(shape, dtype)

  def _block(self, num_bytes: int) -> _Block:
    for index, block in enumerate(self._blocks):
      # Not one much larger: it may be held for long.
      if num_bytes <= block.size <= 2 * num_bytes + _PAGE and block.is_free:
        # The most recently used comes first. The oldest is given up.
        self._blocks.insert(0, self._blocks.pop(index))
        return block
    block = _Block(max(-(-num_bytes // _PAGE), 1) * _PAGE)
    self._blocks.insert(0, block)
    total = 0
    for index, kept in enumerate(self._blocks):
      total += kept.size
      if total > self._max_bytes or index == _MOST_BLOCKS:
        del self._blocks[index:]
        break
    return block


class _Block:
  """Memory that begins at a multiple of 64."""

  __slots__ = ('_aligned', '_owner', 'size')

  def __init__(self, size: int):
    # Of an empty slice NumPy forgets where it began.
    size = self.size = max(size, ALIGNMENT)
    self._owner = np.empty(size + ALIGNMENT, np.uint8)
    start = -self._owner.ctypes.data % ALIGNMENT
    self._aligned = self._owner[start : start + size]

  @property
  def is_free(self) -> bool:
    """Returns whether no array over this memory is left outside."""
    return 0 < self.references() <= _UNUSED

  def references(self) -> int:
    """References to the memory; 0 where Python does not count them."""
    count = getattr(sys, 'getrefcount', None)
    return 0 if count is None else count(self._owner)

  def array(self, shape: int | tuple[int, ...], dtype) -> np.ndarray:
    """Returns an array over the beginning of the memory."""
    used = self._aligned[: _num_bytes(shape, dtype)]
    return used.view(dtype).reshape(shape)


# Of a block that nobody uses: its own reference, its aligned view's, and what
# this version of Python needs to count them.
_UNUSED = _Block(0).references()


def _num_bytes(shape: int | tuple[int, ...], dtype) -> int:
  sizes = (shape,) if isinstance(shape, int) else shape
  return math.prod(sizes) * np.dtype(dtype).itemsize
