"""Tensors onto the chunks of a schedule, copying no more than pays.

Equal chunks of one packed buffer balance the links, but copy every byte twice.
Whole tensors cost no copy, but may leave the chunks unequal: a plan cuts only
those that would.
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
  split_above: float | None = None,
) -> tuple[ChunkPiece, ...]:
  """Assigns every element of every tensor to one chunk.

  Whole tensors go, the largest first, to the chunk with the fewest bytes so
  far. Tensors of more than the fraction `split_above` of all bytes come last and
  fill each chunk up to the mean load, the emptiest first, so that the busiest
  has at most

      total / num_chunks + largest unsplit tensor + 16 elements

  bytes (less than 32 elements where that saves a piece of under 16).

  Source: Graham, "Bounds on multiprocessing timing anomalies", SIAM Journal on
  Applied Mathematics 17, 1969 (longest processing time first).

  Example:

    >>> for piece in plan_layout([100, 8, 4], [4, 4, 4], 2, split_above=0.25):
    ...   print(piece)
    ChunkPiece(tensor=0, start=0, stop=64, chunk=1)
    ChunkPiece(tensor=0, start=64, stop=100, chunk=0)
    ChunkPiece(tensor=1, start=0, stop=8, chunk=0)
    ChunkPiece(tensor=2, start=0, stop=4, chunk=1)

  Args:
    num_elements: the size of each tensor in elements, 0 or more.
    itemsizes: bytes of one element of each tensor.
    num_chunks: chunks of the schedule.
    split_above: from 0 to 1, for instance `1 / (2 * num_chunks)`; None to split
      no tensor.

  Returns:
    Pieces sorted by tensor and start: one of a tensor that is not split (empty,
    if that is), at most `num_chunks` of another, which start at multiples of 16
    elements. O(n (log n + num_chunks)) for n tensors, plus O(num_chunks log
    num_chunks) for each large one.
  """
  loads = [0] * num_chunks
  sizes = [n * i for n, i in zip(num_elements, itemsizes, strict=True)]
  total = sum(sizes)
  limit = total if split_above is None else split_above * total
  # Ties by index: every rank must come to the same plan.
  largest_first = sorted(range(len(sizes)), key=lambda t: (-sizes[t], t))
  whole = [t for t in largest_first if sizes[t] <= limit]
  large = [t for t in largest_first if sizes[t] > limit]

  pieces = []
  for tensor in whole:
    chunk = loads.index(min(loads))
    loads[chunk] += sizes[tensor]
    pieces.append(ChunkPiece(tensor, 0, num_elements[tensor], chunk))
  for tensor in large:
    pieces += _split(
      tensor, num_elements[tensor], itemsizes[tensor], loads, total
    )
  return tuple(sorted(pieces, key=lambda piece: (piece.tensor, piece.start)))


def _split(
  tensor: int, length: int, itemsize: int, loads: list[int], total: int
) -> list[ChunkPiece]:
  """Fills chunks up to the mean load, emptiest first; updates `loads`."""
  pieces = []
  start = 0
  # What all large tensors still need is exactly what the loads lack to the
  # mean, so that chunks below the mean suffice, each visited once.
  for chunk in sorted(range(len(loads)), key=lambda c: (loads[c], c)):
    room = total - loads[chunk] * len(loads)  # In 1/num_chunks bytes.
    unit = ALIGNMENT_ELEMENTS * itemsize * len(loads)
    # Rounded up, so that a chunk that was filled takes no crumbs of the next.
    stop = start + -(-room // unit) * ALIGNMENT_ELEMENTS
    if length - stop < ALIGNMENT_ELEMENTS:
      stop = length
    pieces.append(ChunkPiece(tensor, start, stop, chunk))
    loads[chunk] += (stop - start) * itemsize
    start = stop
    if start == length:
      break
  return pieces
