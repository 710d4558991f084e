"""A source of examples that are in memory: NumPy arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import errors, option_checks


@option_checks.has_options
@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
  """Examples in memory, one row each.

  The components are read-only views of the passed arrays, without a copy, because
  pipelines and TensorFlow may share their memory.

  Example:

    >>> Arrays((np.zeros([3, 4]), np.array([0, 1, 1]))).num_examples
    3

  Attributes:
    components: an array, or a tuple or dict of arrays of equal length.
    decode_fn: called with the components of each batch after the cache, such
      as a cast from uint8 to float32; returns the batch.

  Raises:
    DataError: if there is no array or no row, or lengths differ.
    UnsupportedOptionError: if `decode_fn` is not a function.
  """

  components: Any
  decode_fn: Callable[..., Any] | None = None

  def __post_init__(self):
    components = self.components
    option_checks.check_function('decode_fn', self.decode_fn, or_none=True)
    if isinstance(components, list):  # To tf.data a list is one tensor.
      components = tuple(components)
    components = tf.nest.map_structure(_read_only, components)
    lengths = [
      len(array) if array.ndim else None
      for array in tf.nest.flatten(components)
    ]
    if not lengths or len(set(lengths)) != 1 or not lengths[0]:
      raise errors.DataError(
        f'Expected arrays with one row for each example, got lengths {lengths} '
        f'of {self.components!r:.80}. Fix: pass arrays of equal length, with at least one row.'
      )
    object.__setattr__(self, 'components', components)

  @property
  def num_examples(self) -> int:
    """The number of rows."""
    return len(tf.nest.flatten(self.components)[0])

  def __len__(self) -> int:
    return self.num_examples


def _read_only(value: Any) -> np.ndarray:
  view = np.asarray(value).view()
  view.flags.writeable = False
  return view
