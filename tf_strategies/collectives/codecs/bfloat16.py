"""The upper half of a float32."""

from __future__ import annotations

import numpy as np

from tf_strategies.collectives import codec

# Elements that stay in the cache from one operation to the next.
_BLOCK = 1 << 15


class BFloat16(codec.Codec):
  """The range of float32 with 8 bits of precision.

  Rounds to nearest, ties to even; infinities stay, a NaN becomes the quiet NaN
  of its sign. A float64 is rounded to float32 first. Uses the casts of
  `ml_dtypes` where something has loaded it, as TensorFlow does: the same bits
  in half the time.

  Example:

    >>> payload = BFloat16().encode(np.float32([1.0, 1.00390625]))
    >>> [hex(bits) for bits in payload.data]
    ['0x3f80', '0x3f80']
    >>> BFloat16().decode(payload)
    array([1., 1.], dtype=float32)
  """

  name = 'bfloat16'
  cast_dtype = 'bfloat16'

  def data_format(self, length):
    """See base class; NumPy itself has no bfloat16."""
    return 'uint16', length

  def _encode(self, values, payload):
    if values.dtype != np.float32:
      with np.errstate(over='ignore'):
        values = values.astype(np.float32)
    dtype = _ml_dtype()
    if dtype is not None:
      with np.errstate(over='ignore', invalid='ignore'):
        np.copyto(payload.data.view(dtype), values, casting='unsafe')
      return
    for start in range(0, len(values), _BLOCK):
      block = slice(start, start + _BLOCK)
      payload.data[block] = _rounded(values[block])

  def _decode(self, payload, out):
    dtype = _ml_dtype()
    if dtype is not None:
      with np.errstate(invalid='ignore'):
        np.copyto(out, payload.data.view(dtype), casting='unsafe')
      return
    for start in range(0, len(out), _BLOCK):
      block = slice(start, start + _BLOCK)
      bits = payload.data[block].astype(np.uint32)
      bits <<= np.uint32(16)
      np.copyto(out[block], bits.view(np.float32), casting='unsafe')


def _ml_dtype() -> np.dtype | None:
  """`ml_dtypes.bfloat16` if that is loaded, which registers it with NumPy."""
  try:
    return np.dtype('bfloat16')
  except TypeError:
    return None


def _rounded(values: np.ndarray) -> np.ndarray:
  bits = values.view(np.uint32)
  # Half of the last kept bit, less one where that bit is 0: ties to even.
  rounded = bits >> np.uint32(16)
  rounded &= np.uint32(1)
  rounded += np.uint32(0x7FFF)
  rounded += bits
  rounded >>= np.uint32(16)
  is_nan = np.isnan(values)
  if is_nan.any():
    # Rounding could carry a NaN into an infinity.
    signs = bits[is_nan] >> np.uint32(16) & np.uint32(0x8000)
    rounded[is_nan] = signs | np.uint32(0x7FC0)
  return rounded
