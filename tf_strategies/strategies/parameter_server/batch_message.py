"""Batches of a task as one tensor.

Each tensor that a task is given costs a call of its own, so a task is given
one: a header, then each array of the batches, at multiples of 64 bytes, where
TensorFlow can use a slice without a copy. That tensor is bytes if the sizes of all
arrays are known while the task's function is traced. With strings, and with the
parts of sparse and ragged tensors, whose sizes differ from batch to batch, it is a
vector of strings: the header, the bytes of each batch with a table of its shapes
before them, and all strings.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_strategies import errors, option_checks

# What the journal counts the steps of: tasks, or splits of the data.
TASKS, SPLITS = 0, 1

_ALIGNMENT = 64
_HEADER_BYTES = 24  # int64: number of the task, first step to do, token.


@dataclasses.dataclass(frozen=True)
class Layout:
  """What is in a batch message; equal layouts can use one traced function."""

  structure: Any  # Of a batch, with a `tf.TypeSpec` for each tensor.
  steps: int
  # Whether the step must not know the number of rows while it is traced, as
  # under Keras on one device.
  hides_rows: bool = False

  kind = TASKS

  @functools.cached_property
  def specs(self) -> list[tf.TensorSpec]:
    """Of the arrays of a batch; a ragged or sparse tensor has several."""
    return _components(self.structure)

  @functools.cached_property
  def traced_structure(self) -> Any:
    """The specs of a batch as the step sees them."""
    if not self.hides_rows:
      return self.structure
    return tf.nest.map_structure(with_any_rows, self.structure)

  @functools.cached_property
  def is_fixed(self) -> bool:
    """Returns whether all batches of this layout have the same number of bytes."""
    return all(
      s.shape.is_fully_defined() and s.dtype != tf.string for s in self.specs
    )

  @functools.cached_property
  def sizes(self) -> list[int]:
    """Bytes of each array of one batch, padded."""
    return [_padded(_size(s)) for s in self.specs]

  @property
  def num_bytes(self) -> int:
    """Of a message."""
    return _ALIGNMENT + self.steps * sum(self.sizes)

  @functools.cached_property
  def key(self) -> Any:
    """Equal for equal layouts."""
    specs = tuple((str(s.shape), s.dtype) for s in self.specs)
    kinds = tf.nest.map_structure(_kind, self.structure)
    return self.kind, repr(kinds), specs, self.steps, self.hides_rows

  def encode(
    self,
    task: int,
    first: int,
    batches: Sequence[Sequence[np.ndarray]],
    token: int = 0,
  ) -> np.ndarray:
    """The message of a task: uint8, or bytes objects."""
    header = np.array([task, first, token], np.int64)
    if not self.is_fixed:
      return self._encode_varying(header, batches)
    message = np.empty(self.num_bytes, np.uint8)
    message[:_HEADER_BYTES] = header.view(np.uint8)
    position = _ALIGNMENT
    for arrays in batches:
      for array, size in zip(arrays, self.sizes, strict=True):
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        message[position : position + flat.size] = flat
        position += size
    return message

  def _encode_varying(self, header, batches) -> np.ndarray:
    message = [header.tobytes()]
    strings = []
    for arrays in batches:
      table, parts = [], []
      position = _padded(8 * self._table_length)
      for array in arrays:
        if array.dtype == object:
          table.append(1 + self.steps + len(strings))
          strings += map(tf.compat.as_bytes, array.reshape(-1))
        else:
          table.append(position)
          data = array.tobytes()
          parts.append(data.ljust(_padded(len(data)), b'\0'))
          position += len(parts[-1])
        table += array.shape
      head = np.array(table, np.int64).tobytes()
      head = head.ljust(_padded(len(head)), b'\0')
      message.append(b''.join([head, *parts]))
    return np.array([*message, *strings], object)

  @functools.cached_property
  def _table_length(self) -> int:
    """Numbers in the table of a batch: where each array begins, and its shape."""
    return sum(1 + s.shape.rank for s in self.specs)

  def decode_header(self, message: tf.Tensor) -> tf.Tensor:
    """Task, first step, token: int64 [3]."""
    if not self.is_fixed:
      return tf.io.decode_raw(message[0], tf.int64)
    return tf.bitcast(tf.reshape(message[:_HEADER_BYTES], [3, 8]), tf.int64)

  def decode_batch(self, message: tf.Tensor, step: tf.Tensor | int) -> Any:
    """The batch of one step."""
    if not self.is_fixed:
      return self._decode_varying(message, step)
    row = message[_ALIGNMENT:]
    if self.steps > 1:
      row = tf.gather(tf.reshape(row, [self.steps, sum(self.sizes)]), step)
    found, position = [], 0
    for spec, size in zip(self.specs, self.sizes, strict=True):
      part = row[position : position + _size(spec)]
      tensor = _from_bytes(part, spec.dtype, spec.shape.as_list())
      if self.hides_rows:
        # A reshape would not do: TensorFlow infers rows from the elements.
        tensor = tf.raw_ops.PlaceholderWithDefault(
          input=tensor, shape=[None, *tensor.shape[1:]]
        )
      found.append(tensor)
      position += size
    return pack(self.structure, found)

  def _decode_varying(self, message, step):
    row = tf.io.decode_raw(message[1 + step], tf.uint8)
    table = row[: 8 * self._table_length]
    table = tf.bitcast(tf.reshape(table, [-1, 8]), tf.int64)
    found, entry = [], 0
    for spec in _components(self.traced_structure):
      rank = spec.shape.rank
      start, shape = table[entry], table[entry + 1 : entry + 1 + rank]
      entry += 1 + rank
      size = tf.reduce_prod(shape)
      if spec.dtype == tf.string:
        tensor = tf.reshape(message[start : start + size], shape)
      else:
        part = row[start : start + size * spec.dtype.size]
        tensor = _from_bytes(part, spec.dtype, shape)
      tensor.set_shape(spec.shape)
      found.append(tensor)
    return pack(self.traced_structure, found)

  # What a worker's function takes its batches from.

  @property
  def argument(self) -> tf.TensorSpec:
    """Of what the function is given."""
    if not self.is_fixed:
      return tf.TensorSpec([None], tf.string)
    return tf.TensorSpec([self.num_bytes], tf.uint8)

  def first_step(self, argument: tf.Tensor) -> tf.Tensor:
    """The first step to do, int64."""
    return self.decode_header(argument)[1]

  def read(self, argument: tf.Tensor, step: tf.Tensor) -> Reading:
    """Reads the batch and the header of a step from the message."""
    header = self.decode_header(argument)
    return Reading(
      self.decode_batch(argument, step), header[0], step + 1, header[2]
    )


class Reading(NamedTuple):
  """What a step takes from its message, or from the data that it reads."""

  batch: Any
  key: tf.Tensor  # Of the task or split,
  done: tf.Tensor  # of which this is the step of that number.
  token: tf.Tensor  # Of the worker, which must be valid when it writes.


class Batch:
  """A structure of tensors or arrays, as its arrays."""

  def __init__(self, data: Any, hides_rows: bool = False):
    self.structure = tf.nest.map_structure(spec_of, data)
    self.arrays = [
      _array(t)
      for t in tf.nest.flatten(data, expand_composites=True)
      if t is not None
    ]
    self._rows = {
      s.shape[0] if s.shape.rank else None
      for s in tf.nest.flatten(self.structure)
      if s is not None
    }
    self.hides_rows = (
      hides_rows and len(self._rows) == 1 and None not in self._rows
    )

  def microbatches(self, count: int) -> list[Batch]:
    """The rows in `count` parts, none empty; the first have what is left over."""
    if len(self._rows) != 1 or None in self._rows:
      raise errors.UnsupportedOptionError(
        f'a batch whose arrays have {sorted(map(str, self._rows))} rows',
        "with mode='sync': arrays with one first dimension, which is split",
        "give all arrays the batch's rows, or use mode='async'",
      )
    [total] = self._rows
    count = max(1, min(count, total))
    if count == 1:
      return [self]
    each, extra = divmod(total, count)
    starts = [i * each + min(i, extra) for i in range(count + 1)]
    with tf.device('/device:CPU:0'):
      data = pack(self.structure, self.arrays)
      return [
        Batch(
          tf.nest.map_structure(
            lambda t, i=first, j=last: _rows_of(t, i, j), data
          ),
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
  """The structure with these in place of its components; None stays None."""
  remaining = iter(tensors)
  return tf.nest.map_structure(
    lambda spec: None if spec is None else _from_components(spec, remaining),
    structure,
  )


def _from_components(spec, remaining):
  if isinstance(spec, tf.TensorSpec):
    return next(remaining)
  count = len(tf.nest.flatten(spec, expand_composites=True))
  parts = map(tf.convert_to_tensor, itertools.islice(remaining, count))
  return tf.nest.pack_sequence_as(spec, list(parts), expand_composites=True)


def _components(structure: Any) -> list[tf.TensorSpec]:
  """Specs of the arrays of which a structure's tensors are made."""
  flat = tf.nest.flatten(structure, expand_composites=True)
  return [s for s in flat if s is not None]


