"""Sums of floats that are the same to the bit in any order and any grouping.

Floats become integers that share one exponent for each block of 256 values (see
`block_length`). It is the exponent of the block's largest magnitude among all terms.
Integers add up exactly, so their order does not matter. A sum takes two reductions: of
exponents by maximum, then of integers by addition. The result is rounded once. This
module holds the numbers; strategies compute with TensorFlow.

With T terms an integer keeps 31 - ceil(log2 T) bits of a float32 (63 of a float64)
below the largest magnitude M of its block. So each term is off by at most
M / 2**bits, and the sum by T times that and the rounding of the result.

Special values:

* A subnormal number counts as zero, and no sum is subnormal: TensorFlow flushes
  them in some threads and not in others. A minus zero loses its sign.
* A sum beyond the largest float is an infinity.
* In a block with a NaN or an infinity, infinities of one sign add up to that
  infinity, and everything else to NaN, finite values too: their exponent is not
  known.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tf_strategies import errors

# Values that share an exponent; it adds 0.1% to what travels.
BLOCK_LENGTH = 256
# Values: from here on the last block of a tensor has to be as long as the others, or
# all of them are copied.
_LARGE = 1 << 18
# Beyond these an integer would hold less than a float.
MAX_TERMS = 128
# Of numbers that are not finite, counted in the two halves of an integer.
ABOVE, BELOW = 1, 1 << 16


@dataclasses.dataclass(frozen=True)
class Format:
  """How floats of one dtype are cut into integers.

  Attributes:
    dtype: of the floats.
    integer: dtype of as many bits.
    exponent: dtype in which a block's exponent travels.
    mantissa_bits: of the floats.
    special: the exponent, as it is stored, of what is not finite.
  """

  dtype: np.dtype
  integer: np.dtype
  exponent: np.dtype
  mantissa_bits: int
  special: int

  def bits(self, num_terms: int) -> int:
    """Returns how many an integer may use, so that so many terms do not overflow."""
    if not 1 <= num_terms <= MAX_TERMS:
      raise errors.UnsupportedOptionError(
        f'a reproducible sum of {num_terms} terms',
        f'1 to {MAX_TERMS}',
        'add up fewer',
      )
    return 8 * self.dtype.itemsize - 1 - (num_terms - 1).bit_length()

  def least(self, num_terms: int) -> int:
    """The smallest exponent in use, with which no sum is subnormal."""
    return self.bits(num_terms) + 1

  def to_scale(self, num_terms: int) -> int:
    """From this an exponent is taken: that of 2**n, by which floats grow."""
    return self.bits(num_terms) + self.special - 2

  def to_unit(self, num_terms: int) -> int:
    """This is added to an exponent: that of an integer's unit."""
    return 1 - self.bits(num_terms)

  @property
  def largest(self) -> float:
    """The largest finite number."""
    return np.finfo(self.dtype).max

  @property
  def magnitude(self) -> int:
    """The bits of a float but its sign."""
    return (self.special << self.mantissa_bits) | (1 << self.mantissa_bits) - 1


_FORMATS = {
  'float32': Format(np.dtype('f4'), np.dtype('i4'), np.dtype('u1'), 23, 255),
  'float64': Format(np.dtype('f8'), np.dtype('i8'), np.dtype('u2'), 52, 2047),
}
# Added in float32, and rounded once.
_HALVES = ('float16', 'bfloat16')


def format_of(dtype: np.dtype) -> Format:
  """How floats of a dtype are added up; 16-bit ones are cast to `.dtype` before.

  Raises:
    UnsupportedOptionError: numbers that have no such sums.
  """
  name = np.dtype(dtype).name
  name = 'float32' if name in _HALVES else name
  if name not in _FORMATS:
    raise errors.UnsupportedOptionError(
      f'a reproducible sum of {name} values',
      f'one of {", ".join([*_FORMATS, *_HALVES])}, or integers',
      'cast them, complex ones to their real and imaginary parts',
    )
  return _FORMATS[name]


def block_length(length: int) -> int:
  """Returns how many of so many values share an exponent.

  Of many the length is a multiple of it, if one of the upper half of lengths is.

  Example:

    >>> block_length(1000), block_length(1 << 20), block_length(1250 * 1250)
    (256, 256, 250)
  """
  if length < _LARGE:
    return BLOCK_LENGTH
  lengths = range(BLOCK_LENGTH, BLOCK_LENGTH // 2 - 1, -1)
  return next((n for n in lengths if length % n == 0), BLOCK_LENGTH)
