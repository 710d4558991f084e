"""A batch that the coordinator hands to a worker."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import errors
from tf_strategies.strategies.parameter_server import batch_message


class Batch:
  """A batch as its arrays.

  Args:
    data: structure of tensors or arrays.
    hides_rows: as of `parcel.Layout`.
  """

  def __init__(self, data: Any, hides_rows: bool = False):
    self.structure = tf.nest.map_structure(_spec, data)
    self.arrays = [_array(t) for t in tf.nest.flatten(data) if t is not None]
    for array in self.arrays:
      if array.dtype.kind not in 'biufcV':
        raise errors.UnsupportedOptionError(
          f'a batch with an array of dtype {array.dtype}',
          'dense arrays of numbers',
          'turn strings into numbers in the input pipeline, or let the workers '
          'read the data: strategy.distribute_datasets_from_function',
        )
    rows = {a.shape[:1] for a in self.arrays}
    self.hides_rows = hides_rows and len(rows) == 1 and () not in rows

  def part(self, arrays: Sequence[np.ndarray]) -> Batch:
    """A batch of some of the rows."""
    part = Batch.__new__(Batch)
    part.arrays = list(arrays)
    specs = [tf.TensorSpec(a.shape, tf.as_dtype(a.dtype)) for a in arrays]
    part.hides_rows = self.hides_rows
    part.structure = batch_message.pack(self.structure, specs)
    return part

  @property
  def key(self) -> Any:
    """Equal for batches of one structure, shapes and dtypes."""
    return self.layout(1).key

  def layout(self, steps: int) -> batch_message.Layout:
    """Of a parcel of so many such batches."""
    return batch_message.Layout(self.structure, steps, self.hides_rows)


def _array(tensor) -> np.ndarray:
  return tensor.numpy() if tf.is_tensor(tensor) else np.asarray(tensor)


def _spec(tensor) -> tf.TensorSpec | None:
  if tensor is None:
    return None
  if isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)):
    raise errors.UnsupportedOptionError(
      f'a batch with a {type(tensor).__name__}',
      'dense arrays of numbers',
      'make it dense in the input pipeline, or let the workers read the data: '
      'strategy.distribute_datasets_from_function',
    )
  if tf.is_tensor(tensor):
    return tf.TensorSpec(tensor.shape, tensor.dtype)
  array = np.asarray(tensor)
  return tf.TensorSpec(array.shape, tf.as_dtype(array.dtype))


def alike(batches: Sequence[Batch]) -> list[list[Batch]]:
  """Batches in runs of one layout each, in their order."""
  return [list(g) for _, g in itertools.groupby(batches, lambda b: b.key)]
