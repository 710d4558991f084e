"""Proves that a schedule computes an all-reduce.

It follows which ranks' contributions each rank holds of each chunk, and in which order
they were added. As data only gets copied and added, this is a proof for all inputs.
"""

from __future__ import annotations

from tf_strategies.collectives import schedule as schedule_lib


class WrongScheduleError(Exception):
  """A schedule does not compute an all-reduce."""


def check_ranges(schedule: schedule_lib.Schedule) -> None:
  """Raises unless every number is usable as an index; checks nothing more."""
  ranks, chunks = range(schedule.world_size), range(schedule.num_chunks)
  for t in schedule.transfers:
    is_inside = t.src in ranks and t.dst in ranks and t.chunk in chunks
    if not is_inside or t.round < 0 or t.src == t.dst:
      raise WrongScheduleError(f'{t} is not between two ranks')


def validate(schedule: schedule_lib.Schedule) -> None:
  """Raises unless a schedule computes an all-reduce.

  Takes O(T) set operations on N bits for T transfers and N ranks.

  Raises:
    WrongScheduleError: names the transfer that is out of range, goes to its own sender,
      adds a contribution twice, overwrites what another writes in that round or follows
      a gap between rounds; or the rank that lacks contributions at the end; or two that
      add, and so round, differently.
  """
  check_ranges(schedule)
  for index, transfers in enumerate(schedule.rounds()):
    if transfers[0].round != index:
      raise WrongScheduleError(
        f'round {index} is empty, next is {transfers[0]}'
      )
  held, sums = _replay(schedule)
  everyone = (1 << schedule.world_size) - 1
  for rank in range(schedule.world_size):
    for chunk in range(schedule.num_chunks):
      if held[rank][chunk] != everyone:
        missing = _ranks_in(everyone & ~held[rank][chunk])
        raise WrongScheduleError(
          f'at the end rank {rank} lacks the contributions of ranks {missing} to '
          f'chunk {chunk}'
        )
      if sums[rank][chunk] != sums[0][chunk]:
        raise WrongScheduleError(
          f'ranks 0 and {rank} add up chunk {chunk} in different orders'
        )


def _replay(schedule):
  """Returns the contributions and the sums that each rank holds at the end."""
  ranks, chunks = range(schedule.world_size), schedule.num_chunks
  # Bit r of held[rank][chunk]: the contribution of rank r is in there.
  held = [[1 << r] * chunks for r in ranks]
  # A number for each sum: equal where the same terms were added in the same order,
  # and in the same rounds, after which 16-bit floats are rounded. A single
  # contribution is the number of its rank.
  sums = [[r] * chunks for r in ranks]
  numbers: dict[tuple[int, ...], int] = {}
  for arrivals in schedule.arrivals():
    # Read everything before anything is written: a round is simultaneous.
    changed = []
    for (rank, chunk), transfers in arrivals.items():
      received = [(t, held[t.src][chunk]) for t in transfers]
      now_held = _receive(held[rank][chunk], received)
      order = schedule_lib.rank_order(rank, transfers)
      terms = tuple(sums[other][chunk] for other in order)
      summed = terms[0]
      if len(terms) > 1:
        summed = numbers.setdefault(terms, len(ranks) + len(numbers))
      changed.append((rank, chunk, now_held, summed))
    for rank, chunk, now_held, summed in changed:
      held[rank][chunk], sums[rank][chunk] = now_held, summed
  return held, sums


def _receive(held, received):
  """Returns the terms of a chunk that a rank holds after the arrivals of one round."""
  for index, (transfer, sent) in enumerate(received):
    if not transfer.reduce:
      if len(received) > 1:
        # By place, not by equality: the same transfer may be there twice.
        other, _ = received[index - 1]
        raise WrongScheduleError(
          f'{transfer} overwrites what {other} writes in the same round'
        )
      return sent
    if held & sent:
      raise WrongScheduleError(
        f'{transfer} adds the contributions of ranks {_ranks_in(held & sent)} a '
        'second time'
      )
    held |= sent
  return held


def _ranks_in(contributions: int) -> list[int]:
  ranks = range(contributions.bit_length())
  return [rank for rank in ranks if contributions >> rank & 1]
