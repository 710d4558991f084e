"""The batches of a task as the bytes of one tensor.

Each tensor that a task is given costs a call of its own, so a task is given
one: a header, then each array of the batches, at multiples of 64 bytes, where
TensorFlow can use a slice without a copy.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

_ALIGNMENT = 64
HEADER = 2  # int64: number of the task, first step to do.


@dataclasses.dataclass(frozen=True)
class Layout:
  """What is in a parcel; equal layouts can use one traced function.

  Attributes:
    structure: of a batch, with a `tf.TensorSpec` for each array.
    steps: number of batches.
    hides_rows: whether the step must not know the number of rows while it is
      traced, as under Keras on one device.
  """

  structure: Any
  steps: int
  hides_rows: bool = False

  @functools.cached_property
  def specs(self) -> list[tf.TensorSpec]:
    """Of the arrays of a batch."""
    return [s for s in tf.nest.flatten(self.structure) if s is not None]

  @property
  def traced_structure(self) -> Any:
    """The specs of a batch as the step sees them."""
    if not self.hides_rows:
      return self.structure
    specs = [tf.TensorSpec([None, *s.shape[1:]], s.dtype) for s in self.specs]
    return pack(self.structure, specs)

  @functools.cached_property
  def sizes(self) -> list[int]:
    """Bytes of each array of one batch, padded."""
    return [
      _padded(math.prod(s.shape.as_list()) * s.dtype.size) for s in self.specs
    ]

  @property
  def num_bytes(self) -> int:
    """Of a parcel."""
    return _padded(8 * HEADER) + self.steps * sum(self.sizes)

  @functools.cached_property
  def key(self) -> Any:
    """Equal for equal layouts."""
    specs = tuple((tuple(s.shape), s.dtype) for s in self.specs)
    names = tf.nest.map_structure(lambda s: s is not None, self.structure)
    return repr(names), specs, self.steps, self.hides_rows

  def encode(
    self, task: int, first: int, batches: Sequence[Sequence[np.ndarray]]
  ) -> np.ndarray:
    """The parcel of a task, as uint8.

    Args:
      task: its number.
      first: the first step that is still to do.
      batches: the arrays of each batch.
    """
    parcel = np.empty(self.num_bytes, np.uint8)
    parcel[: 8 * HEADER].view(np.int64)[:] = task, first
    position = _padded(8 * HEADER)
    for arrays in batches:
      for array, size in zip(arrays, self.sizes, strict=True):
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parcel[position : position + flat.size] = flat
        position += size
    return parcel

  def decode_header(self, parcel: tf.Tensor) -> tf.Tensor:
    """Task, first step: int64 [2]."""
    header = tf.reshape(parcel[: 8 * HEADER], [HEADER, 8])
    return tf.bitcast(header, tf.int64)

  def decode_batch(self, parcel: tf.Tensor, step: tf.Tensor | int) -> Any:
    """The batch of one step."""
    start = _padded(8 * HEADER)
    if self.steps == 1:
      row = parcel[start:]
    else:
      rows = tf.reshape(parcel[start:], [self.steps, sum(self.sizes)])
      row = tf.gather(rows, step)
    found, position = [], 0
    for spec, size in zip(self.specs, self.sizes, strict=True):
      used = math.prod(spec.shape.as_list()) * spec.dtype.size
      found.append(_from_bytes(row[position : position + used], spec))
      position += size
    if self.hides_rows:
      found = [_without_rows(t) for t in found]
    return pack(self.structure, found)


def pack(structure: Any, tensors: Sequence[Any]) -> Any:
  """The structure with tensors in place of its specs; None stays None."""
  remaining = iter(tensors)
  return tf.nest.map_structure(
    lambda spec: None if spec is None else next(remaining), structure
  )


def _without_rows(tensor):
  # A reshape would not do: from the number of elements TensorFlow infers rows.
  shape = [None, *tensor.shape[1:]]
  return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape)


def _padded(size: int) -> int:
  return -(-size // _ALIGNMENT) * _ALIGNMENT


def _from_bytes(part, spec):
  shape = spec.shape.as_list()
  if spec.dtype == tf.bool:
    return tf.reshape(tf.not_equal(part, 0), shape)
  if spec.dtype == tf.uint8:
    return tf.reshape(part, shape)
  if spec.dtype.size > 1:
    part = tf.reshape(part, [-1, spec.dtype.size])
  return tf.reshape(tf.bitcast(part, spec.dtype), shape)
