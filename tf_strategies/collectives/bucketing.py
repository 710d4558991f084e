"""Gradients to buckets: fewer, larger messages that start early."""

from collections.abc import Hashable, Sequence


def plan_buckets(
  sizes_bytes: Sequence[int], kinds: Sequence[Hashable], bucket_bytes: int
) -> tuple[tuple[int, ...], ...]:
  """Packs gradients into buckets that become ready one after the other.

  The backward pass makes the gradients of the last layers first, so that these
  can travel while the rest is computed. One bucket for each kind is open at a
  time; a tensor that does not fit closes it. Ranks that plan for themselves
  agree, as only the arguments count.

  Source: Li et al., "PyTorch Distributed: experiences on accelerating data
  parallel training", VLDB 2020.

  Example:

    >>> plan_buckets([4, 4, 90, 4], ['float32'] * 4, 10)
    ((3,), (2,), (1, 0))

  Args:
    sizes_bytes: the size of each tensor.
    kinds: kind of each tensor, such as its dtype. A bucket holds one kind.
    bucket_bytes: the most that a bucket holds; a larger tensor gets a bucket
      of its own.

  Returns:
    The indices in each bucket, in the order in which they are packed. Buckets come
    in the order in which their last tensor becomes ready; each index is in exactly
    one. O(n) for n tensors, plus sorting the buckets.
  """
  buckets: list[list[int]] = []
  newest: dict[Hashable, list[int]] = {}
  filled: dict[Hashable, int] = {}
  for i in reversed(range(len(kinds))):
    kind, size = kinds[i], sizes_bytes[i]
    if kind not in newest or filled[kind] + size > bucket_bytes:
      newest[kind], filled[kind] = [], 0
      buckets.append(newest[kind])
    newest[kind].append(i)
    filled[kind] += size
  # A bucket can go when its last tensor is there, however much earlier than
  # another kind's it was begun.
  buckets.sort(key=lambda indices: indices[-1], reverse=True)
  return tuple(map(tuple, buckets))
