"""Keeps the unsent rests of a worker's gradients for the next step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.collectives import codec as codec_lib


class GradientRests:
  """Creates and finds the rest of each variable's gradient.

  Every worker has its own rests, and only their sum matters: a checkpoint holds them as
  parts of a sum. They belong to no strategy, as the queue's token: there is one copy,
  on the first device.
  """

  def __init__(self, device: str):
    self._device = device
    # By the `id` of a variable, which may no longer exist.
    self._rests: dict[int, tuple[weakref.ref, tf.Variable]] = {}

  def of(self, variable: Any) -> tf.Variable:
    """Returns the unsent rest of a variable's gradients; zeros before the first step."""
    known, rest = self._rests.get(id(variable), (lambda: None, None))
    if known() is not variable:
      self._rests = {k: v for k, v in self._rests.items() if v[0]() is not None}
      rest = self._make(variable)
      self._rests[id(variable)] = weakref.ref(variable), rest
    return rest

  def _make(self, variable) -> tf.Variable:
    shape = tuple(variable.shape)
    dtype = codec_lib.sum_dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)
    with tf.init_scope(), tf.device(self._device):
      return _tf_internal.ResourceVariable(
        np.zeros(shape, dtype),
        trainable=False,
        name='gradient_rest',
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
      )


def names(variables: Sequence[Any]) -> Iterator[str]:
  """Yields a unique name for each variable."""
  taken: dict[str, int] = {}
  for variable in variables:
    path = getattr(variable, 'path', None) or variable.name
    taken[path] = taken.get(path, 0) + 1
    yield path if taken[path] == 1 else f'{path}#{taken[path]}'
