"""Matrices that travel together: their rows are pieces, one a replica."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tf_strategies.collectives import bucketing

# A message costs about as much as copying so many bytes into a bucket.
_ALONE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class PackedRows:
  """Flat tensors, of which each holds the rows of some matrices side by side."""

  buckets: tuple[tf.Tensor, ...]
  # For each bucket the positions of its matrices, and the widths they take.
  members: tuple[tuple[int, ...], ...]
  widths: tuple[tuple[int, ...], ...]
  # Of each matrix.
  columns: tuple[int, ...]

  def shapes(self, num_rows: int) -> list[list[int]]:
    """Of the buckets, if they had so many rows."""
    return [[num_rows * sum(widths)] for widths in self.widths]

  def unpack(
    self, buckets: Sequence[tf.Tensor], num_rows: int
  ) -> list[tf.Tensor]:
    """The matrices of so many rows that `buckets` hold, in their first order."""
    matrices = [None] * len(self.columns)
    for bucket, members, widths in zip(
      buckets, self.members, self.widths, strict=True
    ):
      rows = tf.reshape(bucket, [num_rows, sum(widths)])
      parts = [rows] if len(members) == 1 else tf.split(rows, widths, 1)
      for i, part, width in zip(members, parts, widths, strict=True):
        columns = self.columns[i]
        matrices[i] = part if width == columns else part[:, :columns]
    return matrices


def pack(
  matrices: Sequence[tf.Tensor],
  num_rows: int,
  bucket_bytes: int,
  block: int = 1,
) -> PackedRows:
  """Packs matrices, those that become ready first (the last ones) in front.

  Buckets hold `bucket_bytes` of one dtype at most, when they have `num_rows` rows.
  Larger ones travel alone, without a copy. Of matrices in one bucket no two share
  `block` elements, which a codec encodes together.
  """
  columns = [m.shape[1] for m in matrices]
  widths = [-(-n // block) * block for n in columns]
  sizes = []
  for matrix, width in zip(matrices, widths, strict=True):
    num_bytes = max(1, num_rows * width * matrix.dtype.size)
    sizes.append(bucket_bytes if num_bytes >= _ALONE_BYTES else num_bytes)
  plan = bucketing.plan_buckets(
    [min(n, bucket_bytes) for n in sizes],
    [m.dtype for m in matrices],
    bucket_bytes,
  )
  buckets, taken = [], []
  for bucket in plan:
    some = [matrices[i] for i in bucket.indices]
    taken.append(tuple(widths[i] for i in bucket.indices))
    if block > 1:
      some = [
        tf.pad(m, [[0, 0], [0, width - m.shape[1]]])
        for m, width in zip(some, taken[-1], strict=True)
      ]
    rows = some[0] if len(some) == 1 else tf.concat(some, 1)
    buckets.append(tf.reshape(rows, [-1]))
  members = tuple(bucket.indices for bucket in plan)
  return PackedRows(tuple(buckets), members, tuple(taken), tuple(columns))