def _kind(spec) -> Any:
  """What tells a spec from others whose components are alike."""
  if spec is None or isinstance(spec, tf.TensorSpec):
    return spec is not None
  return repr(spec)


def with_any_rows(spec: tf.TypeSpec | None) -> tf.TypeSpec | None:
  """The spec of a batch of any number of rows."""
  if spec is None:
    return None
  shape = [None, *spec.shape[1:]]
  if isinstance(spec, tf.RaggedTensorSpec):
    return tf.RaggedTensorSpec(
      shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype
    )
  return type(spec)(shape, spec.dtype)


def rows_of(batch: Any) -> tf.Tensor:
  """Returns how many rows a batch has, of which all tensors must have as many."""
  first, *rest = [
    tf.shape(t, tf.int64)[0] for t in tf.nest.flatten(batch) if t is not None
  ]
  checks = [
    tf.debugging.assert_equal(
      rows,
      first,
      "Expected tensors with as many rows as each other in a batch, in mode='sync'.",
    )
    for rows in rest
  ]
  with tf.control_dependencies([c for c in checks if c is not None]):
    return tf.identity(first)


def _rows_of(tensor, first: int, last: int):
  if not isinstance(tensor, tf.SparseTensor):
    return None if tensor is None else tensor[first:last]
  rest = tensor.shape.as_list()[1:]
  return tf.sparse.slice(
    tensor, [first, *[0] * len(rest)], [last - first, *rest]
  )


