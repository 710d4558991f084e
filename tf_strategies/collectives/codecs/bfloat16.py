"""The upper half of a float32."""

from __future__ import annotations

import numpy as np

from tf_strategies.collectives import codec


class BFloat16(codec.Codec):
  """The range of float32 with 8 bits of precision.

  Rounds to nearest, ties to even; infinities stay, a NaN becomes the quiet NaN
  of its sign. A float64 is rounded to float32 first. NumPy knows the dtype once
  `ml_dtypes` is loaded, as it is with TensorFlow.

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
    with np.errstate(over='ignore', invalid='ignore'):
      np.copyto(payload.data.view('bfloat16'), values, casting='unsafe')

  def _decode(self, payload, out):
    with np.errstate(invalid='ignore'):
      np.copyto(out, payload.data.view('bfloat16'), casting='unsafe')
