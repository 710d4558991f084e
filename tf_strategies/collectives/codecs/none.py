"""No compression: arrays travel unchanged."""

from __future__ import annotations

from tf_strategies.collectives import codec


class NoCompression(codec.Codec):
  """Says that nothing is encoded; executors move the arrays themselves."""

  name = 'none'

  def payload_bytes(self, length):
    """See base class."""
    return 4 * length

  def encode(self, values, payload):
    """See base class."""
    payload.view('float32')[:] = values

  def decode(self, payload, out):
    """See base class."""
    out[:] = payload.view('float32')
