"""Many small tensors in one message between a worker and a server.

Each tensor that crosses tasks costs a remote procedure call, about as much as
sending 100 kB. So small ones travel as the bytes of one tensor; large ones
travel alone, since packing would copy them.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# Above, a copy costs more than a call of its own.
SMALL_BYTES = 256 * 1024


def is_small(shape: tf.TensorShape, dtype: tf.DType) -> bool:
  """Returns whether a tensor of this shape is worth packing."""
  return (
    shape.is_fully_defined()
    and (dtype.is_floating or dtype.is_integer or dtype == tf.bool)
    and not dtype.is_quantized
    and shape.num_elements() * dtype.size <= SMALL_BYTES
  )


class Packing:
  """Which tensors travel together, as the bits of one.

  Words of four and eight bytes travel as float32, with which nobody computes. A tensor
  that travels alone stays as it is.

  Args:
    specs: shapes and dtypes of the tensors.

  Attributes:
    specs: of the messages.
  """

  def __init__(self, specs: Sequence[tf.TensorSpec]):
    self._specs = specs
    together = collections.defaultdict(list)
    for i, spec in enumerate(specs):
      is_alone = not is_small(spec.shape, spec.dtype)
      together[i if is_alone else _carrier(spec.dtype).name].append(i)
    self._groups = list(together.values())
    self.specs = [
      specs[group[0]]
      if len(group) == 1
      else tf.TensorSpec(
        [sum(map(self._words, group))], _carrier(specs[group[0]].dtype)
      )
      for group in self._groups
    ]

  def _words(self, index: int) -> int:
    """Returns the length of a tensor in its message."""
    spec = self._specs[index]
    return (
      spec.shape.num_elements() * spec.dtype.size // _carrier(spec.dtype).size
    )

  def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the messages with these tensors."""
    return [
      tensors[group[0]]
      if len(group) == 1
      else tf.concat([_to_carrier(tensors[i]) for i in group], 0)
      for group in self._groups
    ]

  def unpack(self, messages: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors that `pack` was given."""
    found = {}
    for message, group in zip(messages, self._groups, strict=True):
      if len(group) == 1:
        found[group[0]] = message
        continue
      parts = tf.split(message, list(map(self._words, group)))
      for i, part in zip(group, parts, strict=True):
        found[i] = _from_carrier(part, self._specs[i])
    return [found[i] for i in range(len(found))]


def _carrier(dtype: tf.DType) -> tf.DType:
  return tf.float32 if dtype.size in (4, 8) else dtype


def _to_carrier(tensor):
  carrier = _carrier(tensor.dtype)
  if tensor.dtype != carrier:
    # Hides constants from TensorFlow's optimizer. The bits of a small integer are
    # a float32 below the normal ones, which it, run by threads that flush those
    # to zero, would fold to zero.
    tensor = tf.compat.v1.placeholder_with_default(tensor, tensor.shape)
    tensor = tf.bitcast(tensor, carrier)
  return tf.reshape(tensor, [-1])


def _from_carrier(part, spec):
  if spec.dtype == part.dtype:
    return tf.reshape(part, spec.shape)
  words = spec.dtype.size // part.dtype.size
  inner = [words] if words > 1 else []
  return tf.bitcast(tf.reshape(part, [*spec.shape, *inner]), spec.dtype)


def fetch(variables: Sequence[Any]) -> list[tf.Tensor]:
  """Reads variables, the small ones of a server in one message."""
  by_server = collections.defaultdict(list)
  for variable in variables:
    by_server[variable.server].append(variable)
  found = {}
  for there in by_server.values():
    packing = Packing([tf.TensorSpec(v.shape, v.dtype) for v in there])
    with tf.device(there[0].device):
      messages = packing.pack([v.read_value() for v in there])
    found |= dict(zip(map(id, there), packing.unpack(messages), strict=True))
  return [found[id(v)] for v in variables]
