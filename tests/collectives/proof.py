"""Proves that a schedule computes an all-reduce.

It tracks the contributions that each rank holds of each chunk, and the order of the
additions. Since data is only copied and added, this is a proof for all inputs.
"""

from __future__ import annotations

from tf_strategies.collectives import schedule as schedule_lib


class WrongScheduleError(Exception):
  """A schedule does not compute an all-reduce."""


def validate(schedule: schedule_lib.Schedule) -> None:
  """Raises unless a schedule computes an all-reduce.

  Takes O(T) set operations for T transfers.

  Raises:
    WrongScheduleError: a transfer is out of range, goes to its own sender, adds a
      contribution twice, overwrites another write of the round, or follows a gap
      between rounds. Or a rank lacks contributions at the end, or two ranks add in
      different orders. The message names it.
  """
  ranks, chunks = range(schedule.world_size), range(schedule.num_chunks)
  for t in schedule.transfers:
    is_inside = t.src in ranks and t.dst in ranks and t.chunk in chunks
    _check(is_inside and t.round >= 0 and t.src != t.dst, f'{t} is impossible')
  for index, transfers in enumerate(schedule.rounds()):
    _check(transfers[0].round == index, f'round {index} is empty')
  # For each rank and chunk: the ranks whose contributions it holds, and the order of
  # the additions. The order includes rounds, after which 16-bit floats are rounded.
  state = {(r, chunk): ({r}, (r,)) for r in ranks for chunk in chunks}
  for arrivals in schedule.arrivals():
    # A round is simultaneous: all reads precede all writes.
    changed = {}
    for (rank, chunk), transfers in arrivals.items():
      held = state[rank, chunk][0]
      for t in transfers:
        sent = state[t.src, chunk][0]
        if not t.reduce:
          _check(len(transfers) == 1, f'{t} overwrites other writes')
          held = set()
        twice = sorted(held & sent)
        _check(not twice, f'{t} adds the terms of ranks {twice} a second time')
        held = held | sent
      order = schedule_lib.rank_order(rank, transfers)
      terms = tuple(state[other, chunk][1] for other in order)
      changed[rank, chunk] = held, terms if len(terms) > 1 else terms[0]
    state.update(changed)
  for (rank, chunk), (held, terms) in state.items():
    missing = sorted({*ranks} - held)
    _check(not missing, f'rank {rank} lacks ranks {missing} to chunk {chunk}')
    is_same = terms == state[0, chunk][1]
    _check(is_same, f'ranks 0 and {rank} add up chunk {chunk} differently')


def _check(is_valid: bool, problem: str) -> None:
  if not is_valid:
    raise WrongScheduleError(problem)
