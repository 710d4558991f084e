"""Double binary tree all-reduce: a tree's rounds at nearly a ring's bytes."""

from __future__ import annotations

from tf_strategies.collectives import schedule


@schedule.algorithm
def double_binary_tree_all_reduce(
  world_size: int, segments: int = 1
) -> schedule.Schedule:
  """Reduces and broadcasts each half of the buffer along a tree of its own.

  Inner nodes of one tree are leaves of the other, so that no rank sends or
  receives more than 2 L bytes of a buffer of L, where the root of a single
  tree sends L to each of its children. Takes 2 floor(log2 N) rounds.

  With S segments a half is cut into S chunks that follow each other through
  the tree, one round apart: S - 1 rounds more, and messages of L / 2 S bytes.
  A process group overlaps parts of a chunk without that.

  Source: Sanders, Speck and Traff, "Two-tree algorithms for full bandwidth
  broadcast, reduction and scan", Parallel Computing 35, 2009; Jeaugey,
  "Massively scale your deep learning training with NCCL 2.4", 2019.

  Example:

    >>> trees = double_binary_tree_all_reduce(5)
    >>> [[(t.src, t.dst) for t in round_] for round_ in trees.rounds()[:2]]
    [[(0, 1), (1, 2), (2, 1), (3, 2)], [(0, 4), (1, 3), (2, 4), (4, 3)]]
    >>> trees.bytes_out([10, 10])
    (20, 40, 40, 30, 30)

  Args:
    world_size: number of ranks N.
    segments: chunks S in each half.

  Returns:
    A schedule of 2 S chunks with 4 S (N - 1) transfers.

  Raises:
    ScheduleError: `world_size` or `segments` is not a positive integer.
  """
  fix = 'Fix: leave it out for one chunk in each half.'
  segments = schedule.check_int('segments', segments, 1, fix=fix)
  if world_size == 1:
    return schedule.Schedule('double_binary_tree', 1, 1, ())
  height = world_size.bit_length() - 1
  transfers = []
  for position in range(1, world_size + 1):
    parent = _parent(position, world_size)
    if not parent:
      continue
    depth = _depth(position, world_size)
    for tree in range(2):
      # In-order, leaves have the odd positions, so a shift of the ranks by one
      # makes inner nodes leaves. That holds for odd N too, as the last
      # position, which meets the first, is a leaf then.
      src = (position - 1 + tree) % world_size
      dst = (parent - 1 + tree) % world_size
      for segment in range(segments):
        chunk = tree * segments + segment
        up = height - depth + segment
        # The broadcast is the mirror image of the reduction.
        down = height + depth - 1 + segment
        transfers.append(schedule.Transfer(up, src, dst, chunk, True))
        transfers.append(schedule.Transfer(down, dst, src, chunk, False))
  return schedule.Schedule(
    'double_binary_tree', world_size, 2 * segments, tuple(transfers)
  )


def _parent(position: int, last: int) -> int:
  """The parent in the in-order binary tree of positions 1 to `last`, or 0.

  A position whose lowest bit is b has its children b / 2 to the left and to
  the right; where the right one is beyond the end, the next lower one there.
  """
  bit = position & -position
  parent = (position ^ bit) | (bit << 1)
  return parent if parent <= last else position ^ bit


def _depth(position: int, last: int) -> int:
  parent = _parent(position, last)
  return 1 + _depth(parent, last) if parent else 0
