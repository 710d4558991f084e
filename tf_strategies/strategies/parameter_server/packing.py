"""Many small tensors in one message between a worker and a server.

Each tensor that crosses tasks costs a remote procedure call, about as much as
sending 100 kB. So small ones travel as the bytes of one tensor; large ones
travel alone, since packing would copy them. The numbers of rows count as small: the
rows, which are larger, travel beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# Above, a copy costs more than a call of its own.
SMALL_BYTES = 256 * 1024
_LENGTH_BYTES = 8  # Of the length of a vector.


def is_small(shape: tf.TensorShape, dtype: tf.DType) -> bool:
  """Returns whether a tensor of this shape is worth packing."""
  return (
    shape.is_fully_defined()
    and (dtype.is_floating or dtype.is_integer or dtype == tf.bool)
    and not dtype.is_quantized
    and shape.num_elements() * dtype.size <= SMALL_BYTES
  )


class Packing:
  """Which tensors travel together, as the bytes of one; large ones travel alone.

  Args:
    specs: shapes and dtypes of the tensors.

  Attributes:
    specs: of the messages.
  """

  def __init__(self, specs: Sequence[tf.TensorSpec]):
    self._specs = specs
    # Bytes of the small ones, by index; None for a vector of integers of any length.
    self._sizes: dict[int, int | None] = {}
    for i, spec in enumerate(specs):
      if is_small(spec.shape, spec.dtype):
        self._sizes[i] = spec.shape.num_elements() * spec.dtype.size
      elif spec.shape.as_list() == [None] and spec.dtype.is_integer:
        self._sizes[i] = None
    self._vectors = [i for i, size in self._sizes.items() if size is None]
    self._alone = [i for i in range(len(specs)) if i not in self._sizes]
    self.specs = [specs[i] for i in self._alone]
    if self._sizes:
      total = None if self._vectors else sum(self._sizes.values())
      self.specs.append(tf.TensorSpec([total], tf.uint8))

  def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the messages with these tensors."""
    messages = [tensors[i] for i in self._alone]
    if self._sizes:
      packed = {i: _to_bytes(tensors[i]) for i in self._sizes}
      # The message begins with the lengths of vectors.
      lengths = [_to_bytes(tf.size(packed[i], tf.int64)) for i in self._vectors]
      messages.append(tf.concat([*lengths, *packed.values()], 0))
    return messages

  def unpack(self, messages: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors that `pack` was given."""
    found = dict(zip(self._alone, messages, strict=False))
    if self._sizes:
      message, sizes = messages[-1], dict(self._sizes)
      count = len(self._vectors)
      head = count * _LENGTH_BYTES
      lengths = _from_bytes(message[:head], tf.TensorSpec([count], tf.int64))
      sizes |= zip(self._vectors, tf.unstack(lengths), strict=True)
      # All at once, since a split copies its whole input.
      _, *parts = tf.split(message, [head, *sizes.values()], num=len(sizes) + 1)
      for i, part in zip(sizes, parts, strict=True):
        found[i] = _from_bytes(part, self._specs[i])
    return [found[i] for i in range(len(found))]


def _to_bytes(tensor):
  if tensor.dtype == tf.bool:
    tensor = tf.cast(tensor, tf.uint8)
  return tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])


def _from_bytes(part, spec):
  inner = [spec.dtype.size] if spec.dtype.size > 1 else []
  dims = [-1 if dim is None else dim for dim in spec.shape.as_list()]
  part = tf.reshape(part, [*dims, *inner])
  if spec.dtype == tf.bool:
    return tf.cast(part, tf.bool)
  return tf.bitcast(part, spec.dtype)


def fetch(variables: Sequence[Any]) -> list[tf.Tensor]:
  """Reads variables, the small ones of a server in one message."""
  found = {}
  for server in sorted({v.server for v in variables}):
    there = [v for v in variables if v.server == server]
    packing = Packing([tf.TensorSpec(v.shape, v.dtype) for v in there])
    with tf.device(there[0].device):
      messages = packing.pack([v.read_value() for v in there])
    found |= zip(map(id, there), packing.unpack(messages), strict=True)
  return [found[id(v)] for v in variables]
