"""Defines the plan of one rank in a collective: ordered pieces and their needs.

A plan is compiled once from a `Schedule` and then run on many arrays, over TCP or MPI. It
holds integers only: which bytes of which buffer go to or come from whom, in
which order on each link, which pieces are computed here, and after which others.
Both ends of a link derive the same order from the same schedule, so that the
link carries nothing but bytes.

Example:

  >>> from tf_strategies.collectives.algorithms import ring
  >>> from tf_strategies.process_group import plan
  >>> p = plan.from_schedule(ring.ring_all_reduce(2), 0, 10, 4, 1 << 19)
  >>> [(p.pieces[i].start, p.pieces[i].stop) for i in p.sends[1]]
  [(0, 20), (20, 40)]
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tf_strategies.collectives import schedule as schedule_lib

# The buffers of a run.
ARRAY = 0  # The caller's.
OUT = 1  # The result.
RECEIVED = 2  # Terms of sums, each in memory of its own.

# In the terms of a sum: the rank's own value.
OWN = -1


class PlannedPiece(NamedTuple):
  """A stretch of an array and what happens to it.

  Attributes:
    peer: the rank it goes to or comes from; -1 for a sum that is computed here.
    buffer: buffer to send from or to receive into. A sum reads the rank's own value
      there, and writes OUT.
    start: first byte in the buffer.
    stop: the byte after the last.
    terms: terms of a sum, in their order: numbers of received pieces, and OWN.
  """

  peer: int
  buffer: int
  start: int
  stop: int
  terms: tuple[int, ...] = ()

  @property
  def size(self) -> int:
    """Number of its bytes."""
    return self.stop - self.start


class RankPlan(NamedTuple):
  """Everything that one rank does in a collective.

  Attributes:
    pieces: all pieces, in any order.
    needs: for each piece, the number of pieces that must be done before it.
    unlocks: for each piece, the pieces that need it.
    sends: for each receiving rank, its pieces in order. A rank without pieces gets a
      header only.
    receives: for each sending rank, its pieces in order.
  """

  pieces: list[PlannedPiece]
  needs: list[int]
  unlocks: list[list[int]]
  sends: dict[int, list[int]]
  receives: dict[int, list[int]]

  @property
  def bytes_sent(self) -> int:
    """Bytes of arrays that the rank sends."""
    numbers = itertools.chain.from_iterable(self.sends.values())
    return sum(self.pieces[number].size for number in numbers)


# Up to this number of ranks, each has links to all: small buffers go straight there.
FEW_RANKS = 8
# Buffers up to this size go to all ranks in one round, or along a tree.
SMALL_BYTES = 1 << 16


class _Stretch:
  """A stretch of bytes, whose pieces go into the plan of one rank.

  Each piece needs the piece that wrote its input, and the pieces that read the bytes
  that it overwrites.
  """

  def __init__(self, plan: RankPlan, rank: int, start: int, stop: int):
    self._plan, self._rank, self._span = plan, rank, (start, stop)
    # The buffer that holds this rank's value.
    self._buffer = ARRAY
    # The piece that wrote the value, if it is in OUT, and the pieces that read it.
    self._writer: list[int] = []
    self._readers: list[int] = []

  def send(self, peer: int) -> None:
    """Sends the rank's current value."""
    number = self._add(peer, self._buffer, self._writer)
    self._plan.sends[peer].append(number)
    if self._buffer == OUT:
      self._readers.append(number)

  def receive(self, order: Sequence[int]) -> None:
    """Takes the value of another rank, or adds up those of several in this order."""
    needs, terms = [*self._writer, *self._readers], ()
    if self._rank in order:
      terms = tuple(
        OWN if rank == self._rank else self._take(rank, RECEIVED)
        for rank in order
      )
      needs += (number for number in terms if number != OWN)
      number = self._add(-1, self._buffer, needs, terms)
    else:
      number = self._take(order[0], OUT, needs)
    self._writer, self._readers, self._buffer = [number], [], OUT

  def _take(self, peer, buffer, needs=()) -> int:
    """Receives a piece and returns its number."""
    number = self._add(peer, buffer, needs)
    self._plan.receives[peer].append(number)
    return number

  def _add(self, peer, buffer, needs, terms=()) -> int:
    """Adds a piece and returns its number."""
    number = len(self._plan.pieces)
    self._plan.pieces.append(PlannedPiece(peer, buffer, *self._span, terms))
    self._plan.needs.append(len(needs))
    self._plan.unlocks.append([])
    for other in needs:
      self._plan.unlocks[other].append(number)
    return number


