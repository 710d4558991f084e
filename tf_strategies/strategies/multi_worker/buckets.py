"""Tensors to flat buckets and back: few large messages, few copies.

A large tensor travels alone, as the view that a reshape is. Small ones are
packed, since a message costs as much as some hundred kilobytes do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tf_strategies.collectives import bucketing


@dataclasses.dataclass(frozen=True)
class Packed:
  """One-dimensional tensors that hold others, and what is needed to unpack.

  Attributes:
    buckets: the flat tensors, in the order in which they become ready.
    members: for each bucket the positions of the tensors in it.
    shapes: the shape of each tensor; a tensor where it is not static.
  """

  buckets: tuple[tf.Tensor, ...]
  members: tuple[tuple[int, ...], ...]
  shapes: tuple[tf.TensorShape | tf.Tensor, ...]

  def unpack(self, buckets: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors that `buckets` hold, in their original order."""
    tensors: list[tf.Tensor | None] = [None] * len(self.shapes)
    for bucket, members in zip(buckets, self.members, strict=True):
      parts = [bucket]
      if len(members) > 1:
        sizes = [self.shapes[i].num_elements() for i in members]
        parts = tf.split(bucket, sizes)
      for i, part in zip(members, parts, strict=True):
        tensors[i] = tf.reshape(part, self.shapes[i])
    return tensors


def pack(
  tensors: Sequence[tf.Tensor],
  kinds: Sequence[str],
  bucket_bytes: int,
  alone_bytes: int,
) -> Packed:
  """Packs tensors, those that become ready first (the last ones) in front.

  Args:
    tensors: of any shapes and dtypes; one of unknown size travels alone.
    kinds: what each tensor is; only equal kinds share a bucket.
    bucket_bytes: the most that a packed bucket holds.
    alone_bytes: a tensor of at least so many bytes is not copied into one.

  Returns:
    Buckets of one dtype each. What is packed is copied once.
  """
  # A size of the whole bucket makes the plan give it one of its own.
  sizes = []
  for tensor in tensors:
    elements = tensor.shape.num_elements()
    num_bytes = bucket_bytes
    if elements is not None and elements * tensor.dtype.size < alone_bytes:
      num_bytes = elements * tensor.dtype.size
    # One without bytes takes room too, or it would fit into a full bucket.
    sizes.append(min(max(num_bytes, 1), bucket_bytes))
  plan = bucketing.plan_buckets(sizes, kinds, bucket_bytes)
  buckets = []
  for bucket in plan:
    flat = [tf.reshape(tensors[i], [-1]) for i in bucket.indices]
    buckets.append(flat[0] if len(flat) == 1 else tf.concat(flat, 0))
  return Packed(
    tuple(buckets),
    tuple(bucket.indices for bucket in plan),
    tuple(
      t.shape if t.shape.is_fully_defined() else tf.shape(t) for t in tensors
    ),
  )
