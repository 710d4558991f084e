"""Naive all-reduce: everything through one rank, the yardstick for the rest."""

from __future__ import annotations

from tf_strategies.collectives import schedule


@schedule.algorithm
def naive_all_reduce(world_size: int, root: int = 0) -> schedule.Schedule:
  """Every rank sends all it has to the root, which sends the sum to all.

  Two rounds, but the root receives and sends (N - 1) L bytes of a buffer of
  L: what a parameter server with one server does. Good where copies are free.

  Example:

    >>> naive_all_reduce(4).bytes_in([100])
    (300, 100, 100, 100)

  Args:
    world_size: number of ranks N.
    root: the rank that adds.

  Returns:
    A schedule of one chunk with 2 (N - 1) transfers in two rounds.

  Raises:
    ScheduleError: `world_size` is not a positive integer, or `root` is not a
      rank.
  """
  root = schedule.check_root(root, world_size)
  others = [rank for rank in range(world_size) if rank != root]
  gather = [schedule.Transfer(0, rank, root, 0, True) for rank in others]
  broadcast = [schedule.Transfer(1, root, rank, 0, False) for rank in others]
  return schedule.Schedule('naive', world_size, 1, (*gather, *broadcast))
