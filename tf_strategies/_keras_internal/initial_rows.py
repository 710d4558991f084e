"""Makes the initial values of some rows of a variable, equal to the whole's rows.

Keras's initializers make a whole variable. An initializer that makes each element by
itself can make some rows on the server that holds them, so no process needs memory for
the whole table. Random initializers use Philox (Salmon et al. 2011, "Parallel Random
Numbers: As Easy as 1, 2, 3"), a function of a key and a counter. Starting from the
counter of a row's first element gives the rows of the whole.
"""

import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import random as backend_random
from keras.src.initializers import random_initializers

from tf_strategies import _requirements
from tf_strategies._keras_internal.steps import closure

_PHILOX = 1
# Constants of TensorFlow's `random_op_cpu.h`: elements per counter, and
# counters per group when an element may be drawn repeatedly.
_GROUP = 4
_COUNTERS_OF_TRUNCATED = 256
_DTYPES = (tf.float32, tf.float16, tf.bfloat16)

# Initializers that use the shape of the whole at most for a scale.
_CONSTANT = (
  keras.initializers.Zeros,
  keras.initializers.Ones,
  keras.initializers.Constant,
)
_RANDOM = (
  keras.initializers.RandomNormal,
  keras.initializers.RandomUniform,
  keras.initializers.TruncatedNormal,
  keras.initializers.VarianceScaling,
)


def initial_rows(
  initial_value: Callable, shape: Sequence[int], dtype: tf.DType
) -> Callable[[int, int], tf.Tensor] | None:
  """Returns a function that makes `rows` rows of an initial value, from row `first`.

  Returns None if the initializer needs the whole variable (`Orthogonal`, a user's own
  initializer, a `SeedGenerator` as seed, float64) or is not one of Keras.
  """
  found = [
    each
    for each in closure(initial_value)
    if isinstance(each, keras.initializers.Initializer)
  ]
  if len(found) != 1:
    return None
  (initializer,) = found
  method = type(initializer).__call__
  inner = tuple(shape[1:])
  if any(method is kind.__call__ for kind in _CONSTANT):
    if np.ndim(getattr(initializer, 'value', 0)):
      return None
    return lambda rows, first: initializer((rows, *inner), dtype.name)
  if (
    not any(method is kind.__call__ for kind in _RANDOM)
    or not isinstance(initializer.seed, int)
    or dtype not in _DTYPES
  ):
    return None

  def make(rows, first):
    # Uses Keras's own arithmetic for the whole shape, with replaced draws.
    draws = _Draws(first * math.prod(inner), (rows, *inner))
    call = types.FunctionType(
      method.__code__, {**method.__globals__, 'random': draws}
    )
    return call(initializer, tuple(shape), dtype.name)

  return make


class _Draws:
  """Replaces `keras.random`, and draws only some of the requested elements."""

  def __init__(self, first: int, shape: tuple[int, ...]):
    self._first = first
    self._shape = shape

  def uniform(self, shape, minval, maxval, dtype, seed):
    drawn = self._draw(tf.raw_ops.StatelessRandomUniformV2, dtype, seed, 1)
    low, high = (tf.cast(bound, dtype) for bound in (minval, maxval))
    return drawn * (high - low) + low

  def normal(self, shape, mean, stddev, dtype, seed):
    drawn = self._draw(tf.raw_ops.StatelessRandomNormalV2, dtype, seed, 1)
    return drawn * tf.cast(stddev, dtype) + tf.cast(mean, dtype)

  def truncated_normal(self, shape, mean, stddev, dtype, seed):
    op = tf.raw_ops.StatelessTruncatedNormalV2
    drawn = self._draw(op, dtype, seed, _COUNTERS_OF_TRUNCATED)
    return drawn * tf.cast(stddev, dtype) + tf.cast(mean, dtype)

  def _draw(self, op: Any, dtype, seed, counters: int) -> tf.Tensor:
    with tf.device('/device:CPU:0'):
      cast = backend_random._cast_seed(backend_random.draw_seed(seed))
      key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=cast)
      low, high = (int(word) for word in counter.numpy())
    group, extra = divmod(self._first, _GROUP)
    begin = ((high << 64) + low + group * counters) % (1 << 128)
    words = [begin & ((1 << 64) - 1), begin >> 64]
    size = math.prod(self._shape)
    drawn = op(
      shape=tf.constant([extra + size], tf.int64),
      key=key,
      counter=tf.constant(np.array(words, np.uint64)),
      alg=_PHILOX,
      dtype=dtype,
    )
    return tf.reshape(drawn[extra:], self._shape)


_WHY = 'parameter servers make the rows of a table that they hold'
_requirements.needs(_WHY, backend_random, '_cast_seed', 'draw_seed')
for _kind in _RANDOM:
  _requirements.needs(_WHY, _kind, '__call__: random seed')
  _call = _kind.__call__
  if _call.__closure__ or _call.__globals__ is not vars(random_initializers):
    raise _requirements.missing(f"Keras's own {_kind.__name__}.__call__", _WHY)
