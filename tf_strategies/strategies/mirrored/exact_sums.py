"""Sums of floats that have the same bits in any order and any grouping.

The terms of a sum become 64-bit integers of one unit. The unit is a power of
two that follows from the largest magnitude in the tensor among all terms.
Integer sums do not round, so they do not depend on the number of replicas or
the all-reduce algorithm.

A term is off by at most 2**-55 of the largest magnitude. If a tensor contains
an infinity or a NaN, all its sums are NaN. A minus zero loses its sign.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_strategies import errors
from tf_strategies.spmd import emit
from tf_strategies.spmd.site import Site

# Largest number of terms in a sum. This many integers of `_BITS` bits do not
# overflow.
MAX_TERMS = 128
_BITS = 56
# The bits of a float64 that hold its exponent.
_EXPONENT = 0x7FF << 52


class ExactExchange(emit.Exchange):
  """Adds the values of virtual shards without rounding.

  Args:
    inner: exchange of the replicas that have the shards.
    shards: sites of this process's shards, in the order of the rows.
  """

  def __init__(self, inner: emit.Exchange, shards: Sequence[Site]):
    self._inner, self._shards = inner, shards

  def gather(self, values, axis, sites):
    """See base class."""
    with tf.device(self._shards[0].device):
      together = tf.concat(values, axis)
    return self._inner.gather([together], axis, sites)

  def first(self, value, like, sites):
    """See base class."""
    return self._inner.first(value, like, sites)

  def add(self, columns, sites, variables):
    """See base class."""
    scales = self._scales(columns)
    totals: dict[int, list[tf.Tensor]] = {}
    for site, column in zip(self._shards, columns, strict=True):
      with tf.device(site.device):
        terms = list(map(encode, column, scales))
        if site.replica in totals:
          before = totals[site.replica]
          terms = [a + b for a, b in zip(before, terms, strict=True)]
        totals[site.replica] = terms
    sums = self._inner.add(
      list(totals.values()), sites, [None] * len(variables)
    )
    dtypes = [t.dtype for t in columns[0]]
    results = []
    for site, column in zip(sites, sums, strict=True):
      with tf.device(site.device):
        results.append(list(map(decode, column, scales, dtypes)))
    return results

  def _scales(self, columns) -> list[tf.Tensor]:
    """Returns the common scale of all terms of each tensor."""
    largest = [tf.stack(list(map(magnitude, column))) for column in columns]
    rows = [row[tf.newaxis] for row in largest]
    [together] = self.gather(rows, 0, self._shards[:1])
    scales = scale_of(tf.reduce_max(together, 0))
    return tf.unstack(scales, num=len(columns[0]))


def magnitude(term: tf.Tensor) -> tf.Tensor:
  """Returns the largest magnitude of a term, float64; zero for integers.

  Raises:
    UnsupportedOptionError: if the term has neither floats nor integers.
  """
  if term.dtype.is_integer:
    return tf.zeros([], tf.float64)
  if not term.dtype.is_floating:
    raise errors.UnsupportedOptionError(
      f'a reproducible sum of {term.dtype.name} values',
      'floats or integers',
      'cast them, complex ones to their real and imaginary parts',
    )
  return tf.cast(tf.reduce_max(tf.abs(term)), tf.float64)


def scale_of(largest: tf.Tensor) -> tf.Tensor:
  """Returns the powers of two that scale terms to integers; zero for infinity."""
  bits = tf.bitwise.bitwise_and(tf.bitcast(largest, tf.int64), _EXPONENT)
  # The largest term is less than twice this power of two. The limit keeps
  # scales and units in the range of float32.
  power = tf.bitcast(bits, tf.float64)
  return tf.minimum(2.0 ** (_BITS - 1) / power, 2.0**126)


def encode(term: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
  """Returns a term as integers. Integers do not change."""
  if term.dtype.is_integer:
    return term
  wide = _widened(term.dtype)
  scaled = tf.cast(term, wide) * tf.cast(scale, wide)
  return tf.cast(scaled, tf.int64)


def decode(total: tf.Tensor, scale: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
  """Returns the sum of floats that a sum of their integers represents."""
  if dtype.is_integer:
    return total
  wide = _widened(dtype)
  unit = tf.where(scale > 0, 1 / scale, float('nan'))
  return tf.cast(tf.cast(total, wide) * tf.cast(unit, wide), dtype)


def _widened(dtype: tf.DType) -> tf.DType:
  """Returns the dtype in which floats are scaled: 16-bit floats are cast."""
  return tf.float32 if dtype.size < 4 else dtype
