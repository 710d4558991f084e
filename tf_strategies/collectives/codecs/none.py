"""No compression: arrays travel as they are."""

from __future__ import annotations

from tf_strategies.collectives import codec


class NoCompression(codec.Codec):
  """Says that nothing is encoded; executors move the arrays themselves.

  Example:

    >>> NoCompression().payload_bytes(10)
    40
  """

  name = 'none'

  def data_format(self, length):
    """See base class."""
    return 'float32', length

  def _encode(self, values, payload):
    payload.data[:] = values

  def _decode(self, payload, out):
    out[:] = payload.data
