"""The upper half of a float32."""

from __future__ import annotations

from tf_strategies.collectives import codec


class BFloat16(codec.Cast):
  """The range of float32 with 8 bits of precision.

  NumPy knows the dtype once `ml_dtypes` is loaded; TensorFlow loads it.
  """

  name = cast_dtype = 'bfloat16'
