"""Halving-doubling all-reduce: a ring's bytes in a tree's number of rounds."""

from tf_strategies.collectives import schedule


@schedule.algorithm
def halving_doubling_all_reduce(world_size: int) -> schedule.Transfers:
  """Halves vectors recursively while it doubles distances, and goes back.

  With N = 2^k ranks, step s exchanges half of the remaining part with the rank at
  distance 2^s: a reduce-scatter in k rounds; the all-gather mirrors it. Each
  rank sends `2 (N - 1) / N * L` bytes of a buffer of L, as in a ring, in
  2 log2 N rounds.

  Where the largest power of two P is below N, the first N - P even ranks fold
  their buffers into their right neighbours before, and get the sum back after:
  two rounds of L bytes more. What a rank sends to another in one round are
  neighbours in the buffer.

  Source: Rabenseifner, "Optimization of collective reduction operations",
  ICCS 2004; Thakur, Rabenseifner and Gropp, "Optimization of collective
  communication operations in MPICH", IJHPCA 19, 2005.

  Example:

    >>> [halving_doubling_all_reduce(n).num_rounds for n in (4, 5, 8)]
    [4, 6, 6]
    >>> halving_doubling_all_reduce(4).bytes_in([10, 10, 10, 10])
    (60, 60, 60, 60)

  Args:
    world_size: number of ranks N.

  Returns:
    A schedule of P chunks with 2 P (P - 1) + 2 (N - P) P transfers.
  """
  num_chunks = 1 << (world_size.bit_length() - 1)
  folded = world_size - num_chunks
  # Position -> rank: of each folded pair the odd rank stays in the game.
  ranks = [2 * i + 1 for i in range(folded)]
  ranks += range(2 * folded, world_size)
  steps = num_chunks.bit_length() - 1
  first = 1 if folded else 0
  last = first + 2 * steps  # The round after the all-gather.

  for pair in range(folded):
    even, odd = 2 * pair, 2 * pair + 1
    for chunk in range(num_chunks):
      yield schedule.Transfer(0, even, odd, chunk, True)
      yield schedule.Transfer(last, odd, even, chunk, False)
  for position, rank in enumerate(ranks):
    low, high = 0, num_chunks  # The chunks that this position still sums.
    for step in range(steps):
      partner = ranks[position ^ (1 << step)]
      middle = (low + high) // 2
      lower = range(low, middle)
      upper = range(middle, high)
      keep, give = (upper, lower) if position >> step & 1 else (lower, upper)
      low, high = keep.start, keep.stop
      up, down = first + step, last - 1 - step
      for chunk in give:
        yield schedule.Transfer(up, rank, partner, chunk, True)
      for chunk in keep:
        yield schedule.Transfer(down, rank, partner, chunk, False)
