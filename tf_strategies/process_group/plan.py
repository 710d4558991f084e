"""What one rank does in a collective: pieces in order, and what they wait for.

A plan is compiled once from a `Schedule` (or from one of the patterns below)
and then run on many arrays. It holds integers only: which bytes of which
buffer go to or come from whom, in which order on each link, and after which
others. Both ends of a link derive the same order from the same schedule, so
that the link carries nothing but bytes.

Example:

  >>> from tf_strategies.collectives.algorithms import ring
  >>> from tf_strategies.process_group import plan
  >>> p = plan.from_schedule(ring.ring_all_reduce(2), 0, 10, 4, 1 << 20)
  >>> [p.pieces[i] for i in p.sends[1]]
  [Piece(kind=0, peer=1, start=0, stop=20, buffer=0), Piece(kind=0, peer=1, start=20, stop=40, buffer=1)]
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tf_strategies.collectives import registry
from tf_strategies.collectives import schedule as schedule_lib

# What happens to a piece.
SEND = 0  # from a buffer
COPY = 1  # received into a buffer
ADD_TO_ARRAY = 2  # out = array + received: the first addition
ADD = 3  # out = out + received
COMBINE = 4  # out = the staged pieces of all ranks, in rank order

# The buffers of a run.
ARRAY = 0
OUT = 1
STAGE = 2


class Piece(NamedTuple):
  """A stretch of bytes and what happens to it.

  Attributes:
    kind: one of the constants above.
    peer: the rank it goes to or comes from; -1 for none.
    start: first byte in the buffer.
    stop: the byte after the last.
    buffer: the one that is read by SEND and written by the others.
  """

  kind: int
  peer: int
  start: int
  stop: int
  buffer: int


class Plan(NamedTuple):
  """Everything that one rank does in a collective.

  Attributes:
    pieces: in any order.
    needs: for each piece, how many others must be done before it.
    unlocks: for each piece, those that need it.
    sends: for each rank that gets something, its pieces in order. A rank may
      be there without pieces: it gets a header.
    receives: the same for what comes.
    stage_bytes: size of the STAGE buffer.
  """

  pieces: tuple[Piece, ...]
  needs: tuple[int, ...]
  unlocks: tuple[tuple[int, ...], ...]
  sends: dict[int, tuple[int, ...]]
  receives: dict[int, tuple[int, ...]]
  stage_bytes: int = 0

  @property
  def bytes_sent(self) -> int:
    """Bytes of arrays that the rank sends."""
    return sum(p.stop - p.start for p in self.pieces if p.kind == SEND)


class _Builder:
  """Collects pieces; turns their order on each link into a plan."""

  def __init__(self):
    self._pieces: list[Piece] = []
    self._needs: list[set[int]] = []
    self._links: dict[tuple[bool, int], list[tuple[tuple, int]]] = {}

  def link(self, sending: bool, peer: int) -> list[tuple[tuple, int]]:
    """The order of a link, which thereby exists even if it stays empty."""
    return self._links.setdefault((sending, peer), [])

  def add(self, piece: Piece, order: tuple, needs: Sequence[int] = ()) -> int:
    """Adds a piece, with a sort key for its link, and returns its number."""
    number = len(self._pieces)
    self._pieces.append(piece)
    self._needs.append(set(needs))
    if piece.peer >= 0:
      self.link(piece.kind == SEND, piece.peer).append((order, number))
    return number

  def build(self, stage_bytes: int = 0) -> Plan:
    """The plan of all pieces."""
    unlocks: list[list[int]] = [[] for _ in self._pieces]
    for number, needs in enumerate(self._needs):
      for other in sorted(needs):
        unlocks[other].append(number)
    sends, receives = {}, {}
    for (sending, peer), order in sorted(self._links.items()):
      numbers = tuple(number for _, number in sorted(order))
      (sends if sending else receives)[peer] = numbers
    return Plan(
      tuple(self._pieces),
      tuple(map(len, self._needs)),
      tuple(map(tuple, unlocks)),
      sends,
      receives,
      stage_bytes,
    )


@functools.lru_cache(maxsize=256)
def by_name(
  algorithm: str,
  world_size: int,
  rank: int,
  length: int,
  itemsize: int,
  sub_chunk_bytes: int,
) -> Plan:
  """`from_schedule` for a registered algorithm; compiled once."""
  schedule = registry.BUILDERS[algorithm](world_size)
  return from_schedule(schedule, rank, length, itemsize, sub_chunk_bytes)


def from_schedule(
  schedule: schedule_lib.Schedule,
  rank: int,
  length: int,
  itemsize: int,
  sub_chunk_bytes: int,
) -> Plan:
  """What one rank does in an all-reduce schedule.

  The first send of a chunk reads the caller's array, the first addition writes
  array + received, so that nothing is copied beforehand. In each chunk things
  happen in the schedule's order: in a round a rank first sends what it had
  before, then adds what arrives in the order of the senders.

  Args:
    schedule: a correct all-reduce.
    rank: whose plan.
    length: elements of the array.
    itemsize: bytes of an element.
    sub_chunk_bytes: the most bytes of a piece; at least one element is taken.

  Returns:
    A plan of O(T L / (C S)) pieces for T transfers of this rank, a buffer of
    L in C chunks and pieces of S bytes.
  """
  builder = _Builder()
  steps: dict[int, list[schedule_lib.Transfer]] = {}
  for transfer in schedule.transfers:
    if rank in (transfer.src, transfer.dst):
      steps.setdefault(transfer.chunk, []).append(transfer)
      sending = transfer.src == rank
      builder.link(sending, transfer.dst if sending else transfer.src)
  bounds = _bounds(length, itemsize, schedule.num_chunks)
  for chunk, transfers in steps.items():
    # Rounds are simultaneous: sends take what was there before the round.
    transfers.sort(key=lambda t: (t.round, t.src != rank, t.src, t.dst))
    pieces = _cut(*bounds[chunk], itemsize, sub_chunk_bytes)
    for index, (start, stop) in enumerate(pieces):
      _add_steps(builder, transfers, rank, start, stop, index)
  return builder.build()


def _add_steps(
  builder: _Builder,
  transfers: Sequence[schedule_lib.Transfer],
  rank: int,
  start: int,
  stop: int,
  index: int,
) -> None:
  """The life of one stretch of bytes on one rank."""
  writer: tuple[int, ...] = ()  # The last piece that wrote it.
  readers: list[int] = []  # Sends of OUT since then: not to be overwritten.
  for t in transfers:
    order = (t.round, t.chunk, index)
    if t.src == rank:
      buffer = OUT if writer else ARRAY
      number = builder.add(
        Piece(SEND, t.dst, start, stop, buffer), order, writer
      )
      if buffer == OUT:
        readers.append(number)
      continue
    if not t.reduce:
      kind = COPY
    else:
      kind = ADD if writer else ADD_TO_ARRAY
    piece = Piece(kind, t.src, start, stop, OUT)
    writer = (builder.add(piece, order, (*writer, *readers)),)
    readers = []


@functools.lru_cache(maxsize=256)
def to_everyone(world_size: int, rank: int, num_bytes: int) -> Plan:
  """Everyone sends everything to everyone, and combines it in rank order.

  One round, (N - 1) L bytes sent: for small buffers. STAGE holds one row for
  each rank; the own row stays empty.
  """
  builder = _Builder()
  received = []
  for peer in range(world_size):
    if peer == rank:
      continue
    builder.link(True, peer)
    builder.link(False, peer)
    if num_bytes:
      builder.add(Piece(SEND, peer, 0, num_bytes, ARRAY), (0,))
      row = Piece(COPY, peer, peer * num_bytes, (peer + 1) * num_bytes, STAGE)
      received.append(builder.add(row, (0,)))
  if num_bytes:
    builder.add(Piece(COMBINE, -1, 0, num_bytes, OUT), (), received)
  return builder.build(world_size * num_bytes)


@functools.lru_cache(maxsize=256)
def owners_combine(
  world_size: int,
  rank: int,
  length: int,
  itemsize: int,
  sub_chunk_bytes: int,
) -> Plan:
  """Each rank combines one chunk in rank order and sends it to all.

  2 (N - 1) / N L bytes sent, in two rounds. STAGE holds one row of this rank's
  chunk for each rank; the own row stays empty.
  """
  builder = _Builder()
  bounds = _bounds(length, itemsize, world_size)
  low, high = bounds[rank]
  peers = [peer for peer in range(world_size) if peer != rank]
  for peer in peers:
    builder.link(True, peer)
    builder.link(False, peer)
    theirs = _cut(*bounds[peer], itemsize, sub_chunk_bytes)
    for index, (start, stop) in enumerate(theirs):
      builder.add(Piece(SEND, peer, start, stop, ARRAY), (0, index))
      builder.add(Piece(COPY, peer, start, stop, OUT), (1, index))
  for index, (start, stop) in enumerate(
    _cut(low, high, itemsize, sub_chunk_bytes)
  ):
    received = []
    for peer in peers:
      shift = peer * (high - low) - low
      row = Piece(COPY, peer, start + shift, stop + shift, STAGE)
      received.append(builder.add(row, (0, index)))
    combined = builder.add(Piece(COMBINE, -1, start, stop, OUT), (), received)
    for peer in peers:
      builder.add(Piece(SEND, peer, start, stop, OUT), (1, index), [combined])
  return builder.build(world_size * (high - low))


@functools.lru_cache(maxsize=256)
def chain(
  world_size: int, rank: int, root: int, num_bytes: int, sub_chunk_bytes: int
) -> Plan:
  """A broadcast along a chain: each rank passes on what it has received.

  L bytes on each link, and pieces overlap, so that it takes hardly longer than
  one link needs.
  """
  builder = _Builder()
  position = (rank - root) % world_size
  before, after = (rank - 1) % world_size, (rank + 1) % world_size
  if position > 0:
    builder.link(False, before)
  if position < world_size - 1:
    builder.link(True, after)
  for index, (start, stop) in enumerate(_cut(0, num_bytes, 1, sub_chunk_bytes)):
    got = []
    if position > 0:
      got = [builder.add(Piece(COPY, before, start, stop, OUT), (index,))]
    if position < world_size - 1:
      builder.add(
        Piece(SEND, after, start, stop, OUT if got else ARRAY), (index,), got
      )
  return builder.build()


@functools.lru_cache(maxsize=256)
def star(world_size: int, rank: int, root: int, num_bytes: int) -> Plan:
  """A broadcast straight from the root to everyone: for small buffers."""
  builder = _Builder()
  peers = [p for p in range(world_size) if p != root]
  for peer in peers if rank == root else [root]:
    builder.link(rank == root, peer)
    if num_bytes and rank == root:
      builder.add(Piece(SEND, peer, 0, num_bytes, ARRAY), (0,))
    elif num_bytes:
      builder.add(Piece(COPY, peer, 0, num_bytes, OUT), (0,))
  return builder.build()


@functools.lru_cache(maxsize=64)
def gather(rank: int, sizes: tuple[int, ...], sub_chunk_bytes: int) -> Plan:
  """Everyone's bytes to everyone, one after the other in OUT.

  Args:
    rank: whose plan.
    sizes: bytes of each rank.
    sub_chunk_bytes: the most bytes of a piece.
  """
  builder = _Builder()
  starts = [0, *itertools.accumulate(sizes)]
  for peer, size in enumerate(sizes):
    if peer == rank:
      continue
    builder.link(True, peer)
    builder.link(False, peer)
    for index, (start, stop) in enumerate(
      _cut(0, sizes[rank], 1, sub_chunk_bytes)
    ):
      builder.add(Piece(SEND, peer, start, stop, ARRAY), (index,))
    for index, (start, stop) in enumerate(
      _cut(starts[peer], starts[peer] + size, 1, sub_chunk_bytes)
    ):
      builder.add(Piece(COPY, peer, start, stop, OUT), (index,))
  return builder.build()


def _bounds(
  length: int, itemsize: int, num_chunks: int
) -> list[tuple[int, int]]:
  """First and last byte (exclusive) of each chunk."""
  sizes = schedule_lib.chunk_sizes(length, num_chunks)
  ends = [end * itemsize for end in itertools.accumulate(sizes)]
  return list(zip([0, *ends[:-1]], ends, strict=True))


def _cut(
  start: int, stop: int, itemsize: int, sub_chunk_bytes: int
) -> Iterator[tuple[int, int]]:
  """Cuts a stretch into pieces of whole elements."""
  step = max(sub_chunk_bytes // itemsize, 1) * itemsize
  for first in range(start, stop, step):
    yield first, min(first + step, stop)
