"""Tensors that travel together: few flat buckets in place of many messages.

What travels is a tensor, or a matrix whose rows are pieces, one a replica: of such a
bucket has the rows side by side, so that a row of it is a replica's pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tf_strategies.collectives import bucketing

# A message costs about as much as copying so many bytes into a bucket.
_ALONE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Packed:
  """Flat tensors that hold others, in the order in which they become ready."""

  buckets: tuple[tf.Tensor, ...]
  # For each bucket the positions of what is in it, and the lengths that it takes: of
  # tensors, or of the rows of matrices.
  members: tuple[tuple[int, ...], ...]
  lengths: tuple[tuple[int | None, ...], ...]
  # Of each tensor; a tensor where it is not static.
  shapes: tuple[tf.TensorShape | tf.Tensor, ...]

  def shapes_of_rows(self, num_rows: int) -> list[list[int]]:
    """Of the buckets of matrices, if these had so many rows."""
    return [[num_rows * sum(lengths)] for lengths in self.lengths]

  def unpack(
    self, buckets: Sequence[tf.Tensor], num_rows: int | None = None
  ) -> list[tf.Tensor]:
    """The tensors that `buckets` hold, in their original order.

    Matrices have `num_rows` rows there, whatever they had.
    """
    tensors: list[tf.Tensor | None] = [None] * len(self.shapes)
    for bucket, members, lengths in zip(
      buckets, self.members, self.lengths, strict=True
    ):
      axis = 0
      if num_rows is not None:
        bucket, axis = tf.reshape(bucket, [num_rows, sum(lengths)]), 1
      parts = [bucket]
      if len(members) > 1:
        parts = tf.split(bucket, lengths, axis)
      for i, part, length in zip(members, parts, lengths, strict=True):
        if num_rows is not None:
          columns = self.shapes[i][1]
          tensors[i] = part if length == columns else part[:, :columns]
          continue
        if len(members) > 1 and length != self.shapes[i].num_elements():
          part = part[: self.shapes[i].num_elements()]
        tensors[i] = tf.reshape(part, self.shapes[i])
    return tensors


def pack(
  tensors: Sequence[tf.Tensor],
  bucket_bytes: int,
  alone_bytes: int = _ALONE_BYTES,
  block: int = 1,
  num_chunks: int = 1,
  num_rows: int | None = None,
) -> Packed:
  """Packs tensors, those that become ready first (the last ones) in front.

  Buckets hold `bucket_bytes` of one dtype at most; of matrices, when these have
  `num_rows` rows. What is packed is copied once; a tensor of `alone_bytes`, or of
  unknown size, is not copied and travels alone.

  A codec encodes `block` elements together, in each of `num_chunks` equal chunks
  of a bucket. No two tensors share a block, or small values would get the
  precision of large ones.
  """
  axis = 0 if num_rows is None else 1
  flat = tensors if axis else [tf.reshape(t, [-1]) for t in tensors]
  sizes = []
  for tensor in flat:
    element_bytes, length = (
      (num_rows or 1) * tensor.dtype.size,
      tensor.shape[axis],
    )
    # A size of the whole bucket makes the plan give it one of its own.
    num_bytes = bucket_bytes
    if length is not None and length * element_bytes < alone_bytes:
      num_bytes = _round_up(length, block) * element_bytes
    # One without bytes takes room too, or it would fit into a full bucket.
    sizes.append(min(max(num_bytes, 1), bucket_bytes))
  plan = bucketing.plan_buckets(sizes, [t.dtype for t in tensors], bucket_bytes)
  buckets, all_lengths = [], []
  for bucket in plan:
    some = [flat[i] for i in bucket]
    lengths = [t.shape[axis] for t in some]
    if block > 1 and (axis or len(some) > 1):
      lengths = [_round_up(length, block) for length in lengths]
      if not axis:
        lengths[-1] += -sum(lengths) % (block * num_chunks)
      some = [
        tf.pad(t, [[0, 0]] * axis + [[0, length - t.shape[axis]]])
        for t, length in zip(some, lengths, strict=True)
      ]
    joined = some[0] if len(some) == 1 else tf.concat(some, axis)
    buckets.append(tf.reshape(joined, [-1]) if axis else joined)
    all_lengths.append(tuple(lengths))
  return Packed(
    tuple(buckets),
    plan,
    tuple(all_lengths),
    tuple(
      t.shape if t.shape.is_fully_defined() else tf.shape(t) for t in tensors
    ),
  )


def _round_up(length: int, multiple: int) -> int:
  return -(-length // multiple) * multiple
