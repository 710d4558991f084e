"""Defines codecs: the form in which a stretch of an array travels.

A receiver decodes first and adds in float32 (float64 for float64 arrays). In
every all-reduce with a codec, whatever the algorithm and wherever it runs:

* A rank encodes its value of a chunk when it sends it. Then it uses the decoded value,
  as the receivers do, not its own more precise one.
* A complete sum is encoded once and forwarded unchanged. All ranks use the decoded
  value, also the rank that added it up.
"""

from __future__ import annotations

import abc

import numpy as np


class Codec(abc.ABC):
  """Encodes stretches of a float array, and decodes them again.

  Both ends of a link derive the size of a payload from the length of the stretch. A
  value that is not finite must not decode to a finite one.

  Attributes:
    name: name that `compression=` takes, which is also the name of its file.
    cast_dtype: name of a dtype whose arrays are payloads already; None if there is
      none.
  """

  name: str
  cast_dtype: str | None = None

  @abc.abstractmethod
  def payload_bytes(self, length: int) -> int:
    """Returns the number of bytes in which `length` elements travel."""

  @abc.abstractmethod
  def encode(self, values: np.ndarray, payload: np.ndarray) -> None:
    """Encodes a stretch.

    Args:
      values: floats, one-dimensional and contiguous. They are only read.
      payload: gets the payload: `payload_bytes(len(values))` bytes, uint8.
    """

  @abc.abstractmethod
  def decode(self, payload: np.ndarray, out: np.ndarray) -> None:
    """Decodes a payload into `out`, an array of any float dtype."""


class Cast(Codec):
  """Sends floats as the 16-bit floats of `cast_dtype`, rounded to the nearest.

  Values beyond the range of that dtype become infinite, and a NaN stays NaN.
  """

  def payload_bytes(self, length):
    """See base class."""
    return 2 * length

  def encode(self, values, payload):
    """See base class."""
    # The result shows an overflow: it is infinite.
    with np.errstate(over='ignore', invalid='ignore'):
      np.copyto(payload.view(self.cast_dtype), values, casting='unsafe')

  def decode(self, payload, out):
    """See base class."""
    with np.errstate(invalid='ignore'):
      np.copyto(out, payload.view(self.cast_dtype), casting='unsafe')


def sum_dtype(dtype: np.dtype) -> np.dtype:
  """Returns the dtype in which decoded arrays of `dtype` are added up.

  Example:

    >>> [sum_dtype(dtype).name for dtype in ('float16', 'float64')]
    ['float32', 'float64']
  """
  dtype = np.dtype(dtype)
  return np.dtype(np.float64 if dtype == np.float64 else np.float32)
