"""Codecs: bits, rounding, special values, what stays as it is."""

import math
import warnings

import hypothesis
import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tf_strategies import errors
from tf_strategies.collectives import (
  BFloat16Compression,
  Float16Compression,
  NoCompression,
  by_name,
)

CODECS = (NoCompression(), Float16Compression(), BFloat16Compression())


def round_trip(codec, array):
  return codec.decompress(*codec.compress(array))


def from_bits(*bits):
  return np.array(bits, np.uint32).view(np.float32)


def nearest_bfloat16(value):
  """Round to nearest, ties to even, by the definition: in exact arithmetic."""
  if value == 0 or not math.isfinite(value):
    return value
  exponent = max(math.frexp(value)[1] - 8, -133)  # Of the last kept bit.
  rounded = math.ldexp(round(math.ldexp(value, -exponent)), exponent)
  return math.copysign(math.inf, value) if abs(rounded) >= 2.0**128 else rounded


class BFloat16Test(parameterized.TestCase):
  @parameterized.named_parameters(
    ('one', 0x3F800000, 0x3F80),
    ('below_half', 0x3F807FFF, 0x3F80),
    ('tie_to_even_down', 0x3F808000, 0x3F80),
    ('tie_to_even_up', 0x3F818000, 0x3F82),
    ('above_half', 0x3F808001, 0x3F81),
    ('carry_into_exponent', 0x3FFF8000, 0x4000),
    ('negative', 0xBF818000, 0xBF82),
    ('minus_zero', 0x80000000, 0x8000),
    ('subnormal', 0x00018000, 0x0002),
    ('largest_rounds_to_inf', 0x7F7FFFFF, 0x7F80),
    ('largest_that_stays', 0x7F7F7FFF, 0x7F7F),
    ('inf', 0x7F800000, 0x7F80),
    ('minus_inf', 0xFF800000, 0xFF80),
    ('nan', 0x7FC00000, 0x7FC0),
    ('nan_of_low_bits_only', 0x7F800001, 0x7FC0),
    ('nan_of_all_bits', 0x7FFFFFFF, 0x7FFF),
    ('negative_nan_of_all_bits', 0xFFFFFFFF, 0xFFFF),
  )
  def test_bits(self, bits, expected):
    wire, _ = BFloat16Compression().compress(from_bits(bits))
    self.assertEqual(wire.dtype, np.uint16)
    self.assertEqual(hex(wire.item()), hex(expected))

  @hypothesis.settings(deadline=None)
  @hypothesis.given(st.lists(st.floats(width=32), max_size=20))
  def test_rounds_to_nearest_even(self, values):
    actual = round_trip(BFloat16Compression(), np.array(values, np.float32))
    expected = [nearest_bfloat16(value) for value in values]
    np.testing.assert_array_equal(actual, np.array(expected, np.float32))

  def test_every_bfloat16_survives(self):
    every = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    decoded = BFloat16Compression().decompress(every, np.dtype('float32'))
    again, _ = BFloat16Compression().compress(decoded)
    nan = np.isnan(decoded)
    np.testing.assert_array_equal(again[~nan], every[~nan])
    # A signalling NaN comes back quiet, but a NaN.
    np.testing.assert_array_equal(again[nan], every[nan] | 0x40)

  def test_agrees_with_ml_dtypes(self):
    try:
      import ml_dtypes  # Comes with TensorFlow, but is no dependency here.
    except ImportError:
      self.skipTest('ml_dtypes is not installed')
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 100_000, np.uint64).astype(np.uint32)
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    wire, _ = BFloat16Compression().compress(values)
    expected = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(wire, expected)


class EveryCodecTest(parameterized.TestCase):
  @parameterized.product(
    codec=CODECS,
    dtype=('float16', 'float32', 'float64', 'int32', 'bool', 'complex64'),
    shape=((), (0,), (3,), (2, 0, 3), (2, 3)),
  )
  def test_keeps_shape_dtype_and_input(self, codec, dtype, shape):
    array = np.ones(shape, dtype)
    wire, ctx = codec.compress(array)
    self.assertEqual(wire.shape, shape)
    decoded = codec.decompress(wire, ctx)
    np.testing.assert_array_equal(decoded, np.ones(shape, dtype), strict=True)
    np.testing.assert_array_equal(array, np.ones(shape, dtype), strict=True)
    self.assertIsInstance(wire, np.ndarray)
    self.assertIsInstance(decoded, np.ndarray)

  @parameterized.parameters(*CODECS)
  def test_special_values(self, codec):
    special = np.float32([np.inf, -np.inf, np.nan, 0.0, -0.0])
    with warnings.catch_warnings():
      warnings.simplefilter('error')
      decoded = round_trip(codec, special)
      round_trip(codec, np.array(np.nan, np.float32))
    np.testing.assert_array_equal(decoded, special)
    np.testing.assert_array_equal(np.signbit(decoded), np.signbit(special))

  @parameterized.parameters(*CODECS)
  def test_is_idempotent(self, codec):
    values = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    once = round_trip(codec, values)
    np.testing.assert_array_equal(round_trip(codec, once), once)

  @parameterized.parameters(
    (Float16Compression(), 2.0**-11), (BFloat16Compression(), 2.0**-8)
  )
  def test_lossy_but_within_the_unit_of_rounding(self, codec, unit):
    values = np.random.default_rng(2).uniform(0.5, 2, 1000)
    for dtype in (np.float32, np.float64):
      array = values.astype(dtype)
      wire, _ = codec.compress(array)
      self.assertEqual(wire.itemsize, 2)
      decoded = round_trip(codec, array)
      self.assertTrue(np.any(decoded != array))
      self.assertLessEqual(np.max(np.abs(decoded / array - 1)), 1.01 * unit)

  @parameterized.parameters(Float16Compression(), BFloat16Compression())
  def test_overflow_is_infinite_without_a_warning(self, codec):
    with warnings.catch_warnings():
      warnings.simplefilter('error')
      decoded = round_trip(codec, np.array([1e300, -1e300]))
    np.testing.assert_array_equal(decoded, [np.inf, -np.inf])

  @parameterized.parameters(
    ('float16', 'float32'),
    ('float32', 'float32'),
    ('float64', 'float64'),
    ('int32', 'int32'),
  )
  def test_accumulator(self, dtype, expected):
    for codec in (Float16Compression(), BFloat16Compression()):
      self.assertEqual(codec.accumulator_dtype(np.dtype(dtype)), expected)
    self.assertEqual(NoCompression().accumulator_dtype(dtype), dtype)

  @parameterized.parameters('none', 'float16', 'bfloat16')
  def test_by_name(self, name):
    self.assertEqual(by_name(name).name, name)
    self.assertEqual(by_name(name).lossy, name != 'none')

  @parameterized.parameters('fp16', '', None, 16, (['none'],))
  def test_unknown_name(self, name):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, "'none', 'float16', 'bfloat16'"
    ) as caught:
      by_name(name)
    self.assertIn(repr(name), str(caught.exception))


if __name__ == '__main__':
  absltest.main()
