"""Arrays of all kinds, for tests that compare bits."""

import ml_dtypes
import numpy as np

DTYPES = (
  np.float32,
  np.float64,
  np.float16,
  ml_dtypes.bfloat16,
  np.int8,
  np.int16,
  np.int32,
  np.int64,
  np.uint8,
  np.uint16,
  np.uint32,
  np.uint64,
  np.bool_,
)


def random(dtype, shape, seed) -> np.ndarray:
  """Returns an array of random bits, NaNs included; a bool has only two values."""
  rng = np.random.default_rng(seed)
  if dtype == np.bool_:
    return rng.integers(0, 2, shape).astype(np.bool_)
  size = int(np.prod(shape)) * np.dtype(dtype).itemsize
  flat = rng.integers(0, 256, size, np.uint8)
  return flat.view(dtype).reshape(shape)


def assert_same_bits(test, sent, received) -> None:
  """Checks that two sequences have arrays of the same shapes, types and bits."""
  test.assertLen(received, len(sent))
  for a, b in zip(sent, received, strict=True):
    test.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
    test.assertEqual(a.tobytes(), b.tobytes(), a.dtype)
