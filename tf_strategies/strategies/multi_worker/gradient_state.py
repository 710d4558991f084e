"""What the gradients of a worker leave behind for its next step."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.collectives import codec as codec_lib
from tf_strategies.collectives import compression as compression_lib


@dataclasses.dataclass(frozen=True)
class Kept:
  """Of one variable's gradient.

  Attributes:
    rest: what this worker has not sent yet. Every worker has its own, and their
      sum counts: to a checkpoint they are parts of a sum.
    factor: of `powersgd`, the columns to begin with; the same on all workers.
  """

  rest: tf.Variable
  factor: tf.Variable | None

  def variables(self) -> list[tf.Variable]:
    """Those that there are."""
    return [v for v in (self.rest, self.factor) if v is not None]


class GradientState:
  """Makes and finds what is kept, of each variable and way to compress it.

  Of no strategy, as the queue's token: there is one copy, on the first device.
  """

  def __init__(self, device: str):
    self._device = device
    # By the `id` of a variable, which may have gone.
    self._kept: dict[int, tuple[weakref.ref, Kept]] = {}

  def of(self, variable: Any, compression: compression_lib.Compression) -> Kept:
    """What a variable's gradients leave behind; zeros before the first."""
    known, kept = self._kept.get(id(variable), (lambda: None, None))
    if known() is not variable:
      self._kept = {k: v for k, v in self._kept.items() if v[0]() is not None}
      kept = self._make(variable, compression)
      self._kept[id(variable)] = weakref.ref(variable), kept
    return kept

  def _make(self, variable, compression) -> Kept:
    shape = tuple(variable.shape)
    dtype = codec_lib.sum_dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)
    factor = None
    with tf.init_scope(), tf.device(self._device):
      rest = _tf_internal.ResourceVariable(
        np.zeros(shape, dtype),
        trainable=False,
        name='gradient_rest',
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
      )
      if compression.name == compression_lib.POWER_SGD:
        first = first_factor(shape, compression.rank).astype(dtype)
        factor = _tf_internal.ResourceVariable(
          first, trainable=False, name='gradient_factor'
        )
    return Kept(rest, factor)


def first_factor(shape: Sequence[int], rank: int) -> np.ndarray:
  """Columns in any direction, the same on all workers."""
  _, columns = compression_lib.matrix_shape(tuple(shape))
  random = np.random.default_rng([columns, rank])
  return random.uniform(-1, 1, [columns, rank]).astype(np.float32)


def names(variables: Sequence[Any]) -> Iterator[str]:
  """A name for each variable, which no other one has."""
  taken: dict[str, int] = {}
  for variable in variables:
    path = getattr(variable, 'path', None) or variable.name
    taken[path] = taken.get(path, 0) + 1
    yield path if taken[path] == 1 else f'{path}#{taken[path]}'
