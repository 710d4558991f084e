"""Describes an all-reduce by integers: transfers, rounds and their check.

An algorithm is a function that returns a `Schedule`. The executors and the cost
model take any Schedule, so that an algorithm cannot be right in one place and wrong
in another.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence

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


@dataclasses.dataclass(frozen=True)
class Schedule:
  """An all-reduce (sum) of one buffer on `world_size` ranks.

  Every rank starts with its own contribution to each of `num_chunks` chunks
  and ends with the sum of all contributions.

  Example:

    >>> exchange = Schedule('exchange', 2, 1, (
    ...   Transfer(0, src=0, dst=1, chunk=0, reduce=True),
    ...   Transfer(0, src=1, dst=0, chunk=0, reduce=True)))
    >>> exchange.validate().num_rounds
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

  def validate(self) -> 'Schedule':
    """Proves that this schedule computes an all-reduce.

    Follows which ranks' contributions each rank holds of each chunk, and in
    which order they were added. As data only gets copied and added, this is a
    proof for all inputs.

    Returns:
      The schedule itself. Takes O(T) set operations on N bits for T transfers
      and N ranks.

    Raises:
      ScheduleError: names the transfer that is out of range, goes to its own
        sender, adds a contribution twice, overwrites what another writes in
        that round or follows a gap between rounds; or the rank that lacks
        contributions at the end; or two that add, and so round, differently.
    """
    self.check_ranges()
    for index, transfers in enumerate(self.rounds()):
      if transfers[0].round != index:
        raise errors.ScheduleError(
          f'{self._label}: round {index} is empty, next is {transfers[0]}. '
          'Fix: number the rounds 0, 1, 2, ... without gaps.'
        )
    held, sums, _ = self._replay
    for rank in range(self.world_size):
      for chunk in range(self.num_chunks):
        if held[rank][chunk] != self._everyone:
          missing = _ranks_in(self._everyone & ~held[rank][chunk])
          raise errors.ScheduleError(
            f'{self._label}: at the end rank {rank} lacks the contributions '
            f'of ranks {missing} to chunk {chunk}. Fix: add transfers that '
            'bring them, or do not overwrite their only holder.'
          )
        if sums[rank][chunk] != sums[0][chunk]:
          raise errors.ScheduleError(
            f'{self._label}: ranks 0 and {rank} add up chunk {chunk} in '
            'different orders, which rounds differently. Fix: add it up on '
            'one rank, or on all in rank order.'
          )
    return self

  def reduce_scatter(self) -> 'Schedule':
    """Returns the half of this all-reduce after which rank r has the sum of chunk r.

    Only the transfers that lead to these sums stay, with chunks renumbered.

    Example:

      >>> from tf_strategies.collectives.algorithms import ring
      >>> half = ring.ring_all_reduce(3).reduce_scatter()
      >>> half.num_rounds, half.owners()
      (2, (0, 1, 2))

    Returns:
      A schedule that `validate()` rejects. O(T) for T transfers.

    Raises:
      ScheduleError: the ranks do not own one chunk each.
    """
    owners = self.owners()
    if sorted(owners) != list(range(self.world_size)):
      raise errors.ScheduleError(
        'Expected one chunk for each rank, as in the ring, got '
        f'{self.num_chunks} chunks of {self._label} that ranks {list(owners)} '
        'complete. Fix: use a schedule that has a reduce-scatter half.'
      )
    needed = {(owner, chunk) for chunk, owner in enumerate(owners)}
    kept: list[list[Transfer]] = []
    for arrivals in reversed(self.arrivals()):
      transfers = [t for p in needed & arrivals.keys() for t in arrivals[p]]
      needed -= {(t.dst, t.chunk) for t in transfers if not t.reduce}
      needed |= {(t.src, t.chunk) for t in transfers}
      if transfers:
        kept.append(transfers)
    return Schedule(
      f'{self.name}_reduce_scatter',
      self.world_size,
      self.num_chunks,
      tuple(
        dataclasses.replace(t, round=index, chunk=owners[t.chunk])
        for index, transfers in enumerate(reversed(kept))
        for t in transfers
      ),
    )

  def arrivals(
    self,
  ) -> tuple[dict[tuple[int, int], tuple[Transfer, ...]], ...]:
    """Returns the writes of each round: {(dst, chunk): transfers, by sender}."""
    arrivals = []
    for transfers in self.rounds():
      places: dict[tuple[int, int], list[Transfer]] = {}
      for t in transfers:
        places.setdefault((t.dst, t.chunk), []).append(t)
      arrivals.append({p: tuple(ts) for p, ts in places.items()})
    return tuple(arrivals)

  def check_ranges(self) -> 'Schedule':
    """Checks that every number is usable as an index, and nothing more."""
    ranks, chunks = range(self.world_size), range(self.num_chunks)
    for t in self.transfers:
      is_inside = t.src in ranks and t.dst in ranks and t.chunk in chunks
      if not is_inside or t.round < 0 or t.src == t.dst:
        raise errors.ScheduleError(
          f'{self._label}: {t} is not between two of these ranks, in a round '
          f'of 0 or more, with one of {self.num_chunks} chunks. Fix: correct '
          'or remove it.'
        )
    return self

  def completions(self) -> frozenset[tuple[int, int, int]]:
    """Returns where and when an addition makes a chunk complete.

    Every other complete chunk is a copy of one of these.

    Returns:
      A set of (round, rank, chunk); empty for a world of one rank.

    Raises:
      ScheduleError: a contribution is added twice or writers race.
    """
    return self._replay[2]

  def owners(self) -> tuple[int, ...]:
    """Returns, for each chunk, the lowest rank among the first that complete it.

    Raises:
      ScheduleError: no rank ever holds the complete sum of some chunk.
    """
    if self.world_size == 1:
      return (0,) * self.num_chunks
    first: dict[int, tuple[int, int]] = {}
    for round_, rank, chunk in self.completions():
      first[chunk] = min(first.get(chunk, (round_, rank)), (round_, rank))
    for chunk in range(self.num_chunks):
      if chunk not in first:
        raise errors.ScheduleError(
          f'{self._label}: no rank ever holds the complete sum of chunk '
          f'{chunk}. Fix: call validate() to see what is missing.'
        )
    return tuple(first[chunk][1] for chunk in range(self.num_chunks))

  def bytes_in(self, chunk_bytes: Sequence[int]) -> tuple[int, ...]:
    """Returns the bytes that each rank receives, given the size of each chunk."""
    total = [0] * self.world_size
    for t in self.transfers:
      total[t.dst] += chunk_bytes[t.chunk]
    return tuple(total)

  @property
  def _label(self) -> str:
    return f'schedule {self.name!r} of {self.world_size} ranks'

  @property
  def _everyone(self) -> int:
    return (1 << self.world_size) - 1

  @functools.cached_property
  def _replay(self):
    """Contributions held, sums, and completions at the end of a symbolic run."""
    self.check_ranges()
    # Bit r of held[rank][chunk]: the contribution of rank r is in there.
    held = [[1 << r] * self.num_chunks for r in range(self.world_size)]
    # A number for each sum: equal where the same terms were added in the same order,
    # and in the same rounds, after which 16-bit floats are rounded. A single
    # contribution is the number of its rank.
    sums = [[r] * self.num_chunks for r in range(self.world_size)]
    numbers: dict[tuple[int, ...], int] = {}
    completions = set()
    for arrivals in self.arrivals():
      # Read everything before anything is written: a round is simultaneous.
      changed = []
      for (rank, chunk), transfers in arrivals.items():
        received = [(t, held[t.src][chunk]) for t in transfers]
        now_held = self._receive(held[rank][chunk], received)
        order = rank_order(rank, transfers)
        terms = tuple(sums[other][chunk] for other in order)
        summed = terms[0]
        if len(terms) > 1:
          summed = numbers.setdefault(terms, self.world_size + len(numbers))
        changed.append((rank, chunk, now_held, summed))
        if transfers[0].reduce and now_held == self._everyone:
          completions.add((transfers[0].round, rank, chunk))
      for rank, chunk, now_held, summed in changed:
        held[rank][chunk], sums[rank][chunk] = now_held, summed
    return held, sums, frozenset(completions)

  def _receive(self, held: int, received: list[tuple[Transfer, int]]) -> int:
    """Returns the terms of a chunk that a rank holds after the arrivals of one round."""
    for index, (transfer, sent) in enumerate(received):
      if not transfer.reduce:
        if len(received) > 1:
          # By place, not by equality: the same transfer may be there twice.
          other, _ = received[index - 1]
          raise errors.ScheduleError(
            f'{self._label}: {transfer} overwrites what {other} writes in the '
            'same round. Fix: move one of them to another round.'
          )
        return sent
      if held & sent:
        raise errors.ScheduleError(
          f'{self._label}: {transfer} adds the contributions of ranks '
          f'{_ranks_in(held & sent)} a second time. Fix: overwrite instead '
          '(reduce=False), or leave the transfer out.'
        )
      held |= sent
    return held


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


algorithm = functools.lru_cache(maxsize=32)
"""Decorates an algorithm: keeps its newest schedules."""


def _ranks_in(contributions: int) -> list[int]:
  ranks = range(contributions.bit_length())
  return [rank for rank in ranks if contributions >> rank & 1]
