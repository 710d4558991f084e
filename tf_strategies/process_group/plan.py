"""Defines the plan of one rank in a collective: ordered pieces and their needs.

A plan is compiled once from a `Schedule` and then run on many arrays, over TCP or MPI. It
holds integers only: which bytes of which buffer go to or come from whom, in
which order on each link, which pieces are computed here, and after which others.
Both ends of a link derive the same order from the same schedule, so that the
link carries nothing but bytes.

Example:

  >>> from tf_strategies.collectives.algorithms import ring
  >>> from tf_strategies.process_group import plan
  >>> p = plan.from_schedule(ring.ring_all_reduce(2), 0, 10, plan.Format(4))
  >>> [(p.pieces[i].start, p.pieces[i].stop) for i in p.sends[1]]
  [(0, 20), (20, 40)]
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tf_strategies.collectives import codec as codec_lib
from tf_strategies.collectives import codecs
from tf_strategies.collectives import schedule as schedule_lib

# The kinds of pieces.
SEND = 0  # Bytes of a buffer go to a peer.
RECEIVE = 1  # Bytes of a peer go into a buffer.
COMBINE = 2  # Terms are combined.
ENCODE = 3  # A term becomes a payload.
DECODE = 4  # A payload becomes values.

# The buffers of a run.
ARRAY = 0  # The caller's.
OUT = 1  # The result.
WIRE = 2  # Payloads; OUT, where its elements are payloads.
VALUES = 3  # Sums; OUT, where it has the dtype of sums.
RECEIVED = 4  # Terms of sums, each in memory of its own.

# Offsets of payloads: their arrays lie aligned.
_ALIGNMENT = 64


class PlannedPiece(NamedTuple):
  """A stretch of an array and what happens to it.

  Attributes:
    kind: one of the constants above.
    peer: the rank it goes to or comes from; -1 for none.
    buffer: buffer that SEND and DECODE read and the other kinds write.
    start: first byte in the buffer.
    stop: the byte after the last.
    first: the first element of the array that is computed.
    last: the element after the last.
    terms: places that COMBINE and ENCODE read, in the order of the sum, and that
      DECODE writes: a buffer and the first byte in it. In RECEIVED, the number of the
      piece that was received.
  """

  kind: int
  peer: int
  buffer: int
  start: int
  stop: int
  first: int = 0
  last: int = 0
  terms: tuple[tuple[int, int], ...] = ()


class RankPlan(NamedTuple):
  """Everything that one rank does in a collective.

  Attributes:
    pieces: all pieces, in any order.
    needs: for each piece, the number of pieces that must be done before it.
    unlocks: for each piece, the pieces that need it.
    sends: for each receiving rank, its pieces in order. A rank without pieces gets a
      header only.
    receives: for each sending rank, its pieces in order.
    wire_bytes: size of the WIRE buffer.
  """

  pieces: tuple[PlannedPiece, ...]
  needs: tuple[int, ...]
  unlocks: tuple[tuple[int, ...], ...]
  sends: dict[int, tuple[int, ...]]
  receives: dict[int, tuple[int, ...]]
  wire_bytes: int = 0

  @property
  def bytes_sent(self) -> int:
    """Bytes of arrays that the rank sends."""
    return sum(p.stop - p.start for p in self.pieces if p.kind == SEND)


@dataclasses.dataclass(frozen=True)
class Format:
  """The format in which the elements of an array travel and are added.

  Attributes:
    itemsize: bytes of an element.
    codec: codec of the payloads; NONE sends the elements themselves.
    is_payload: whether the array's own bytes are the codec's payload.
    is_wide: whether sums need a buffer of a wider dtype than the array's.
    piece_bytes: largest number of the array's bytes in a piece; at least one element.
      Additions overlap with the transfer of the next pieces.
  """

  itemsize: int
  codec: codec_lib.Codec = codecs.NONE
  is_payload: bool = False
  is_wide: bool = False
  piece_bytes: int = 1 << 19

  @classmethod
  def of(cls, dtype, compression: str, piece_bytes: int) -> Format:
    """Returns the format of arrays of a dtype for a requested codec."""
    codec = codecs.for_array(compression, dtype)
    return cls(
      dtype.itemsize,
      codec,
      codec.cast_dtype == dtype.name,
      codec is not codecs.NONE and dtype != codec_lib.sum_dtype(dtype),
      piece_bytes,
    )

  def cut(self, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Cuts a stretch of elements into pieces."""
    step = max(self.piece_bytes // self.itemsize, 1)
    for start in range(first, last, step):
      yield start, min(start + step, last)


# For bytes that only move.
BYTES = Format(1)
# Up to this number of ranks, each has links to all: small buffers go straight there.
FEW_RANKS = 8
# Buffers up to this size go to all ranks in one round, or along a tree.
SMALL_BYTES = 1 << 16


class _PlanBuilder:
  """Collects pieces; turns their order on each link into a plan."""

  def __init__(self):
    self._pieces: list[PlannedPiece] = []
    self._needs: list[set[int]] = []
    self._links: dict[tuple[bool, int], list[tuple[tuple, int]]] = {}
    self._wire_bytes = 0

  def link(self, sending: bool, peer: int) -> list[tuple[tuple, int]]:
    """Returns the order of a link, which thereby exists even if it stays empty."""
    return self._links.setdefault((sending, peer), [])

  def take(self, num_bytes: int) -> int:
    """Reserves bytes of WIRE and returns the first."""
    start = self._wire_bytes
    self._wire_bytes += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    return start

  def add(
    self, piece: PlannedPiece, order: tuple, needs: Sequence[int] = ()
  ) -> int:
    """Adds a piece, with a sort key for its link, and returns its number."""
    number = len(self._pieces)
    self._pieces.append(piece)
    self._needs.append(set(needs))
    if piece.peer >= 0:
      self.link(piece.kind == SEND, piece.peer).append((order, number))
    return number

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
      self._wire_bytes,
    )


