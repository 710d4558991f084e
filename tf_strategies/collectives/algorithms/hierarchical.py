"""Two-level ring all-reduce: fast links inside a group, few bytes between."""

import math

from tf_strategies import errors
from tf_strategies.collectives import schedule
from tf_strategies.collectives.algorithms import ring


@schedule.algorithm
def hierarchical_all_reduce(
  world_size: int, group_size: int | None = None
) -> schedule.Transfers:
  """Rings inside groups of ranks, and rings across the groups.

  With groups of g consecutive ranks (the devices of a host) and G = N / g
  groups: a ring reduce-scatter inside each group leaves every rank 1/g of the
  group's sum; ranks with the same place in their groups all-reduce it with a
  ring across groups; a ring all-gather inside each group spreads the result.

  Each rank sends `2 (G - 1) / N * L` bytes of a buffer of L to another group
  and `2 (g - 1) / g * L` inside its own (where N divides L), in
  2 (g - 1) + 2 (G - 1) rounds instead of a flat ring's 2 (N - 1).

  Source: Jia et al., "Highly scalable deep learning training system with
  mixed-precision: training ImageNet in four minutes", 2018; Ueno and Yokota,
  "Exhaustive study of hierarchical AllReduce patterns", CCGRID 2019.

  Example:

    >>> hierarchical_all_reduce(8, group_size=4).num_rounds
    8
    >>> hierarchical_all_reduce(8).name
    'hierarchical'

  Args:
    world_size: number of ranks N.
    group_size: ranks in a group; `default_group_size(world_size)` if None.

  Returns:
    A schedule of N chunks with 2 N (N - 1) transfers.

  Raises:
    ScheduleError: `group_size` does not divide `world_size`.
  """
  if group_size is None:
    group_size = default_group_size(world_size)
  if world_size % group_size:
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    raise errors.ScheduleError(
      f'Expected a group_size that divides world_size={world_size}, got '
      f'{group_size!r}. Fix: use one of {divisors}.'
    )
  num_groups = world_size // group_size
  # Block b is what place b - 1 of every group sums up across the groups.
  blocks = [
    range(b * num_groups, (b + 1) * num_groups) for b in range(group_size)
  ]
  across = group_size - 1  # The round in which the rings across groups start.
  gather = across + 2 * (num_groups - 1)
  for group in range(num_groups):
    members = range(group * group_size, (group + 1) * group_size)
    yield from ring.ring_half(members, blocks, 0, True)
    yield from ring.ring_half(members, blocks, gather, False)
  for place in range(group_size):
    peers = range(place, world_size, group_size)
    chunks = [(chunk,) for chunk in blocks[(place + 1) % group_size]]
    yield from ring.ring_half(peers, chunks, across, True)
    yield from ring.ring_half(peers, chunks, across + num_groups - 1, False)


def default_group_size(world_size: int) -> int:
  """Returns the divisor of `world_size` nearest to its square root.

  It gives the smallest number of rounds, 2 (g - 1) + 2 (N / g - 1).

  Example:

    >>> [default_group_size(n) for n in (1, 7, 12, 16)]
    [1, 1, 3, 4]

  Args:
    world_size: number of ranks.

  Returns:
    The group size; 1 where `world_size` is a prime. O(sqrt(world_size)).
  """
  # The nearest divisor is never above the root: the one above is N / d of one
  # below, and d + N / d >= 2 sqrt(N) puts N / d farther away.
  return max(
    d for d in range(1, math.isqrt(world_size) + 1) if world_size % d == 0
  )