def _size(spec) -> int:
  return math.prod(spec.shape.as_list()) * spec.dtype.size


def _padded(size: int) -> int:
  return -(-size // _ALIGNMENT) * _ALIGNMENT


def _from_bytes(part, dtype, shape):
  if dtype == tf.bool:
    part = tf.not_equal(part, 0)
  elif dtype != tf.uint8:
    if dtype.size > 1:
      part = tf.reshape(part, [-1, dtype.size])
    part = tf.bitcast(part, dtype)
  return tf.reshape(part, shape)


def spec_of(tensor: Any) -> tf.TypeSpec | None:
  """Of a tensor of a batch, or None for None."""
  if tensor is None:
    return None
  if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
    return tf.type_spec_from_value(tensor)
  if tf.is_tensor(tensor):
    return tf.TensorSpec(tensor.shape, tensor.dtype)
  array = np.asarray(tensor)
  is_text = array.dtype.kind in 'OSU'
  return tf.TensorSpec(array.shape, tf.string if is_text else array.dtype)


def _array(tensor) -> np.ndarray:
  """A component of a batch; strings as objects."""
  array = np.asarray(tensor.numpy() if tf.is_tensor(tensor) else tensor)
  if array.dtype.kind in 'biufcV':
    return array
  # NumPy cuts the zeros off the end of a string that is no object.
  array = array.astype(object)
  option_checks.check(
    all(isinstance(item, str | bytes) for item in array.reshape(-1)),
    'a batch with an array of Python objects',
    'tensors or arrays of numbers or strings; also ragged and sparse tensors',
    'turn the objects into numbers or strings in the input pipeline',
  )
  return array
