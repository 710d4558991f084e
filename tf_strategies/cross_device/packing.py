"""Packs tensors into few flat buckets, so that they travel in few messages.

The tensors may be matrices whose rows are pieces, one for each replica. A bucket holds
such matrices side by side, so that one of its rows has all pieces of a replica.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

# A message costs about as much as copying so many bytes into a bucket.
_ALONE_BYTES = 1 << 20


class Packed(NamedTuple):
  """Flat tensors that hold others, in the order in which they become ready.

  Attributes:
    buckets: the flat tensors.
    members: for each bucket, the indices of the tensors that it holds.
    lengths: for each bucket, the lengths of its tensors, or of their rows if they are
      matrices.
    shapes: shape of each tensor. It is a tensor if it is not static.
  """

  buckets: tuple[tf.Tensor, ...]
  members: tuple[tuple[int, ...], ...]
  lengths: tuple[tuple[int | None, ...], ...]
  shapes: tuple[tf.TensorShape | tf.Tensor, ...]

  def unpack(
    self, buckets: Sequence[tf.Tensor], num_rows: int | None = None
  ) -> list[tf.Tensor]:
    """Returns the tensors that `buckets` hold, in their original order.

    Matrices have `num_rows` rows in these buckets.
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
      for i, part in zip(members, parts, strict=True):
        tensors[i] = part if axis else tf.reshape(part, self.shapes[i])
    return tensors


def pack(
  tensors: Sequence[tf.Tensor],
  bucket_bytes: int,
  alone_bytes: int = _ALONE_BYTES,
  num_rows: int | None = None,
) -> Packed:
  """Packs tensors. The last tensors become ready first, so they come first.

  The backward pass makes the gradients of the last layers first, so that these can
  travel while the rest is computed. A bucket holds tensors of one dtype. One that
  travels alone does not come between those that do not. A tensor that does not fit
  closes the open bucket of its dtype. Ranks that pack for themselves agree, as only the
  arguments count.

  Source: Li et al., "PyTorch Distributed: experiences on accelerating data
  parallel training", VLDB 2020.

  Args:
    tensors: the tensors, or matrices if `num_rows` is given.
    bucket_bytes: largest number of bytes in a bucket.
    alone_bytes: size from which a tensor travels alone, without a copy. A tensor of
      unknown size does so too.
    num_rows: number of rows of the matrices when they are unpacked.
  """
  axis = 0 if num_rows is None else 1
  flat = tensors if axis else [tf.reshape(t, [-1]) for t in tensors]
  members: list[list[int]] = []
  open_, left = (
    {},
    {},
  )  # The newest bucket of each kind, and the bytes that fit in.
  for i in reversed(range(len(flat))):
    length, dtype = flat[i].shape[axis], flat[i].dtype
    num_bytes = (num_rows or 1) * dtype.size * (length or 0)
    is_alone = length is None or num_bytes >= alone_bytes
    kind = dtype, is_alone
    if is_alone or kind not in open_ or num_bytes > left[kind]:
      open_[kind], left[kind] = [], bucket_bytes
      members.append(open_[kind])
    open_[kind].append(i)
    left[kind] -= num_bytes
  # A bucket can go when its last tensor is there, however much earlier than another
  # kind's it was begun.
  members.sort(key=lambda indices: indices[-1], reverse=True)
  buckets, lengths = [], []
  for bucket in members:
    some = [flat[i] for i in bucket]
    joined = some[0] if len(some) == 1 else tf.concat(some, axis)
    buckets.append(tf.reshape(joined, [-1]) if axis else joined)
    lengths.append(tuple(t.shape[axis] for t in some))
  return Packed(
    tuple(buckets),
    tuple(map(tuple, members)),
    tuple(lengths),
    tuple(
      t.shape if t.shape.is_fully_defined() else tf.shape(t) for t in tensors
    ),
  )
