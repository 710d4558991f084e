"""Codecs: bits, rounding, special values, and arrays that stay unchanged."""

import warnings

import ml_dtypes  # noqa: F401
import numpy as np
from absl.testing import absltest, parameterized

from tests.collectives.simulator import encode, round_trip
from tf_strategies import errors
from tf_strategies.collectives import codecs

BFLOAT16, FLOAT16 = codecs.get('bfloat16'), codecs.get('float16')
CODECS = tuple(codecs.CODECS.values())


def from_bits(*bits):
  return np.array(bits, np.uint32).view(np.float32)


class BFloat16Test(parameterized.TestCase):
  @parameterized.named_parameters(
    ('one', 0x3F800000, 0x3F80),
    ('tie_to_even_down', 0x3F808000, 0x3F80),
    ('tie_to_even_up', 0x3F818000, 0x3F82),
    ('subnormal', 0x00018000, 0x0002),
    ('largest_rounds_to_inf', 0x7F7FFFFF, 0x7F80),
    ('nan_of_low_bits_only', 0x7F800001, 0x7FC0),
    ('negative_nan_of_all_bits', 0xFFFFFFFF, 0xFFC0),
  )
  def test_bits(self, bits, expected):
    wire = encode(BFLOAT16, from_bits(bits)).view(np.uint16)
    self.assertEqual(hex(wire.item()), hex(expected))


class EveryCodecTest(parameterized.TestCase):
  @parameterized.product(codec=CODECS, dtype=('float32', 'float64'))
  def test_ones_arrive_and_the_array_stays(self, codec, dtype):
    for length in (0, 1, 3, 1000):
      array = np.ones(length, dtype)
      decoded = round_trip(codec, array)
      np.testing.assert_allclose(decoded, np.ones(length, dtype), rtol=0.01)
      np.testing.assert_array_equal(array, np.ones(length, dtype))

  @parameterized.parameters(*CODECS)
  def test_what_is_not_finite_does_not_become_finite(self, codec):
    for odd in (np.inf, -np.inf, np.nan):
      values = np.ones(1000, np.float32)
      values[300] = odd
      with warnings.catch_warnings():
        warnings.simplefilter('error')
        decoded = round_trip(codec, values)
      self.assertFalse(np.isfinite(decoded[300]))
      self.assertTrue(np.isnan(decoded[300]) or not np.isnan(odd))

  @parameterized.parameters(*CODECS)
  def test_casts_keep_special_values_and_their_own_results(self, codec):
    special = np.float32([np.inf, -np.inf, np.nan, 0.0, -0.0])
    normal = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    for values in (special, round_trip(codec, normal)):
      decoded = round_trip(codec, values)
      np.testing.assert_array_equal(decoded, values)
      np.testing.assert_array_equal(np.signbit(decoded), np.signbit(values))

  @parameterized.parameters((FLOAT16, 2.0**-11), (BFLOAT16, 2.0**-8))
  def test_lossy_but_within_the_unit_of_rounding(self, codec, unit):
    self.assertEqual(codec.payload_bytes(1000), 2000)
    values = np.random.default_rng(2).uniform(0.5, 2, 1000)
    for dtype in (np.float32, np.float64):
      array = values.astype(dtype)
      decoded = round_trip(codec, array)
      self.assertTrue(np.any(decoded != array))
      self.assertLessEqual(np.max(np.abs(decoded / array - 1)), 1.01 * unit)

  @parameterized.parameters(FLOAT16, BFLOAT16)
  def test_overflow_is_infinite_without_a_warning(self, codec):
    with warnings.catch_warnings():
      warnings.simplefilter('error')
      decoded = round_trip(codec, np.array([1e300, -1e300]))
    np.testing.assert_array_equal(decoded, [np.inf, -np.inf])

  @parameterized.parameters(
    ('bfloat16', 'float32', 'bfloat16'),
    ('bfloat16', 'float16', 'float16'),
    ('none', 'float16', 'float16'),
    ('float16', 'int32', 'none'),
  )
  def test_what_an_array_travels_as(self, asked, dtype, used):
    self.assertEqual(codecs.for_array(asked, np.dtype(dtype)).name, used)

  def test_unknown_name(self):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, "'bfloat16', 'float16'.*'none'"
    ) as caught:
      codecs.get('fp16')
    self.assertIn("'fp16'", str(caught.exception))


if __name__ == '__main__':
  absltest.main()