class _Stretch:
  """The pieces of one stretch of elements on one rank.

  Each piece needs the pieces that wrote its input, and the pieces that read the bytes
  that it overwrites.
  """

  def __init__(
    self,
    builder: _PlanBuilder,
    rank: int,
    chunk: int,
    index: int,
    first: int,
    last: int,
    form: Format,
  ):
    self._builder, self._rank, self._form = builder, rank, form
    self._order = (chunk, index)
    self._elements = (first, last)
    self._coded = form.codec is not codecs.NONE
    self._at = first * form.itemsize
    self._num_bytes = (last - first) * form.itemsize
    self._wire_at = self._at
    if self._coded:
      self._num_bytes = form.codec.payload_bytes(last - first)
      if not form.is_payload:
        self._wire_at = builder.take(self._num_bytes)
    self._values = VALUES if form.is_wide else OUT
    # The buffers that hold this rank's values and their payload; None for a form that
    # does not exist now.
    self._value: int | None = ARRAY
    self._payload: int | None = None
    if not self._coded or form.is_payload:
      self._payload = ARRAY
    self._writers: dict[tuple[int, int], int] = {}
    self._readers: dict[tuple[int, int], list[int]] = {}

  def _add(self, round_, kind, peer, buffer, start, terms, reads, writes):
    """Adds a piece; `reads` and `writes` are places. Returns its number."""
    needs = {self._writers[p] for p in (*reads, *writes) if p in self._writers}
    for place in writes:
      needs.update(self._readers.pop(place, ()))
    number = self._builder.add(
      PlannedPiece(
        kind,
        peer,
        buffer,
        start,
        start + self._num_bytes,
        *self._elements,
        terms,
      ),
      (round_, *self._order),
      needs,
    )
    for place in reads:
      self._readers.setdefault(place, []).append(number)
    for place in writes:
      self._writers[place] = number
    return number

  def _place(self, buffer: int) -> tuple[int, int]:
    """Returns a buffer and this stretch's first byte in it."""
    return buffer, self._wire_at if buffer == WIRE else self._at

  def send(self, round_: int, peer: int) -> None:
    """Sends the rank's current value, encoded once."""
    if self._payload is None:
      self._encode(round_)
    place = self._place(self._payload)
    self._add(round_, SEND, peer, *place, (), [place], [])

  def overwrite(self, round_: int, peer: int) -> None:
    """Takes the value of another rank."""
    place = self._place(WIRE if self._coded else OUT)
    self._add(round_, RECEIVE, peer, *place, (), [], [place])
    self._payload = place[0]
    self._value = None if self._coded else OUT

  def add_up(self, round_: int, order: Sequence[int], completes: bool) -> None:
    """Adds arriving pieces in the order of ranks."""
    if self._value is None:
      self._decode(round_, self._values)
    own, target = self._place(self._value), self._place(self._values)
    terms = []
    for rank in order:
      place = own
      if rank != self._rank:
        number = self._add(round_, RECEIVE, rank, RECEIVED, 0, (), [], [])
        place = RECEIVED, number
        self._writers[place] = number
      terms.append(place)
    self._add(round_, COMBINE, -1, *target, tuple(terms), terms, [target])
    self._value = self._values
    self._payload = None if self._coded else OUT
    if completes:
      self._encode(round_)

  def finish(self) -> None:
    """Brings the result into OUT."""
    if self._coded and self._value is None and not self._form.is_payload:
      self._decode(-1, OUT)

  def _encode(self, round_):
    source, target = self._place(self._value), self._place(WIRE)
    self._add(round_, ENCODE, -1, *target, (source,), [source], [target])
    self._payload, self._value = WIRE, None

  def _decode(self, round_, buffer):
    source, target = self._place(self._payload), self._place(buffer)
    self._add(round_, DECODE, -1, *source, (target,), [source], [target])
    self._value = buffer


def from_schedule(
  schedule: schedule_lib.Schedule,
  rank: int,
  length: int,
  form: Format,
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
    form: format in which they travel.
    sizes: number of elements of each chunk; None for equal chunks.

  Returns:
    A plan of O(T L / (C S)) pieces for T transfers of this rank, a buffer of
    L in C chunks and pieces of S bytes.
  """
  builder = _PlanBuilder()
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
  # The places where sums are encoded. Finding them takes long among many ranks.
  is_coded = form.codec is not codecs.NONE
  completions = schedule.completions() if is_coded else frozenset()
  sizes = sizes or schedule_lib.chunk_sizes(length, schedule.num_chunks)
  ends = [0, *itertools.accumulate(sizes)]
  for chunk, happens in steps.items():
    happens.sort()
    for index, (first, last) in enumerate(
      form.cut(ends[chunk], ends[chunk + 1])
    ):
      stretch = _Stretch(builder, rank, chunk, index, first, last, form)
      for round_, arrives, peer, order in happens:
        if not arrives:
          stretch.send(round_, peer)
        elif rank in order:
          completes = (round_, rank, chunk) in completions
          stretch.add_up(round_, order, completes)
        else:
          stretch.overwrite(round_, order[0])
      stretch.finish()
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
  form = Format(1, piece_bytes=piece_bytes)
  return from_schedule(schedule, rank, sum(sizes), form, sizes)
