"""Describes an all-reduce by integers: transfers and rounds.

An algorithm is a function that makes a `Schedule`. The executors and the cost
model take any Schedule, so that an algorithm cannot be right in one place and wrong
in another.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from tf_strategies import errors


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Transfer:
  """One chunk that goes from one rank to another in one round.

  Attributes:
    round: number of the round, from 0. All transfers of a round read the state from
      before that round.
    src: the rank that sends its current value of the chunk.
    dst: the rank that receives it.
    chunk: which chunk of the buffer.
    reduce: True if `dst` adds the received chunk to its own, in the order
      of `rank_order`; False if it overwrites its own chunk.
  """

  round: int
  src: int
  dst: int
  chunk: int
  reduce: bool


Transfers = Iterator[Transfer]
"""What an algorithm yields."""


@dataclasses.dataclass(frozen=True)
class Schedule:
  """An all-reduce (sum) of one buffer on `world_size` ranks.

  Every rank starts with its own contribution to each of `num_chunks` chunks
  and ends with the sum of all contributions.

  Example:

    >>> exchange = Schedule('exchange', 2, 1, (
    ...   Transfer(0, src=0, dst=1, chunk=0, reduce=True),
    ...   Transfer(0, src=1, dst=0, chunk=0, reduce=True)))
    >>> exchange.num_rounds
    1
    >>> exchange.bytes_in([400])
    (400, 400)

  Attributes:
    name: the algorithm, for messages and timelines.
    world_size: number of ranks.
    num_chunks: number of chunks that the buffer is cut into.
    transfers: sorted, whatever the order in which they were given.
  """

  name: str
  world_size: int
  num_chunks: int
  transfers: tuple[Transfer, ...]

  def __post_init__(self):
    # One canonical order makes equal schedules compare equal, and fixes the
    # order of additions, on which a floating point sum depends.
    object.__setattr__(self, 'transfers', tuple(sorted(self.transfers)))

  def rounds(self) -> tuple[tuple[Transfer, ...], ...]:
    """Returns the transfers, grouped by round, in order."""
    groups = itertools.groupby(self.transfers, lambda t: t.round)
    return tuple(tuple(transfers) for _, transfers in groups)

  @property
  def num_rounds(self) -> int:
    """Number of rounds: the latency of the schedule in messages."""
    return len(self.rounds())

  def reduce_scatter(self) -> 'Schedule':
    """Returns the half of this all-reduce after which rank r has the sum of chunk r.

    The additions stay, with chunks renumbered. Copies must come after all of them.

    Example:

      >>> from tf_strategies.collectives.algorithms import ring
      >>> half = ring.ring_all_reduce(3).reduce_scatter()
      >>> half.num_rounds, half.owners()
      (2, (0, 1, 2))

    Returns:
      A schedule that is no all-reduce. O(T) for T transfers.

    Raises:
      ScheduleError: the ranks do not own one chunk each, or a copy comes first.
    """
    owners = self.owners()
    half = tuple(t for t in self.transfers if t.reduce)
    are_first = half == self.transfers[: len(half)]
    if not are_first or sorted(owners) != list(range(self.world_size)):
      raise errors.ScheduleError(
        'Expected one chunk for each rank, as in the ring, got '
        f'{self.num_chunks} chunks of schedule {self.name!r} that ranks '
        f'{list(owners)} of {self.world_size} complete. Fix: use a schedule that '
        'has a reduce-scatter half.'
      )
    return Schedule(
      f'{self.name}_reduce_scatter',
      self.world_size,
      self.num_chunks,
      tuple(dataclasses.replace(t, chunk=owners[t.chunk]) for t in half),
    )

  def arrivals(self) -> list[dict[tuple[int, int], list[Transfer]]]:
    """Returns the writes of each round: {(dst, chunk): transfers, by sender}."""
    arrivals = []
    for transfers in self.rounds():
      arrivals.append({})
      for t in transfers:
        arrivals[-1].setdefault((t.dst, t.chunk), []).append(t)
    return arrivals

  def owners(self) -> tuple[int, ...]:
    """Returns, for each chunk, the lowest rank that makes its last additions.

    These complete the chunk. All other ranks get copies.
    """
    owners = [0] * self.num_chunks  # A single rank adds nothing.
    for t in sorted(self.transfers, key=lambda t: (t.round, -t.dst)):
      if t.reduce:
        owners[t.chunk] = t.dst
    return tuple(owners)

  def bytes_in(self, chunk_bytes: Sequence[int]) -> tuple[int, ...]:
    """Returns the bytes that each rank receives, given the size of each chunk."""
    total = [0] * self.world_size
    for t in self.transfers:
      total[t.dst] += chunk_bytes[t.chunk]
    return tuple(total)


def rank_order(rank: int, transfers: Iterable[Transfer]) -> list[int]:
  """Returns the ranks whose values make up a chunk after a round, in order.

  The order of a floating point sum decides its bits: ranks that add up the same
  terms for themselves get the same bits, because all go by rank.

  Example:

    >>> rank_order(1, [Transfer(0, 2, 1, 0, True), Transfer(0, 0, 1, 0, True)])
    [0, 1, 2]

  Returns:
    The senders of what `rank` receives in one round for one chunk and, unless
    one of them overwrites, `rank` itself.
  """
  order = [rank]
  for t in transfers:
    order = [*order, t.src] if t.reduce else [t.src]
  return sorted(order)


def chunk_sizes(length: int, num_chunks: int) -> tuple[int, ...]:
  """Cuts a length into balanced parts; the first ones are one larger.

  Example:

    >>> chunk_sizes(11, 4)
    (3, 3, 3, 2)

  Args:
    length: elements or bytes to divide, 0 or more.
    num_chunks: number of parts, 1 or more.

  Returns:
    `num_chunks` sizes that add up to `length`. O(num_chunks).
  """
  size, larger = divmod(length, num_chunks)
  return (size + 1,) * larger + (size,) * (num_chunks - larger)


def algorithm(
  transfers_of: Callable[..., Transfers],
) -> Callable[..., Schedule]:
  """Decorates `name_all_reduce`: makes schedules of the transfers that it yields.

  Its first argument is the number of ranks. The newest schedules are kept.

  Example:

    >>> @algorithm
    ... def swap_all_reduce(world_size):
    ...   yield Transfer(0, src=0, dst=1, chunk=0, reduce=True)
    ...   yield Transfer(0, src=1, dst=0, chunk=0, reduce=True)
    >>> swap_all_reduce(2).name
    'swap'
  """

  @functools.lru_cache(maxsize=32)
  @functools.wraps(transfers_of)
  def make(world_size, *args, **kwargs):
    transfers = tuple(transfers_of(world_size, *args, **kwargs))
    num_chunks = 1 + max((t.chunk for t in transfers), default=0)
    name = transfers_of.__name__.removesuffix('_all_reduce')
    return Schedule(name, world_size, num_chunks, transfers)

  return make
