"""IEEE half precision."""

from __future__ import annotations

from tf_strategies.collectives import codec


class Float16(codec.Cast):
  """11 bits of precision; values above 65504 become infinite.

  To send a mean, divide before the sum, or use bfloat16, which has float32's
  range.

  Example:

    >>> import numpy as np
    >>> payload = np.empty(4, np.uint8)
    >>> Float16().encode(np.float32([0.5, 1e6]), payload)
    >>> payload.view(np.float16)
    array([0.5, inf], dtype=float16)
  """

  name = cast_dtype = 'float16'
