"""Direct all-reduce: two rounds and a ring's bytes, on a full mesh."""

import itertools

from tf_strategies.collectives import schedule


@schedule.algorithm
def direct_all_reduce(world_size: int) -> schedule.Transfers:
  """Adds up each chunk on the rank that owns it, which sends the sum to all.

  Each rank sends `2 (N - 1) / N * L` bytes of a buffer of L, as in a ring, but
  in 2 rounds and over all N (N - 1) links: good where every pair of ranks has
  its own link or copies are free, poor where they share a switch port.

  Source: the pairwise exchange of Thakur, Rabenseifner and Gropp, "Optimization
  of collective communication operations in MPICH", IJHPCA 19, 2005, with all
  its steps in one round.

  Example:

    >>> direct = direct_all_reduce(3)
    >>> direct.num_rounds, direct.owners()
    (2, (0, 1, 2))

  Args:
    world_size: number of ranks N.

  Returns:
    A schedule of N chunks with 2 N (N - 1) transfers.
  """
  for owner, rank in itertools.permutations(range(world_size), 2):
    yield schedule.Transfer(0, rank, owner, owner, True)
    yield schedule.Transfer(1, owner, rank, owner, False)
