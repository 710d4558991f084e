"""A batch as one tensor.

Each tensor that a worker is given costs a call of its own, so it is given one: a vector
of strings, each of which is an array of the batch, as TensorFlow serializes tensors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal, errors, option_checks

# A serialized tensor of 2 GiB, with its shape, is too large for a protocol buffer.
_MOST_BYTES = 2**31 - 2**16


@dataclasses.dataclass(frozen=True)
class BatchLayout:
  """The contents of a batch message; equal layouts can use one traced function."""

  structure: Any  # Of a batch, with a `tf.TypeSpec` for each tensor.

  argument = tf.TensorSpec([None], tf.string)  # Of a traced function.

  @functools.cached_property
  def specs(self) -> list[tf.TensorSpec]:
    """Specs of the arrays of a batch; a ragged or sparse tensor has several."""
    return components(self.structure)

  @functools.cached_property
  def key(self) -> Any:
    """Equal for equal layouts."""
    return type(self), repr(self.structure)

  def read(self, argument: tf.Tensor) -> Any:
    """Returns the batch that a message has."""
    found = []
    for i, spec in enumerate(self.specs):
      tensor = tf.io.parse_tensor(argument[i], spec.dtype)
      tensor.set_shape(spec.shape)
      found.append(tensor)
    return pack(self.structure, found)


def _serialized(array: np.ndarray) -> bytes:
  """Returns an array as `tf.io.parse_tensor` reads it.

  `tf.io.serialize_tensor` takes eight times as long for ten megabytes, and
  `tf.make_tensor_proto` writes some dtypes, such as bool, element by element.

  Raises:
    UnsupportedOptionError: if the array has 2 GiB or more, which TensorFlow cannot read.
  """
  if array.dtype == object:
    return tf.make_tensor_proto(array).SerializeToString()
  option_checks.check(
    array.nbytes < _MOST_BYTES,
    f'an array of {array.nbytes} bytes in a batch',
    f'fewer than {_MOST_BYTES} bytes in each array that the chief sends',
    'use smaller batches, or let workers read the data',
  )
  proto = tf.make_tensor_proto(np.empty([0], array.dtype))
  proto.tensor_shape.CopyFrom(tf.TensorShape(array.shape).as_proto())
  proto.tensor_content = array.tobytes()
  return proto.SerializeToString()


class Batch:
  """A structure of tensors or arrays, as its arrays.

  It is sent to whichever worker is free. If it `hides_rows`, the step is traced for any
  number of rows, as under Keras on one device. `index` is its number among the parts of
  a batch.
  """

  def __init__(self, data: Any, hides_rows: bool = False, index: int = 0):
    self.index = index
    self.structure = tf.nest.map_structure(_spec_of, data)
    self.arrays = list(map(_array, components(data)))
    self._rows = {
      s.shape[0] if s.shape.rank else None
      for s in tf.nest.flatten(self.structure)
      if s is not None
    }
    self._has_rows = len(self._rows) == 1 and None not in self._rows
    if hides_rows and self._has_rows:
      self.structure = tf.nest.map_structure(
        _tf_internal.with_any_rows, self.structure
      )

  def microbatches(self, count: int) -> list[Batch]:
    """Splits the rows into `count` parts, none of them empty, larger ones first.

    The batch is one of dense tensors. All parts use one traced function.
    """
    if not self._has_rows:
      raise errors.UnsupportedOptionError(
        f'arrays of {sorted(map(str, self._rows))} rows',
        "arrays of equally many rows in a batch with mode='sync'",
        "give all arrays the batch's rows, or use mode='async'",
      )
    [total] = self._rows
    count = max(1, min(count, total))
    if count == 1:
      return [self]
    parts = zip(
      *(np.array_split(array, count) for array in self.arrays), strict=True
    )
    return [
      Batch(pack(self.structure, part), hides_rows=True, index=i)
      for i, part in enumerate(parts)
    ]

  @functools.cached_property
  def layout(self) -> BatchLayout:
    """Returns the layout of its message."""
    return BatchLayout(self.structure)

  def message(self) -> np.ndarray:
    """Returns the message, as bytes objects."""
    return np.array([_serialized(array) for array in self.arrays], object)

  def has_work_for(self, worker: int) -> bool:
    """Returns whether a worker may compute it: any."""
    del worker
    return True

  def read(self, worker: int, compute: Callable[[tf.Tensor], Any]) -> bool:
    """Calls `compute` with the message; returns that there was something to read."""
    del worker
    [message] = _tf_internal.on_host(self.message())
    compute(message)
    return True


def components(structure: Any) -> list[Any]:
  """Returns the tensors, arrays or specs of a structure, without None."""
  flat = tf.nest.flatten(structure, expand_composites=True)
  return [each for each in flat if each is not None]


def pack(structure: Any, tensors: Sequence[Any]) -> Any:
  """Returns the structure with these tensors as its components; None stays None."""
  remaining = iter(tensors)
  flat = [
    None if spec is None else next(remaining)
    for spec in tf.nest.flatten(structure, expand_composites=True)
  ]
  return tf.nest.pack_sequence_as(structure, flat, expand_composites=True)


def rows_of(batch: Any) -> tf.Tensor:
  """Returns how many rows a batch has, of which all tensors must have as many."""
  rows = tf.stack(
    [tf.shape(t, tf.int64)[0] for t in tf.nest.flatten(batch) if t is not None]
  )
  tf.debugging.assert_equal(
    rows,
    rows[0],
    "Expected tensors with as many rows as each other in a batch, in mode='sync'.",
  )
  return rows[0]


def _spec_of(tensor: Any) -> tf.TypeSpec | None:
  """Returns the spec of a tensor of a batch, or None for None."""
  if tensor is None:
    return None
  if not isinstance(tensor, tf.Tensor | tf.RaggedTensor | tf.SparseTensor):
    tensor = np.asarray(tensor)
  return tf.type_spec_from_value(tensor)


def _array(tensor) -> np.ndarray:
  """Returns a component of a batch as an array; strings as objects."""
  array = np.asarray(tensor.numpy() if tf.is_tensor(tensor) else tensor)
  if array.dtype.kind in 'biufcV':
    return array
  # NumPy cuts the zeros off the end of a string that is no object.
  array = array.astype(object)
  option_checks.check(
    all(isinstance(item, str | bytes) for item in array.reshape(-1)),
    'an array of Python objects in a batch',
    'tensors (dense, ragged or sparse), or arrays of numbers or strings',
    'turn the objects into numbers or strings in the input pipeline',
  )
  return array
