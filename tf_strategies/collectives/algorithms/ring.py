"""Ring all-reduce: the least possible bytes on each link, neighbours only."""

from collections.abc import Sequence

from tf_strategies.collectives import schedule


@schedule.algorithm
def ring_all_reduce(world_size: int) -> schedule.Transfers:
  """Reduce-scatters around a ring, then all-gathers around the same ring.

  Each rank only ever sends to the next one. With N ranks and a buffer of L
  bytes, the link from rank r carries `2 L - size[r+1] - size[r+2]` (indices
  modulo N), which is `2 (N - 1) / N * L` where N divides L: the lower bound
  of any all-reduce, reached in 2 (N - 1) rounds.

  Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
  clusters of workstations", JPDC 69, 2009.

  Example:

    >>> ring = ring_all_reduce(3)
    >>> ring.num_rounds
    4
    >>> ring.bytes_in([4, 4, 4])
    (16, 16, 16)

  Args:
    world_size: number of ranks N.

  Returns:
    A schedule of N chunks with 2 N (N - 1) transfers.
  """
  ranks = range(world_size)
  chunks = [(chunk,) for chunk in ranks]
  yield from ring_half(ranks, chunks, first_round=0, reduce=True)
  yield from ring_half(ranks, chunks, first_round=world_size - 1, reduce=False)


def ring_half(
  ranks: Sequence[int],
  blocks: Sequence[Sequence[int]],
  first_round: int,
  reduce: bool,
) -> schedule.Transfers:
  """Yields a reduce-scatter or an all-gather, over `len(ranks) - 1` rounds.

  Example:

    >>> half = ring_half([5, 7], [[0], [1]], first_round=0, reduce=True)
    >>> [(t.src, t.chunk) for t in half]
    [(5, 0), (7, 1)]

  Args:
    ranks: the members of the ring, in order.
    blocks: as many groups of chunks as there are members; a block travels as
      one.
    first_round: the round of the first transfers.
    reduce: True for the reduce-scatter, after which position i holds block
      i + 1 complete; False for the all-gather, which begins there.
  """
  size = len(ranks)
  for step in range(size - 1):
    for position, src in enumerate(ranks):
      for chunk in blocks[(position - step + (not reduce)) % size]:
        dst = ranks[(position + 1) % size]
        yield schedule.Transfer(first_round + step, src, dst, chunk, reduce)
