"""Wire formats: what a chunk looks like while it travels.

A codec turns an array into what is sent and back. Sums are never made in the
wire format: a receiver decodes first and adds in float32 (or the array's own
type, where that is wider).

Values above 65504 become infinite in float16. To send a mean, divide before
the sum where that can happen, or use bfloat16, which has float32's range.
"""

from __future__ import annotations

import abc
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from tf_strategies import errors


class Compression(abc.ABC):
  """A codec between arrays and what travels.

  Attributes:
    name: what `by_name` knows it by.
    lossy: whether decoding can give another value than was encoded.
  """

  name: str
  lossy: bool = True

  @abc.abstractmethod
  def compress(self, array: np.ndarray) -> tuple[np.ndarray, Any]:
    """Encodes an array.

    Args:
      array: any shape; it is not changed, but may be returned as it is.

    Returns:
      The array to send, of the same shape, and a context for `decompress`
      that each receiver of the same kind of array knows as well.
    """

  @abc.abstractmethod
  def decompress(self, wire: np.ndarray, ctx: Any) -> np.ndarray:
    """Decodes what `compress` returned.

    Args:
      wire: the array that was sent.
      ctx: the context.

    Returns:
      An array of the shape and dtype of the original.
    """

  def accumulator_dtype(self, dtype: np.dtype) -> np.dtype:
    """The dtype to add decoded arrays of `dtype` in."""
    return np.dtype(dtype)


class NoCompression(Compression):
  """Sends arrays as they are.

  Example:

    >>> wire, ctx = NoCompression().compress(np.float32([1, 2]))
    >>> NoCompression().decompress(wire, ctx)
    array([1., 2.], dtype=float32)
  """

  name = 'none'
  lossy = False

  def compress(self, array: np.ndarray) -> tuple[np.ndarray, None]:
    """See base class."""
    return array, None

  def decompress(self, wire: np.ndarray, ctx: None) -> np.ndarray:
    """See base class."""
    return wire


class _SixteenBit(Compression):
  """Halves float32 and wider floats; everything else travels as it is."""

  def compress(self, array: np.ndarray) -> tuple[np.ndarray, np.dtype | None]:
    """See base class; the context is the original dtype, None if unchanged."""
    # Integers must stay exact, and 16-bit floats gain nothing.
    if array.dtype.kind != 'f' or array.dtype.itemsize <= 2:
      return array, None
    return self._encode(array), array.dtype

  def decompress(self, wire: np.ndarray, ctx: np.dtype | None) -> np.ndarray:
    """See base class."""
    return wire if ctx is None else self._decode(wire).astype(ctx)

  def accumulator_dtype(self, dtype: np.dtype) -> np.dtype:
    """See base class; float32 at least for every float."""
    dtype = np.dtype(dtype)
    return np.result_type(dtype, np.float32) if dtype.kind == 'f' else dtype

  @abc.abstractmethod
  def _encode(self, array: np.ndarray) -> np.ndarray:
    """Float array to a 16-bit array."""

  @abc.abstractmethod
  def _decode(self, wire: np.ndarray) -> np.ndarray:
    """16-bit array to a float array that holds each value exactly."""


class Float16Compression(_SixteenBit):
  """IEEE half precision: 11 bits of precision, largest value 65504.

  Example:

    >>> wire, ctx = Float16Compression().compress(np.float32([0.5, 1e6]))
    >>> wire
    array([0.5, inf], dtype=float16)
  """

  name = 'float16'

  def _encode(self, array: np.ndarray) -> np.ndarray:
    with np.errstate(over='ignore'):  # The result, inf, says it.
      return array.astype(np.float16)

  def _decode(self, wire: np.ndarray) -> np.ndarray:
    return wire


class BFloat16Compression(_SixteenBit):
  """The upper half of a float32: its range, with 8 bits of precision.

  The wire is uint16, as NumPy has no bfloat16. Rounds to nearest, ties to
  even; infinities and NaNs stay what they are. A float64 is rounded to float32
  first.

  Example:

    >>> wire, ctx = BFloat16Compression().compress(np.float32([1.0, 1.00390625]))
    >>> [hex(w) for w in wire]
    ['0x3f80', '0x3f80']
    >>> BFloat16Compression().decompress(wire, ctx)
    array([1., 1.], dtype=float32)
  """

  name = 'bfloat16'

  def _encode(self, array: np.ndarray) -> np.ndarray:
    with np.errstate(over='ignore'):
      # One dimension: a 0-d array would turn into a scalar on the way, whose
      # arithmetic warns where an array's wraps around.
      values = array.reshape(-1).astype(np.float32)
    bits = values.view(np.uint32)
    # Half of the last kept bit, less one where that bit is 0: ties to even. In
    # place, since this is where the time of a 16-bit all-reduce goes.
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    wire = rounded.astype(np.uint16)
    is_nan = np.isnan(values)
    if is_nan.any():
      # Rounding could carry a NaN into an infinity; truncating could clear all
      # of its mantissa. The quiet bit keeps it a NaN.
      wire[is_nan] = (bits[is_nan] >> np.uint32(16)) | np.uint32(0x0040)
    return wire.reshape(array.shape)

  def _decode(self, wire: np.ndarray) -> np.ndarray:
    bits = wire.reshape(-1).astype(np.uint32)
    bits <<= np.uint32(16)
    return bits.view(np.float32).reshape(wire.shape)


_CODECS: Mapping[str, type[Compression]] = types.MappingProxyType(
  {
    codec.name: codec
    for codec in (NoCompression, Float16Compression, BFloat16Compression)
  }
)


def by_name(name: str) -> Compression:
  """The codec of a name.

  Example:

    >>> by_name('bfloat16').name
    'bfloat16'

  Args:
    name: 'none', 'float16' or 'bfloat16'.

  Returns:
    A codec; codecs have no state, so that one serves all tensors.

  Raises:
    UnsupportedOptionError: there is no codec of that name.
  """
  if not isinstance(name, str) or name not in _CODECS:
    allowed = ', '.join(repr(known) for known in _CODECS)
    raise errors.UnsupportedOptionError(
      f'compression={name!r}',
      f'one of {allowed}',
      "write compression='none' to send arrays as they are",
    )
  return _CODECS[name]()
