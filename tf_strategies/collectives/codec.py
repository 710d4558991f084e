"""What a codec is: how a stretch of an array looks while it travels.

A receiver decodes first and adds in float32 (float64 for float64 arrays). In
every all-reduce with a codec, whatever the algorithm and wherever it runs:

* A rank encodes its value of a chunk when it sends it, and goes on with what
  the others decode, not with its own more precise value.
* A sum that is complete is encoded once. All ranks, the one that added it up
  among them, use what that payload decodes to; it is forwarded as it is.
* What a payload leaves out of a value is that rank's residual. Of a sum that
  several ranks complete, it is the first one's. So the sum that all get and the
  residuals of all ranks are together the sum of what they had: a caller that adds
  its residual to its next array loses nothing ("error feedback").
"""

from __future__ import annotations

import abc
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Payload:
  """What travels for a stretch of an array.

  Attributes:
    data: one dimension, contiguous.
    metadata: the same, what it takes to decode `data`: scales, say; may be
      empty.
    length: elements of the stretch.
    memory: the bytes of both, as they travel.
  """

  data: np.ndarray
  metadata: np.ndarray
  length: int
  memory: np.ndarray


class Codec(abc.ABC):
  """Encodes stretches of a float array, and decodes them again.

  It says what a payload consists of (`data_format`, `metadata_format`), from
  which both ends of a link derive its size, and fills and reads one (`_encode`,
  `_decode`). What is not finite must not decode to something finite.

  Attributes:
    name: what `compression=` calls it: the name of its file.
    block_length: elements that are encoded independently of others, so that an
      array may be cut after any multiple of them without changing what is
      decoded.
    cast_dtype: name of a dtype whose arrays are payloads already, None if
      there is none.
    keeps_rest: whether it rounds so much that what it leaves out of a gradient is
      to be added to the next one.
  """

  name: str
  block_length: int = 1
  cast_dtype: str | None = None
  keeps_rest: bool = False

  @abc.abstractmethod
  def data_format(self, length: int) -> tuple[str, int]:
    """NumPy dtype and length of `Payload.data` for so many elements."""

  def metadata_format(self, length: int) -> tuple[str, int]:
    """The same for `Payload.metadata`; by default there is none."""
    del length
    return 'uint8', 0

  def payload_bytes(self, length: int) -> int:
    """Bytes that `length` elements travel as."""
    formats = self.data_format(length), self.metadata_format(length)
    return sum(np.dtype(dtype).itemsize * count for dtype, count in formats)

  def payload(self, length: int, memory: np.ndarray | None = None) -> Payload:
    """A payload of `length` elements, to fill or to read.

    Its parts are views of `memory`: uint8, `payload_bytes(length)`, new if None;
    metadata first, then data.
    """
    if memory is None:
      memory = np.empty(self.payload_bytes(length), np.uint8)
    dtype, count = self.metadata_format(length)
    end = count * np.dtype(dtype).itemsize
    data_dtype, _ = self.data_format(length)
    return Payload(
      memory[end:].view(data_dtype), memory[:end].view(dtype), length, memory
    )

  def encode(
    self,
    values: np.ndarray,
    memory: np.ndarray | None = None,
  ) -> Payload:
    """Encodes a stretch.

    Args:
      values: floats, one dimension, contiguous; not changed.
      memory: where the payload goes; None for new memory.
    """
    payload = self.payload(len(values), memory)
    if len(values):
      self._encode(values, payload)
    return payload

  def decode(
    self, payload: Payload, out: np.ndarray | None = None
  ) -> np.ndarray:
    """Decodes a payload into `out`, floats of its length; float32 if None."""
    if out is None:
      out = np.empty(payload.length, np.float32)
    if payload.length:
      self._decode(payload, out)
    return out

  @abc.abstractmethod
  def _encode(self, values: np.ndarray, payload: Payload) -> None:
    """Fills the payload; there is one value at least."""

  @abc.abstractmethod
  def _decode(self, payload: Payload, out: np.ndarray) -> None:
    """Fills `out`, whatever float dtype it has."""


def sum_dtype(dtype: np.dtype) -> np.dtype:
  """The dtype in which decoded arrays of `dtype` are added up.

  Example:

    >>> [sum_dtype(dtype).name for dtype in ('float16', 'float64')]
    ['float32', 'float64']
  """
  dtype = np.dtype(dtype)
  return np.dtype(np.float64 if dtype == np.float64 else np.float32)
