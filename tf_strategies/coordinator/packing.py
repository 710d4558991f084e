"""Many small tensors in one message between a worker and a server.

Each tensor that crosses tasks costs a remote procedure call, about as much as
sending 100 kB. So small ones travel as the bytes of one tensor; large ones
travel alone, since packing would copy them.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

# Above, a copy costs more than a call of its own.
SMALL_BYTES = 256 * 1024


def is_small(shape: tf.TensorShape, dtype: tf.DType) -> bool:
  """Whether a tensor of this shape is worth packing."""
  return (
    shape.is_fully_defined()
    and (dtype.is_floating or dtype.is_integer or dtype == tf.bool)
    and not dtype.is_quantized
    and shape.num_elements() * dtype.size <= SMALL_BYTES
  )


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
  """The bytes of all tensors, one after the other: [sum of bytes] of uint8."""
  return tf.concat([_to_bytes(t) for t in tensors], 0)


def unpack(
  packed: tf.Tensor, specs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
  """What `pack` was given, if `specs` are its shapes and dtypes."""
  sizes = [s.shape.num_elements() * s.dtype.size for s in specs]
  parts = tf.split(packed, sizes)
  return [_from_bytes(p, s) for p, s in zip(parts, specs, strict=True)]


def _to_bytes(tensor):
  if tensor.dtype == tf.bool:
    tensor = tf.cast(tensor, tf.uint8)
  flat = tf.reshape(tensor, [-1])
  if tensor.dtype == tf.uint8:
    return flat
  return tf.reshape(tf.bitcast(flat, tf.uint8), [-1])


def _from_bytes(part, spec):
  if spec.dtype == tf.bool:
    return tf.reshape(tf.not_equal(part, 0), spec.shape)
  if spec.dtype != tf.uint8:
    if spec.dtype.size > 1:
      part = tf.reshape(part, [-1, spec.dtype.size])
    part = tf.bitcast(part, spec.dtype)
  return tf.reshape(part, spec.shape)


def send(tensors: Sequence[tf.Tensor], device: str | None) -> list[tf.Tensor]:
  """Brings tensors of this task to another one, small ones in one message.

  Args:
    tensors: of static shape, or such that travel alone.
    device: where they are wanted.

  Returns:
    The tensors, in order; the packed ones are on `device`.
  """
  result = list(tensors)
  packed = [i for i, t in enumerate(result) if is_small(t.shape, t.dtype)]
  if len(packed) < 2:
    return result
  specs = [tf.TensorSpec(result[i].shape, result[i].dtype) for i in packed]
  message = pack([result[i] for i in packed])
  with tf.device(device):
    for i, tensor in zip(packed, unpack(message, specs), strict=True):
      result[i] = tensor
  return result
