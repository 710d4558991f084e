"""Double binary tree all-reduce: a tree's rounds at nearly a ring's bytes."""

from __future__ import annotations

from tf_strategies.collectives import schedule


@schedule.algorithm
def double_binary_tree_all_reduce(world_size: int) -> schedule.Schedule:
  """Reduces and broadcasts each half of the buffer along a tree of its own.

  Inner nodes of one tree are leaves of the other, so that no rank sends or
  receives more than 2 L bytes of a buffer of L, where the root of a single
  tree sends L to each of its children. Takes 2 floor(log2 N) rounds.

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

  Returns:
    A schedule of 2 chunks with 4 (N - 1) transfers.

  Raises:
    ScheduleError: `world_size` is not a positive integer.
  """
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
      # The broadcast is the mirror image of the reduction.
      up, down = height - depth, height + depth - 1
      transfers.append(schedule.Transfer(up, src, dst, tree, True))
      transfers.append(schedule.Transfer(down, dst, src, tree, False))
  return schedule.Schedule(
    'double_binary_tree', world_size, 2, tuple(transfers)
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
