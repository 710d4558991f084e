"""A `Schedule` as permutations, for machines on which all ranks run one program.

There a message is a collective of all ranks: in one step each sends at most one
chunk and receives at most one (XLA's CollectivePermute). Which chunk that is, is
looked up by rank in tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tf_strategies import errors
from tf_strategies.collectives import schedule as schedule_lib

# In the tables: this rank does not take part.
NO_CHUNK = -1


@dataclasses.dataclass(frozen=True)
class PermutationStep:
  """Messages of which every rank sends at most one and receives at most one.

  Attributes:
    source_target_pairs: (src, dst) of each message, sorted.
    send_chunk: for each rank the chunk that it sends, or `NO_CHUNK`.
    receive_chunk: for each rank the chunk that it receives into, or `NO_CHUNK`.
    reduce: True if receivers add what comes to their own chunk, False if they
      overwrite it.
  """

  source_target_pairs: tuple[tuple[int, int], ...]
  send_chunk: tuple[int, ...]
  receive_chunk: tuple[int, ...]
  reduce: bool

  @property
  def is_full(self) -> bool:
    """Whether every rank receives a chunk."""
    return NO_CHUNK not in self.receive_chunk


def permutation_rounds(
  schedule: schedule_lib.Schedule,
) -> tuple[tuple[PermutationStep, ...], ...]:
  """Decomposes each round of a schedule into permutation steps.

  Transfers over the same distance (dst - src, modulo the number of ranks) make
  a rotation together. In order of distance, each goes into the first step of
  its round in which its sender and its receiver are free. A rank that sends or
  receives k chunks in a round needs k steps at least: what this takes for every
  schedule of this package, and less than twice of for any other, where
  additions and overwriting, which never share a step, count apart.

  All steps of a round read the state from before the round, and are applied in
  the order of the result, which fixes the order of additions.

  Example:

    >>> from tf_strategies.collectives.algorithms import ring
    >>> rounds = permutation_rounds(ring.ring_all_reduce(3))
    >>> rounds[0][0].source_target_pairs
    ((0, 1), (1, 2), (2, 0))
    >>> rounds[0][0].send_chunk, rounds[0][0].receive_chunk
    ((0, 1, 2), (2, 0, 1))
    >>> [len(steps) for steps in rounds]
    [1, 1, 1, 1]

  Args:
    schedule: an all-reduce, correct or not.

  Returns:
    One tuple of steps for each round. O(T s) for T transfers and s steps a
    round.

  Raises:
    ScheduleError: not a schedule, a rank or chunk out of range, or a chunk
      that has two writers in a round of which one overwrites.
  """
  if not isinstance(schedule, schedule_lib.Schedule):
    raise errors.ScheduleError(
      f'schedule ({schedule!r}) must be a Schedule: pass what a builder '
      'returns, for instance ring_all_reduce(world_size).'
    )
  schedule.check_ranges()
  n = schedule.world_size
  rounds = []
  for transfers in schedule.rounds():
    _check_writers(schedule, transfers)
    groups: list[list[schedule_lib.Transfer]] = []
    for transfer in sorted(transfers, key=lambda t: (t.dst - t.src) % n):
      free = (group for group in groups if _fits(group, transfer))
      group = next(free, None)
      if group is None:
        groups.append(group := [])
      group.append(transfer)
    rounds.append(tuple(_step(group, n) for group in groups))
  return tuple(rounds)


def _check_writers(
  schedule: schedule_lib.Schedule, transfers: Sequence[schedule_lib.Transfer]
) -> None:
  """Refuses a chunk with several writers of which one overwrites."""
  writers: dict[tuple[int, int], schedule_lib.Transfer] = {}
  for transfer in transfers:
    other = writers.setdefault((transfer.dst, transfer.chunk), transfer)
    if other is not transfer and not (other.reduce and transfer.reduce):
      raise errors.ScheduleError(
        f'schedule {schedule.name!r} of {schedule.world_size} ranks: {transfer} '
        f'and {other} write the same chunk in one round, and not both add to '
        'it. Move one of them to another round.'
      )


def _fits(
  group: Sequence[schedule_lib.Transfer], transfer: schedule_lib.Transfer
) -> bool:
  """Whether sender and receiver are free in a group of the same kind."""
  return all(
    t.src != transfer.src
    and t.dst != transfer.dst
    and t.reduce == transfer.reduce
    for t in group
  )


def _step(
  transfers: Sequence[schedule_lib.Transfer], world_size: int
) -> PermutationStep:
  send, receive = [NO_CHUNK] * world_size, [NO_CHUNK] * world_size
  for transfer in transfers:
    send[transfer.src] = transfer.chunk
    receive[transfer.dst] = transfer.chunk
  return PermutationStep(
    tuple(sorted((t.src, t.dst) for t in transfers)),
    tuple(send),
    tuple(receive),
    transfers[0].reduce,
  )
