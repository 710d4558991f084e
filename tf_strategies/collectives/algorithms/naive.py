"""Naive all-reduce: everything through one rank, the yardstick for the rest."""

from tf_strategies.collectives import schedule


@schedule.algorithm
def naive_all_reduce(world_size: int) -> schedule.Transfers:
  """Sends all buffers to rank 0, which sends the sum to all.

  It takes two rounds, but rank 0 receives and sends (N - 1) L bytes of a buffer of L,
  as a single parameter server does. Good if copies are free.

  Example:

    >>> naive_all_reduce(4).bytes_in([100])
    (300, 100, 100, 100)

  Args:
    world_size: number of ranks N.

  Returns:
    A schedule of one chunk with 2 (N - 1) transfers in two rounds.
  """
  for rank in range(1, world_size):
    yield schedule.Transfer(0, rank, 0, 0, True)
    yield schedule.Transfer(1, 0, rank, 0, False)
