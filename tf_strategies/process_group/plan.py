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

  pieces: tuple[PlannedPiece, ...]
  needs: tuple[int, ...]
  unlocks: tuple[tuple[int, ...], ...]
  sends: dict[int, tuple[int, ...]]
  receives: dict[int, tuple[int, ...]]

  @property
  def bytes_sent(self) -> int:
    """Bytes of arrays that the rank sends."""
    numbers = itertools.chain.from_iterable(self.sends.values())
    return sum(self.pieces[number].size for number in numbers)


# Up to this number of ranks, each has links to all: small buffers go straight there.
FEW_RANKS = 8
# Buffers up to this size go to all ranks in one round, or along a tree.
SMALL_BYTES = 1 << 16


class _PlanBuilder:
  """Collects the pieces of one rank, and turns their order on each link into a plan.

  It goes from one stretch of bytes to the next. Each piece needs the pieces that wrote
  its input, and the pieces that read the bytes that it overwrites.
  """

  def __init__(self, rank: int):
    self._rank = rank
    self._pieces: list[PlannedPiece] = []
    self._needs: list[set[int]] = []
    self._links: dict[tuple[bool, int], list[tuple[tuple, int]]] = {}

  def link(self, sending: bool, peer: int) -> list[tuple[tuple, int]]:
    """Returns the order of a link, which thereby exists even if it stays empty."""
    return self._links.setdefault((sending, peer), [])

  def begin(self, order: tuple[int, int], span: tuple[int, int]) -> None:
    """Begins with a stretch, given its sort key and its bytes."""
    self._order, self._span = order, span
    # The buffer that holds this rank's value.
    self._value = ARRAY
    # The piece that wrote the value, if it is in OUT, and the pieces that read it.
    self._writer: list[int] = []
    self._readers: list[int] = []

  def send(self, round_: int, peer: int) -> None:
    """Sends the rank's current value."""
    number = self._add(round_, peer, self._value, self._writer, sending=True)
    if self._value == OUT:
      self._readers.append(number)

  def overwrite(self, round_: int, peer: int) -> None:
    """Takes the value of another rank."""
    self._write(round_, peer, OUT)

  def add_up(self, round_: int, order: Sequence[int]) -> None:
    """Adds arriving pieces in the order of ranks."""
    terms = tuple(
      OWN if rank == self._rank else self._add(round_, rank, RECEIVED)
      for rank in order
    )
    needs = [number for number in terms if number != OWN]
    self._write(round_, -1, self._value, needs, terms)

  def _add(
    self, round_, peer, buffer, needs=(), terms=(), sending=False
  ) -> int:
    """Adds a piece and returns its number."""
    number = len(self._pieces)
    self._pieces.append(PlannedPiece(peer, buffer, *self._span, terms))
    self._needs.append(set(needs))
    if not terms:
      self.link(sending, peer).append(((round_, *self._order), number))
    return number

  def _write(self, round_, peer, buffer, needs=(), terms=()) -> None:
    """Adds a piece that writes the value into OUT."""
    needs = [*needs, *self._writer, *self._readers]
    number = self._add(round_, peer, buffer, needs, terms)
    self._writer, self._readers, self._value = [number], [], OUT

  def build(self) -> RankPlan:
    """Returns the plan of all pieces."""
    unlocks: list[list[int]] = [[] for _ in self._pieces]
    for number, needs in enumerate(self._needs):
      for other in sorted(needs):
        unlocks[other].append(number)
    sends, receives = {}, {}
    for (sending, peer), order in sorted(self._links.items()):
      numbers = tuple(number for _, number in sorted(order))
      (sends if sending else receives)[peer] = numbers
    return RankPlan(
      tuple(self._pieces),
      tuple(map(len, self._needs)),
      tuple(map(tuple, unlocks)),
      sends,
      receives,
    )


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
  builder = _PlanBuilder(rank)
  steps: dict[int, list[tuple]] = {}
  for round_, arrivals in enumerate(schedule.arrivals()):
    for (dst, chunk), transfers in arrivals.items():
      for t in transfers:
        if t.src == rank:
          # A round is simultaneous: sends read the values from before the round.
          steps.setdefault(chunk, []).append((round_, 0, dst, ()))
          builder.link(True, dst)
        elif dst == rank:
          builder.link(False, t.src)
      if dst == rank:
        order = tuple(schedule_lib.rank_order(rank, transfers))
        steps.setdefault(chunk, []).append((round_, 1, dst, order))
  sizes = sizes or schedule_lib.chunk_sizes(length, schedule.num_chunks)
  ends = [itemsize * end for end in (0, *itertools.accumulate(sizes))]
  step = max(piece_bytes // itemsize, 1) * itemsize
  for chunk, happens in steps.items():
    happens.sort()
    for index, start in enumerate(range(ends[chunk], ends[chunk + 1], step)):
      span = start, min(start + step, ends[chunk + 1])
      builder.begin((chunk, index), span)
      for round_, arrives, peer, order in happens:
        if not arrives:
          builder.send(round_, peer)
        elif rank in order:
          builder.add_up(round_, order)
        else:
          builder.overwrite(round_, order[0])
  return builder.build()


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
