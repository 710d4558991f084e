"""Initial rows of tables without a vocabulary, computed from the id.

A row is made where it is first needed: on any worker or server, in any order. A
random generator with state cannot do this. Instead, column j of the row of an
id is a hash of seed, id and j (splitmix64, as in Steele et al. 2014, "Fast
splittable pseudorandom number generators"), mapped to the distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_strategies import errors, option_checks

_BITS = 23  # Bits of a random number. With a half added, it fills a float32.
_GOLDEN = 0x9E3779B97F4A7C15
# Probability that a normal number is below minus two standard deviations.
_BELOW_MINUS_TWO = 0.02275013194817921
_SEEDED = {
  'RandomUniform': ('minval', 'maxval'),
  'RandomNormal': ('mean', 'stddev'),
  'TruncatedNormal': ('mean', 'stddev'),
}
_CONSTANTS = {'Zeros': 0.0, 'Ones': 1.0}

InitialRows = Callable[[tf.Tensor], tf.Tensor]


def mix(x: tf.Tensor) -> tf.Tensor:
  """Returns the splitmix64 hash of 64-bit integers, as uint64."""
  z = tf.bitcast(x, tf.uint64) + _word(_GOLDEN)
  z = _xor_shift(z, 30) * _word(0xBF58476D1CE4E5B9)
  z = _xor_shift(z, 27) * _word(0x94D049BB133111EB)
  return _xor_shift(z, 31)


def _xor_shift(z, bits):
  return tf.bitwise.bitwise_xor(z, _shift(z, bits))


def _shift(z, bits):
  return tf.bitwise.right_shift(z, _word(bits))


def _word(value: int) -> tf.Tensor:
  return tf.constant(value % 2**64, tf.uint64)


def owner(ids: tf.Tensor, count: int) -> tf.Tensor:
  """Returns the part, of `count` parts of a table, that has each id, as int32."""
  hashed = tf.cast(_shift(mix(ids), 33), tf.int64)
  return tf.cast(hashed % count, tf.int32)


def get(initializer: Any) -> Any:
  """Returns the initializer or function for an argument.

  Raises:
    UnsupportedOptionError: if the argument does not describe one.
  """
  try:
    found = keras.initializers.get(initializer)
  except (TypeError, ValueError):
    found = None
  option_checks.check_function(
    'embeddings_initializer',
    initializer if found is None else found,
    "write 'uniform', an initializer of Keras's or a function of ids",
  )
  return found


def initial_rows(initializer: Any, seed: int, width: int) -> InitialRows:
  """Returns a function from ids [n] to float32 rows [n, width].

  Args:
    initializer: a Keras initializer that draws each number independently, or a
      function from ids to rows.
    seed: seed of random initializers.
    width: length of a row.

  Raises:
    UnsupportedOptionError: names the initializer.
  """
  if not isinstance(initializer, keras.initializers.Initializer):
    return lambda ids: _checked(initializer(ids), width)
  kind = type(initializer).__name__
  config = initializer.get_config()
  if kind == 'Constant' and np.ndim(config['value']) == 0:
    return lambda ids: _constant(ids, width, config['value'])
  if kind in _CONSTANTS:
    return lambda ids: _constant(ids, width, _CONSTANTS[kind])
  option_checks.check(
    kind in _SEEDED,
    f'embeddings_initializer={kind} of a DynamicEmbedding',
    f'{", ".join([*_SEEDED, *_CONSTANTS, "Constant"])} of a number, or a '
    'function from ids to rows',
    'write for instance keras.initializers.RandomNormal(stddev=0.05), or '
    "'uniform'. No table has a shape that could scale it",
  )
  option_checks.check(
    config.get('seed') is None,
    f'embeddings_initializer={kind}(seed={config["seed"]!r})',
    'an initializer without a seed',
    'pass seed= to DynamicEmbedding instead',
  )
  first, second = (float(config[name]) for name in _SEEDED[kind])

  def random_rows(ids):
    numbers = _uniform(ids, seed, width)
    if kind == 'RandomUniform':
      return tf.cast(first + (second - first) * numbers, tf.float32)
    if kind == 'TruncatedNormal':
      numbers = _BELOW_MINUS_TWO + (1 - 2 * _BELOW_MINUS_TWO) * numbers
    return tf.cast(first + second * tf.math.ndtri(numbers), tf.float32)

  return random_rows


def _uniform(ids, seed, width):
  """Returns numbers between 0 and 1, both excluded.

  They are computed in float64. The last bits of a kernel's result may depend on
  the position in the tensor, but they do not survive the rounding to float32.
  """
  seeded = tf.bitwise.bitwise_xor(mix(ids), mix(_word(seed)))
  # Uses NumPy. In a function, TensorFlow converts a list with integers below
  # and above 2**63 to float64, which rounds them.
  columns = tf.constant(
    np.array([(j * _GOLDEN) % 2**64 for j in range(width)], np.uint64)
  )
  bits = _shift(mix(seeded[:, None] + columns), 64 - _BITS)
  numbers = tf.cast(tf.cast(bits, tf.int32), tf.float64)
  return (numbers + 0.5) * 2.0**-_BITS


def _constant(ids, width, value):
  return tf.fill([tf.size(ids), width], tf.constant(value, tf.float32))


def _checked(rows, width):
  rows = tf.convert_to_tensor(rows)
  if rows.shape.rank != 2 or rows.shape[1] != width:
    raise errors.UnsupportedOptionError(
      f'shape {rows.shape} from embeddings_initializer',
      f'rows of shape [number of ids, {width}]',
      'return one row for each id',
    )
  return tf.cast(rows, tf.float32)
