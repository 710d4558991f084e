"""Batches of a task as the bytes of one tensor.

Each tensor that a task is given costs a call of its own, so a task is given
one: a header, then each array of the batches, at multiples of 64 bytes, where
TensorFlow can use a slice without a copy.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import errors

# What completion markers count the steps of: tasks, or splits of the data.
TASKS, SPLITS = 0, 1

_ALIGNMENT = 64
_HEADER_BYTES = 16  # int64: number of the task, first step to do.
_FIX_SPARSE = (
  'in the input pipeline, or let the workers read the data: '
  'strategy.distribute_datasets_from_function'
)


@dataclasses.dataclass(frozen=True)
class Layout:
  """What is in a batch message; equal layouts can use one traced function."""

  structure: Any  # Of a batch, with a `tf.TensorSpec` for each array.
  steps: int
  # Whether the step must not know the number of rows while it is traced, as
  # under Keras on one device.
  hides_rows: bool = False

  kind = TASKS

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
    return [-(-_size(s) // _ALIGNMENT) * _ALIGNMENT for s in self.specs]

  @property
  def num_bytes(self) -> int:
    """Of a message."""
    return _ALIGNMENT + self.steps * sum(self.sizes)

  @functools.cached_property
  def key(self) -> Any:
    """Equal for equal layouts."""
    specs = tuple((tuple(s.shape), s.dtype) for s in self.specs)
    names = tf.nest.map_structure(lambda s: s is not None, self.structure)
    return self.kind, repr(names), specs, self.steps, self.hides_rows

  def encode(
    self, task: int, first: int, batches: Sequence[Sequence[np.ndarray]]
  ) -> np.ndarray:
    """The message of a task, as uint8."""
    message = np.empty(self.num_bytes, np.uint8)
    message[:_HEADER_BYTES].view(np.int64)[:] = task, first
    position = _ALIGNMENT
    for arrays in batches:
      for array, size in zip(arrays, self.sizes, strict=True):
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        message[position : position + flat.size] = flat
        position += size
    return message

  def decode_header(self, message: tf.Tensor) -> tf.Tensor:
    """Task, first step: int64 [2]."""
    return tf.bitcast(tf.reshape(message[:_HEADER_BYTES], [2, 8]), tf.int64)

  def decode_batch(self, message: tf.Tensor, step: tf.Tensor | int) -> Any:
    """The batch of one step."""
    row = message[_ALIGNMENT:]
    if self.steps > 1:
      row = tf.gather(tf.reshape(row, [self.steps, sum(self.sizes)]), step)
    found, position = [], 0
    for spec, size in zip(self.specs, self.sizes, strict=True):
      tensor = _from_bytes(row[position : position + _size(spec)], spec)
      if self.hides_rows:
        # A reshape would not do: TensorFlow infers rows from the elements.
        tensor = tf.raw_ops.PlaceholderWithDefault(
          input=tensor, shape=[None, *tensor.shape[1:]]
        )
      found.append(tensor)
      position += size
    return pack(self.structure, found)

  # What a worker's function takes its batches from.

  @property
  def argument(self) -> tf.TensorSpec:
    """Of what the function is given."""
    return tf.TensorSpec([self.num_bytes], tf.uint8)

  def first_step(self, argument: tf.Tensor) -> tf.Tensor:
    """The first step to do, int64."""
    return self.decode_header(argument)[1]

  def read(self, argument: tf.Tensor, step: tf.Tensor) -> tuple[Any, Any, Any]:
    """The batch of a step; whose marker, and to which count, it then sets."""
    key = self.decode_header(argument)[0]
    return self.decode_batch(argument, step), key, step + 1


class Batch:
  """A structure of tensors or arrays, as its arrays."""

  def __init__(self, data: Any, hides_rows: bool = False):
    self.structure = tf.nest.map_structure(_spec, data)
    self.arrays = [
      t.numpy() if tf.is_tensor(t) else np.asarray(t)
      for t in tf.nest.flatten(data)
      if t is not None
    ]
    for array in self.arrays:
      if array.dtype.kind not in 'biufcV':
        raise errors.UnsupportedOptionError(
          f'a batch with an array of dtype {array.dtype}',
          'dense arrays of numbers',
          f'turn strings into numbers {_FIX_SPARSE}',
        )
    rows = {a.shape[:1] for a in self.arrays}
    self.hides_rows = hides_rows and len(rows) == 1 and () not in rows

  def microbatches(self, count: int) -> list[Batch]:
    """The rows in `count` parts, as even as can be, none empty."""
    rows = {a.shape[0] if a.ndim else None for a in self.arrays}
    if len(rows) != 1 or None in rows:
      raise errors.UnsupportedOptionError(
        f'a batch whose arrays have {sorted(map(str, rows))} rows',
        "with mode='sync': arrays with one first dimension, which is split",
        "give all arrays the batch's rows, or use mode='async'",
      )
    total = rows.pop()
    count = max(1, min(count, total))
    starts = [total * i // count for i in range(count + 1)]
    return [
      Batch(
        pack(self.structure, [a[first:last] for a in self.arrays]),
        self.hides_rows,
      )
      for first, last in itertools.pairwise(starts)
    ]

  def layout(self, steps: int) -> Layout:
    """Of a message of so many such batches."""
    return Layout(self.structure, steps, self.hides_rows)


def alike(batches: Sequence[Batch]) -> list[list[Batch]]:
  """Batches in runs of one layout each, in their order."""
  groups = itertools.groupby(batches, lambda b: b.layout(1).key)
  return [list(group) for _, group in groups]


def pack(structure: Any, tensors: Sequence[Any]) -> Any:
  """The structure with tensors in place of its specs; None stays None."""
  remaining = iter(tensors)
  return tf.nest.map_structure(
    lambda spec: None if spec is None else next(remaining), structure
  )


def _size(spec) -> int:
  return math.prod(spec.shape.as_list()) * spec.dtype.size


def _from_bytes(part, spec):
  if spec.dtype == tf.bool:
    part = tf.not_equal(part, 0)
  elif spec.dtype != tf.uint8:
    if spec.dtype.size > 1:
      part = tf.reshape(part, [-1, spec.dtype.size])
    part = tf.bitcast(part, spec.dtype)
  return tf.reshape(part, spec.shape.as_list())


def _spec(tensor) -> tf.TensorSpec | None:
  if tensor is None:
    return None
  if isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)):
    raise errors.UnsupportedOptionError(
      f'a batch with a {type(tensor).__name__}',
      'dense arrays of numbers',
      f'make it dense {_FIX_SPARSE}',
    )
  if not tf.is_tensor(tensor):
    tensor = np.asarray(tensor)
  return tf.TensorSpec(tensor.shape, tf.as_dtype(tensor.dtype))
