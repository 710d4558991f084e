"""Gradients to buckets: fewer, larger messages that start early."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Bucket:
  """Tensors of one dtype that travel together.

  Attributes:
    indices: the tensors, in the order in which they are packed.
    dtype: their dtype's name.
    num_bytes: their sizes added up.
  """

  indices: tuple[int, ...]
  dtype: str
  num_bytes: int


def plan_buckets(
  sizes_bytes: Sequence[int], dtypes: Sequence[str], bucket_bytes: int
) -> tuple[Bucket, ...]:
  """Packs gradients into buckets that become ready one after the other.

  The backward pass makes the gradients of the last layers first, so that these
  can travel while the rest is computed. One bucket for each dtype is open at a
  time; a tensor that does not fit closes it. Ranks that plan for themselves
  agree, as only the arguments count.

  Source: Li et al., "PyTorch Distributed: experiences on accelerating data
  parallel training", VLDB 2020.

  Example:

    >>> for bucket in plan_buckets([4, 4, 90, 4], ['float32'] * 4, 10):
    ...   print(bucket)
    Bucket(indices=(3,), dtype='float32', num_bytes=4)
    Bucket(indices=(2,), dtype='float32', num_bytes=90)
    Bucket(indices=(1, 0), dtype='float32', num_bytes=8)

  Args:
    sizes_bytes: the size of each tensor.
    dtypes: the dtype of each: a name, or anything with a `name`, as the dtypes
      of NumPy and TensorFlow have.
    bucket_bytes: the most that a bucket holds; a larger tensor gets a bucket
      of its own.

  Returns:
    Buckets in the order in which their last tensor becomes ready; each index
    is in exactly one. O(n) for n tensors, plus sorting the buckets.
  """
  names = [getattr(dtype, 'name', dtype) for dtype in dtypes]
  buckets: list[list[int]] = []
  newest: dict[str, list[int]] = {}
  filled: dict[str, int] = {}
  for i in reversed(range(len(names))):
    name, size = names[i], sizes_bytes[i]
    if name not in newest or filled[name] + size > bucket_bytes:
      newest[name], filled[name] = [], 0
      buckets.append(newest[name])
    newest[name].append(i)
    filled[name] += size
  # A bucket can go when its last tensor is there, however much earlier than
  # another dtype's it was begun.
  buckets.sort(key=lambda indices: indices[-1], reverse=True)
  return tuple(
    Bucket(tuple(b), names[b[0]], sum(sizes_bytes[i] for i in b))
    for b in buckets
  )