def from_schedule(
  schedule: schedule_lib.Schedule,
  rank: int,
  length: int,
  itemsize: int,
  piece_bytes: int,
  sizes: Sequence[int] | None = None,
) -> RankPlan:
  """Compiles a schedule for one rank.

  The first send of a chunk reads the caller's array, the first addition writes
  array + received, so that nothing is copied beforehand. In each chunk things
  happen in the schedule's order: in a round a rank first sends its earlier
  values, then adds the received values in rank order.

  Args:
    schedule: a correct all-reduce, one half of it, or copies only.
    rank: rank that will run the plan.
    length: number of elements of the array.
    itemsize: number of bytes of an element.
    piece_bytes: largest number of bytes in a piece, which has at least one element.
      Additions overlap with the transfer of the next pieces.
    sizes: number of elements of each chunk; None for equal chunks.

  Returns:
    A plan of O(T L / (C S)) pieces for T transfers of this rank, a buffer of
    L in C chunks and pieces of S bytes.
  """
  plan = RankPlan([], [], [], {}, {})
  sizes = sizes or schedule_lib.chunk_sizes(length, schedule.num_chunks)
  ends = [itemsize * end for end in (0, *itertools.accumulate(sizes))]
  step = max(piece_bytes // itemsize, 1) * itemsize
  chunks = [
    [
      _Stretch(plan, rank, start, min(start + step, end))
      for start in range(first, end, step)
    ]
    for first, end in itertools.pairwise(ends)
  ]
  for transfers in schedule.rounds():
    arrivals: dict[int, list[schedule_lib.Transfer]] = {}
    for t in transfers:
      # A round is simultaneous: sends read the values from before the round.
      if t.src == rank:
        plan.sends.setdefault(t.dst, [])
        for stretch in chunks[t.chunk]:
          stretch.send(t.dst)
      elif t.dst == rank:
        plan.receives.setdefault(t.src, [])
        arrivals.setdefault(t.chunk, []).append(t)
    for chunk, arriving in sorted(arrivals.items()):
      order = schedule_lib.rank_order(rank, arriving)
      for stretch in chunks[chunk]:
        stretch.receive(order)
  return plan


@functools.lru_cache(maxsize=256)
def gather(
  rank: int, sizes: tuple[int, ...], piece_bytes: int, way: str
) -> RankPlan:
  """Returns the plan of a gather: the bytes of each rank go to all, in place.

  If one rank alone has bytes, it is a broadcast.

  Args:
    rank: rank that will run the plan. Its own bytes are in their place already.
    sizes: number of bytes of each rank.
    piece_bytes: largest number of bytes in a piece.
    way: 'direct' to send to all others in one round; 'ring' to pass received pieces on
      to the next rank; 'doubling' to pass all of them on to a rank that is twice as far
      away in each round (Bruck et al., 1997), which takes the fewest rounds.
  """
  size = len(sizes)
  transfers = []
  # Only this rank's: among many ranks, all transfers would be too many.
  for distance in range(1, size):
    level = distance.bit_length() - 1
    round_, hop = {
      'direct': (0, distance),
      'ring': (distance - 1, 1),
      'doubling': (level, 1 << level),
    }[way]
    # The bytes of a rank arrive at the one that is so far away from it.
    for src, dst in ((rank, rank + hop), (rank - hop, rank)):
      ends = round_, src % size, dst % size
      chunk = (dst - distance) % size
      transfers.append(schedule_lib.Transfer(*ends, chunk, False))
  schedule = schedule_lib.Schedule('gather', size, size, tuple(transfers))
  return from_schedule(schedule, rank, sum(sizes), 1, piece_bytes, sizes)
