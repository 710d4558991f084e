"""One-shot all-reduce: everything to everyone at once, for small buffers."""

import itertools

from tf_strategies.collectives import schedule


@schedule.algorithm
def one_shot_all_reduce(world_size: int) -> schedule.Transfers:
  """Sends the whole buffer of every rank to all others, which add it.

  A single round, the least latency there can be, but each rank sends
  (N - 1) L bytes of a buffer of L. All ranks add in rank order, so that they
  end with the same bits.

  Example:

    >>> one_shot = one_shot_all_reduce(4)
    >>> one_shot.num_rounds, one_shot.bytes_in([10])
    (1, (30, 30, 30, 30))

  Args:
    world_size: number of ranks N.

  Returns:
    A schedule of one chunk with N (N - 1) transfers.
  """
  for src, dst in itertools.permutations(range(world_size), 2):
    yield schedule.Transfer(0, src, dst, 0, True)
