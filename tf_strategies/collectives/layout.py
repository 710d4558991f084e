"""Tensors onto the chunks of a schedule, copying no more than pays.

Equal chunks of one packed buffer balance the links, but copy every byte twice. A plan
copies only the large tensors that lie across two chunks.
"""

from collections.abc import Sequence
from typing import NamedTuple

# 16 elements of 4 bytes are a cache line.
ALIGNMENT_ELEMENTS = 16


class ChunkPiece(NamedTuple):
  """A range of a flattened tensor that belongs to one chunk.

  Attributes:
    tensor: its index.
    start: first element.
    stop: element after the last one.
    chunk: the chunk that it is part of.
  """

  tensor: int
  start: int
  stop: int
  chunk: int


def plan_layout(
  num_elements: Sequence[int],
  itemsizes: Sequence[int],
  num_chunks: int,
  cut_above: float,
) -> tuple[ChunkPiece, ...]:
  """Assigns every element of every tensor to one chunk.

  The tensors lie behind each other, and the chunks end at equal distances. A tensor
  that lies across such an end is cut there if it is large, or goes to the chunk that has
  most of it.
  So the busiest chunk has at most

      total / num_chunks + largest tensor that is not cut + 32 elements

  bytes, and fewer than `num_chunks` tensors are cut.

  Example:

    >>> for piece in plan_layout([100, 8, 4], [4, 4, 4], 2, cut_above=64):
    ...   print(piece)
    ChunkPiece(tensor=0, start=0, stop=64, chunk=0)
    ChunkPiece(tensor=0, start=64, stop=100, chunk=1)
    ChunkPiece(tensor=1, start=0, stop=8, chunk=1)
    ChunkPiece(tensor=2, start=0, stop=4, chunk=1)

  Args:
    num_elements: the size of each tensor in elements, 0 or more.
    itemsizes: bytes of one element of each tensor.
    num_chunks: chunks of the schedule.
    cut_above: the bytes of the largest tensor that is not cut.

  Returns:
    Pieces sorted by tensor and start: one of a tensor that is not cut (empty, if
    that is), at most `num_chunks` of another, which start at multiples of 16
    elements, have at least as many, and are in the order of chunks. O(n num_chunks)
    for n tensors.
  """
  sizes = list(zip(num_elements, itemsizes, strict=True))
  total = sum(length * itemsize for length, itemsize in sizes)
  pieces, before = [], 0
  for tensor, (length, itemsize) in enumerate(sizes):
    is_large = length * itemsize > cut_above
    unit = ALIGNMENT_ELEMENTS if is_large else max(length, 1)
    start = 0
    for chunk in range(num_chunks):
      end = (total * (chunk + 1) / num_chunks - before) / itemsize
      stop = round(end / unit) * unit
      if length - stop < unit:  # Not even a crumb is left for the next chunk.
        stop = length
      if stop > start or stop == length:
        pieces.append(ChunkPiece(tensor, start, stop, chunk))
        start = stop
      if stop == length:
        break
    before += length * itemsize
  return tuple(pieces)
