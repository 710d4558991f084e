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


def pack(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
  """Returns few tensors with the bits of all: one of words, and one a smaller type.

  Words of four and eight bytes travel as float32, with which nobody computes.
  """
  carried = collections.defaultdict(list)
  for tensor in tensors:
    carrier = _carrier(tensor.dtype)
    carried[carrier].append(_to_carrier(tensor, carrier))
  return [tf.concat(parts, 0) for parts in carried.values()]


def specs_of(specs: Sequence[tf.TensorSpec]) -> list[tf.TensorSpec]:
  """Returns the specs of what `pack` makes of tensors with these specs."""
  words = collections.Counter()
  for spec in specs:
    carrier = _carrier(spec.dtype)
    words[carrier] += (
      spec.shape.num_elements() * spec.dtype.size // carrier.size
    )
  return [tf.TensorSpec([count], carrier) for carrier, count in words.items()]


def unpack(
  packed: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
  """Returns the tensors that `pack` was given; `specs` are their shapes and dtypes."""
  carried = collections.defaultdict(list)
  for i, spec in enumerate(specs):
    carried[_carrier(spec.dtype)].append(i)
  result = [None] * len(specs)
  for message, indices in zip(packed, carried.values(), strict=True):
    sizes = [
      specs[i].shape.num_elements() * specs[i].dtype.size // message.dtype.size
      for i in indices
    ]
    parts = tf.split(message, sizes) if len(sizes) > 1 else [message]
    for i, part in zip(indices, parts, strict=True):
      result[i] = _from_carrier(part, specs[i], message.dtype)
  return result


def _carrier(dtype: tf.DType) -> tf.DType:
  return tf.float32 if dtype.size in (4, 8) else dtype


def _to_carrier(tensor, carrier):
  if tensor.dtype != carrier:
    # Hides constants from TensorFlow's optimizer. The bits of a small integer are
    # a float32 below the normal ones, which it, run by threads that flush those
    # to zero, would fold to zero.
    tensor = tf.compat.v1.placeholder_with_default(tensor, tensor.shape)
    tensor = tf.bitcast(tensor, carrier)
  return tf.reshape(tensor, [-1])


def _from_carrier(part, spec, carrier):
  words = 1 if spec.dtype == carrier else spec.dtype.size // carrier.size
  inner = [words] if words > 1 else []
  shape = [-1 if size is None else size for size in spec.shape.as_list()]
  part = tf.reshape(part, [*shape, *inner])
  return part if spec.dtype == carrier else tf.bitcast(part, spec.dtype)


def fetch(variables: Sequence[Any]) -> list[tf.Tensor]:
  """Reads variables, the small ones of a server in one message."""
  by_server = collections.defaultdict(list)
  for variable in variables:
    by_server[variable.server].append(variable)
  found = {}
  for there in by_server.values():
    small = [v for v in there if is_small(v.shape, v.dtype)]
    with tf.device(there[0].device):
      found |= {id(v): v.read_value() for v in there}
      message = pack([found[id(v)] for v in small])
    if len(small) > 1:
      specs = [tf.TensorSpec(v.shape, v.dtype) for v in small]
      found |= dict(zip(map(id, small), unpack(message, specs), strict=True))
  return [found[id(v)] for v in variables]
