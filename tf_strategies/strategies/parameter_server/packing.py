"""Many small tensors in one message between a worker and a server.

Each tensor that crosses tasks costs a remote procedure call, about as much as
sending 100 kB. So small ones travel as the bytes of one tensor; large ones
travel alone, since packing would copy them.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np
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


def send(
  tensors: Sequence[tf.Tensor], to: str | None, by: str | None = None
) -> list[tf.Tensor]:
  """Brings tensors to another task, small ones in one message.

  They are packed on the device `by`, None for where the step runs. Returns all,
  in order; those that were packed are on the device `to`.
  """
  result = list(tensors)
  packed = [i for i, t in enumerate(result) if is_small(t.shape, t.dtype)]
  if len(packed) < 2:
    return result
  specs = [tf.TensorSpec(result[i].shape, result[i].dtype) for i in packed]
  with tf.device(by):
    message = pack([result[i] for i in packed])
  with tf.device(to):
    for i, tensor in zip(packed, unpack(message, specs), strict=True):
      result[i] = tensor
  return result


def send_rows(rows: tf.IndexedSlices, to: str) -> tf.IndexedSlices:
  """Brings rows to another task together with their numbers, in one message.

  A copy of what a batch has of a table costs less than a call for the numbers.
  """
  tensors = rows.values, rows.indices
  dtype, width = rows.values.dtype, rows.values.shape[1:].num_elements()
  if not (width and dtype.is_floating and dtype.size <= 8):
    return rows
  carrier = _carrier(dtype)
  # Words of a row, and of its number, which may be two or four of them.
  sizes = [width * dtype.size, rows.indices.dtype.size]
  sizes = [size // carrier.size for size in sizes]
  message = tf.concat([_to_carrier(t, carrier) for t in tensors], 0)
  with tf.device(to):
    count = tf.shape(message) // sum(sizes)
    # Slices of the one dimension share its memory.
    end = count * sizes[0]
    parts = tf.slice(message, [0], end), tf.slice(message, end, [-1])
    values, numbers = (
      _from_carrier(part, tf.TensorSpec([None, *t.shape[1:]], t.dtype), carrier)
      for part, t in zip(parts, tensors, strict=True)
    )
  return tf.IndexedSlices(values, numbers, rows.dense_shape)


def _constant(tensor: tf.Tensor) -> np.ndarray | None:
  """Returns the value of a small constant that need not be computed, or None."""
  source = tensor
  while source.op.type == 'Cast' and not source.op.control_inputs:
    source = source.op.inputs[0]
  is_constant = source.op.type == 'Const' and is_small(
    tensor.shape, tensor.dtype
  )
  return tf.get_static_value(tensor) if is_constant else None


class Copies:
  """The copies that tensors of a step have on servers."""

  def __init__(self):
    # By tensor and server. With the tensor itself: the number of one that is gone is
    # used again.
    self._sent: dict[tuple[int, int], tuple[tf.Tensor, tf.Tensor]] = {}

  def send(
    self, tensors: Sequence[tf.Tensor], server: int, device: str
  ) -> None:
    """Sends tensors of the step's own graph to a server."""
    for tensor, copy in zip(tensors, send(tensors, device), strict=True):
      self._sent[id(tensor), server] = tensor, copy

  def of(self, tensor: tf.Tensor, server: int) -> tf.Tensor:
    """Returns the copy of a tensor on a server, or the tensor itself without one."""
    _, copy = self._sent.get((id(tensor), server), (tensor, tensor))
    return copy

  def sent_once(
    self, tensors: Sequence[tf.Tensor], server: int, device: str
  ) -> list[Any]:
    """Returns copies on a server: of those that have none there, new ones.

    Small constants are arrays, which a function on the server has anyway.
    """
    found = [self.of(t, server) for t in tensors]
    found = [
      _constant(t) if copy is t else copy
      for t, copy in zip(tensors, found, strict=True)
    ]
    missing = [t for t, f in zip(tensors, found, strict=True) if f is None]
    new = iter(send(missing, device))
    return [next(new) if f is None else f for f in found]


def fetch(variables: Sequence[Any]) -> list[tf.Tensor]:
  """Reads variables, the small ones of a server in one message."""
  by_server = collections.defaultdict(list)
  for variable in variables:
    by_server[variable.server].append(variable)
  found = {}
  for there in by_server.values():
    with tf.device(there[0].device):
      values = [v.read_value() for v in there]
    values = send(values, None, there[0].device)
    found.update(zip(map(id, there), values, strict=True))
  return [found[id(v)] for v in variables]
