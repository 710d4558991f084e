"""IEEE half precision."""

from __future__ import annotations

import numpy as np

from tf_strategies.collectives import codec


class Float16(codec.Codec):
  """11 bits of precision; values above 65504 become infinite.

  To send a mean, divide before the sum, or use bfloat16, which has float32's
  range.

  Example:

    >>> Float16().encode(np.float32([0.5, 1e6])).data
    array([0.5, inf], dtype=float16)
  """

  name = 'float16'
  cast_dtype = 'float16'

  def data_format(self, length):
    """See base class."""
    return 'float16', length

  def _encode(self, values, payload):
    with np.errstate(over='ignore'):  # The result, inf, says it.
      np.copyto(payload.data, values, casting='unsafe')

  def _decode(self, payload, out):
    np.copyto(out, payload.data, casting='unsafe')
