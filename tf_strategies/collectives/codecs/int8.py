"""8-bit integers with a float32 scale for each block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tf_strategies.collectives import codec

# Number of elements that share a scale: 1.6% more bytes than the integers alone.
_BLOCK = 256
# Number of elements that stay in the cache from one operation to the next.
_BATCH = 1 << 16
_LEVELS = 127
# 127 times it is 1, rounded to float32 and to float64.
_STEP = 1 / _LEVELS
# For a smaller largest magnitude, 127 divided by it may be beyond float32.
_LEAST = np.float32(1e-36)


class Int8(codec.Codec):
  """A quarter of the bytes of float32, rounded relative to a block's largest.

  A block of 256 elements travels as their integers from -127 to 127 and a
  float32, the largest magnitude M; integer q stands for q M / 127. An error is
  at most M / 254, but for float32's own, and M itself is exact. M travels rather than M / 127, which
  float32 cannot hold where M is subnormal.

  A block with a NaN or an infinity in it decodes to NaN in all its elements. So
  does one with a float64 that overflows float32. A float64 block below float32's
  range becomes zeros, and a minus zero loses its sign.

  Example:

    >>> values = np.float32([0.4, -64.0, 127.0])
    >>> payload = np.empty(Int8().payload_bytes(3), np.uint8)
    >>> Int8().encode(values, payload)
    >>> parts_of(payload, 3)
    (array([127.], dtype=float32), array([  0, -64, 127], dtype=int8))
    >>> Int8().decode(payload, values)
    >>> values
    array([  0., -64., 127.], dtype=float32)
  """

  name = 'int8'
  block_length = _BLOCK
  keeps_rest = True

  def payload_bytes(self, length):
    """See base class."""
    return length + 4 * -(-length // _BLOCK)

  def encode(self, values, payload):
    """See base class."""
    scales, integers = parts_of(payload, len(values))
    scratch = np.empty(min(len(values), _BATCH), np.float32)
    for part, blocks in _batches(len(values)):
      rows = values[part].reshape(blocks.stop - blocks.start, -1)
      scaled = scratch[: rows.size].reshape(rows.shape)
      with np.errstate(over='ignore', under='ignore', invalid='ignore'):
        np.abs(rows, out=scaled, casting='unsafe')
      # NaN or infinite if one element is; both mean NaN. One call for all rows takes
      # half of the time of a maximum along them.
      largest = np.maximum.reduceat(
        scaled.reshape(-1), np.arange(0, rows.size, rows.shape[1])
      )
      finite = np.isfinite(largest)
      largest[~finite] = np.nan
      scales[blocks] = largest
      # Scales to numbers of at most 127, in float64 where float32 does not suffice.
      is_wide = rows.dtype != np.float32 or np.any(
        (largest > 0) & (largest < _LEAST)
      )
      if is_wide:
        scaled = np.empty(rows.shape)
      factors = np.zeros([len(rows), 1], scaled.dtype)
      np.divide(
        scaled.dtype.type(_LEVELS),
        largest[:, np.newaxis],
        out=factors,
        where=largest[:, np.newaxis] > 0,
        dtype=scaled.dtype,
      )
      with np.errstate(invalid='ignore'):  # Infinity times 0.
        np.multiply(rows, factors, out=scaled)
      if not finite.all():
        scaled[~finite] = 0
      np.rint(scaled, out=scaled)
      if is_wide:
        # M of float64 may have been rounded down, far where it is subnormal.
        np.clip(scaled, -_LEVELS, _LEVELS, out=scaled)
      np.copyto(integers[part].reshape(rows.shape), scaled, casting='unsafe')

  def decode(self, payload, out):
    """See base class."""
    scales, integers = parts_of(payload, len(out))
    for part, blocks in _batches(len(out)):
      rows = out[part].reshape(blocks.stop - blocks.start, -1)
      np.copyto(rows, integers[part].reshape(rows.shape))
      # In this order 127 gives 1, and M again to the bit.
      rows *= rows.dtype.type(_STEP)
      rows *= scales[blocks, np.newaxis]


def parts_of(payload: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the scales and the integers in a payload of `length` elements."""
  end = len(payload) - length
  return payload[:end].view(np.float32), payload[end:].view(np.int8)


def _batches(length: int) -> Iterator[tuple[slice, slice]]:
  """Yields stretches of elements and their blocks: whole ones, then the tail."""
  whole = length - length % _BLOCK
  for start in range(0, whole, _BATCH):
    stop = min(start + _BATCH, whole)
    yield slice(start, stop), slice(start // _BLOCK, stop // _BLOCK)
  if whole < length:
    yield slice(whole, length), slice(whole // _BLOCK, whole // _BLOCK + 1)
