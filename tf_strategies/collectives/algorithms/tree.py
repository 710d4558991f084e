"""Tree all-reduce: few rounds with the whole buffer, for small buffers."""

from tf_strategies.collectives import schedule


@schedule.algorithm
def tree_all_reduce(world_size: int) -> schedule.Transfers:
  """Reduces along a binomial tree to rank 0, and broadcasts back along it.

  Takes 2 ceil(log2 N) rounds, each of which moves the whole buffer: good while
  latency outweighs bandwidth.

  Source: Thakur, Rabenseifner and Gropp, "Optimization of collective
  communication operations in MPICH", IJHPCA 19, 2005.

  Example:

    >>> tree = tree_all_reduce(5)
    >>> [[(t.src, t.dst) for t in round_] for round_ in tree.rounds()[:3]]
    [[(1, 0), (3, 2)], [(2, 0)], [(4, 0)]]

  Args:
    world_size: number of ranks N.

  Returns:
    A schedule of one chunk with 2 (N - 1) transfers.
  """
  depth = (world_size - 1).bit_length()
  for level in range(depth):
    distance = 1 << level
    for parent in range(0, world_size - distance, 2 * distance):
      child = parent + distance
      # The broadcast is the mirror image in time of the reduction.
      up, down = level, 2 * depth - 1 - level
      yield schedule.Transfer(up, child, parent, 0, True)
      yield schedule.Transfer(down, parent, child, 0, False)
