"""The int8 codec: error bounds, sizes, special blocks, tails, equal ranks."""

import warnings

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from tests.collectives import simulator
from tf_strategies.collectives.codecs import int8

INT8 = int8.Int8()
BLOCK = 256
# Around one block, and around the number of values encoded at once.
LENGTHS = (1, 2, 255, 256, 257, 511, 513, 5000, 2**16 - 1, 2**16, 2**16 + 300)


def noise(length, dtype='float32', rank=0):
  """Blocks whose largest values differ by powers of ten."""
  random = np.random.default_rng([length, rank])
  scales = 10.0 ** (np.arange(length) // BLOCK % 9 - 4)
  return (random.uniform(-1, 1, length) * scales).astype(dtype)


def round_trip(codec, values):
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    return simulator.round_trip(codec, values)


def assert_within_bound(codec, values):
  """Checks that each error is at most half a step, M / 254, of its own block."""
  decoded = round_trip(codec, values)
  for start in range(0, len(values), BLOCK):
    block = values[start : start + BLOCK].astype(np.float64)
    error = np.abs(decoded[start : start + BLOCK] - block)
    # And the result is rounded to float32, as is the M of float64.
    bound = np.max(np.abs(block)) / 254 * (1 + 2.0**-15) + 2.0**-149
    np.testing.assert_array_less(error, np.nextafter(bound, np.inf))


class _StepsTooSmall(int8.Int8):
  """Decodes as if there were 128 steps."""

  def decode(self, payload, out):
    super().decode(payload, out)
    out *= out.dtype.type(127 / 128)


class Int8Test(parameterized.TestCase):
  @parameterized.product(length=LENGTHS, dtype=('float32', 'float64'))
  def test_error_of_each_block_is_bounded(self, length, dtype):
    values = noise(length, dtype)
    assert_within_bound(INT8, values)
    # The largest value of a block is exact.
    decoded = round_trip(INT8, values.astype('float32'))
    np.testing.assert_array_equal(round_trip(INT8, decoded), decoded)
    for start in range(0, length, BLOCK):
      block = slice(start, start + BLOCK)
      largest = np.argmax(np.abs(values[block]))
      self.assertEqual(
        decoded[block][largest], np.float32(values[block][largest])
      )

  def test_a_mutant_exceeds_the_bound(self):
    with self.assertRaises(AssertionError):
      assert_within_bound(_StepsTooSmall(), noise(5000))

  def test_literal(self):
    values = np.float32([127, -127, 0, 1, 0.4, -2.6, 63.5, 64.5])
    scales, integers = int8.parts_of(simulator.encode(INT8, values), 8)
    expected = [127, -127, 0, 1, 0, -3, 64, 64]
    np.testing.assert_array_equal(scales, [127])
    np.testing.assert_array_equal(integers, expected)
    np.testing.assert_array_equal(round_trip(INT8, values), expected)

  @pytest.mark.smoke
  def test_may_be_cut_after_any_block(self):
    values = noise(5000)
    whole = round_trip(INT8, values)
    for cut in (BLOCK, 7 * BLOCK):
      parts = [round_trip(INT8, part) for part in np.split(values, [cut])]
      np.testing.assert_array_equal(np.concatenate(parts), whole)

  @parameterized.product(
    odd=(np.nan, np.inf, -np.inf), dtype=('float32', 'float64')
  )
  def test_what_is_not_finite_makes_its_block_nan(self, odd, dtype):
    for place in (0, 255, 256, 700, 769):
      values = noise(770, dtype)  # Three blocks and a tail of two.
      finite = round_trip(INT8, values)
      values[place] = odd
      decoded = round_trip(INT8, values)
      in_block = np.arange(770) // BLOCK == place // BLOCK
      self.assertTrue(np.isnan(decoded[in_block]).all())
      np.testing.assert_array_equal(decoded[~in_block], finite[~in_block])

  def test_float64_beyond_float32_is_nan_and_below_it_plus_zero(self):
    beyond = round_trip(INT8, np.float64([1e300, 1.0]))
    self.assertTrue(np.isnan(beyond).all())
    for small in (np.float64([1e-300, -1e-310]), np.float32([0.0, -0.0])):
      below = round_trip(INT8, small)
      np.testing.assert_array_equal(below, [0.0, 0.0])
      self.assertFalse(np.signbit(below).any())

  @parameterized.parameters('float32', 'float64')
  def test_subnormals_and_the_largest_floats(self, dtype):
    smallest = np.finfo(np.float32).smallest_subnormal
    units = np.array([1, -1, 0, 1, 300, -299, 12], dtype)
    values = (units * smallest).astype(dtype)
    assert_within_bound(INT8, values)
    self.assertTrue(np.any(round_trip(INT8, values)))
    top = np.finfo(np.float32).max
    extremes = np.array([top, -top, top / 2, 1], dtype)
    np.testing.assert_array_equal(
      round_trip(INT8, extremes)[[0, 1, 3]], np.array([top, -top, 0], dtype)
    )


if __name__ == '__main__':
  absltest.main()
