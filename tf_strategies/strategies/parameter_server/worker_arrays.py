"""Arrays of a data set function, on the workers that read them.

An array that a traced function uses is a part of the function. TensorFlow sends
functions to all tasks, and recreates their arrays for each worker that calls them. With
62 MB and four workers, the first epoch began half a minute late. Functions therefore
capture large arrays, and each worker gets one copy.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal

_LARGE_BYTES = 1 << 16


def device(worker: int) -> str:
  """Returns the device on which a worker reads its data."""
  return f'/job:worker/replica:0/task:{worker}/device:CPU:0'


class WorkerArrays:
  """The large arrays of a data set function."""

  def __init__(self):
    # Of arrays that are still there: the splits share most of them.
    self._tensors: list[tuple[weakref.ref, tf.DType, tf.Tensor]] = []
    # By worker and tensor, with the life of the worker that got it.
    self._copies: dict[tuple[int, int], tuple[int, tf.Tensor]] = {}

  @contextlib.contextmanager
  def captured(self) -> Iterator[list[tf.Tensor]]:
    """Makes graphs capture arrays; yields those that they used, in that order."""
    used = []

    def take(array, dtype):
      if array.nbytes < _LARGE_BYTES:
        return None
      used.append(self._tensor(array, dtype))
      return used[-1]

    with _tf_internal.arrays_from(take):
      yield used

  def function(
    self, make: Callable, specs: Sequence[tf.TensorSpec]
  ) -> tuple[Callable, list[tf.Tensor]]:
    """Returns a concrete function of `specs`, and the arrays that it captured."""
    with self.captured() as used:
      traced = tf.function(make, autograph=False)
      return traced.get_concrete_function(*specs), used

  def on_worker(
    self, tensors: Sequence[tf.Tensor], worker: int, life: int
  ) -> list[tf.Tensor]:
    """Copies on a worker; one that begins another life has lost them."""
    found = []
    for tensor in tensors:
      known, copy = self._copies.get((worker, id(tensor)), (None, None))
      if known != life:
        with tf.device(device(worker)):
          copy = tf.identity(tensor)
        self._copies[worker, id(tensor)] = life, copy
      found.append(copy)
    return found

  def _tensor(self, array: np.ndarray, dtype) -> tf.Tensor:
    dtype = tf.as_dtype(array.dtype if dtype is None else dtype)
    self._tensors = [t for t in self._tensors if t[0]() is not None]
    for known, of_dtype, tensor in self._tensors:
      if known() is array and of_dtype == dtype:
        return tensor
    with tf.init_scope(), tf.device('/device:CPU:0'):
      tensor = tf.constant(array, dtype)
    self._tensors.append((weakref.ref(array), dtype, tensor))
    return tensor
