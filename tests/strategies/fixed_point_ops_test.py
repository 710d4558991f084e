"""Reproducible sums: the same bits in any order, near the exact sum."""

import itertools

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tf_strategies import errors
from tf_strategies.collectives import fixed_point
from tf_strategies.strategies.mirrored import fixed_point_ops

_INF, _NAN = np.inf, np.nan


def _terms(dtype, length, count, is_special):
  """Terms of all magnitudes, also subnormal, zero and too large to add."""
  rng = np.random.default_rng(length + count)
  span = 44 if dtype == 'float32' else 300
  terms = []
  for _ in range(count):
    with np.errstate(over='ignore', under='ignore'):
      term = rng.normal(size=length) * 10.0 ** rng.integers(-span, 38, length)
      term = np.nan_to_num(term.astype(dtype))
    term[rng.integers(0, length)] = -0.0
    if is_special:
      places = rng.integers(0, length, 3)
      term[places] = rng.choice([np.inf, -np.inf, np.nan], 3)
    terms.append(term)
  return terms


def _add(terms, num_first=0):
  """Returns the sum of tensors, of which the first few are added up together."""
  count = len(terms)
  shared = fixed_point_ops.exponents(terms[0])
  for term in terms[1:]:
    shared = tf.maximum(shared, fixed_point_ops.exponents(term))
  total = fixed_point_ops.encode(terms[num_first:], shared, count)
  if num_first:
    total += fixed_point_ops.encode(terms[:num_first], shared, count)
  return fixed_point_ops.decode(total, shared, count, terms[0].dtype)


def _function(dtype, length, count, num_first):
  spec = tf.TensorSpec([length], dtype)
  return tf.function(
    lambda terms: _add(terms, num_first), input_signature=[[spec] * count]
  )


def _sum(*terms):
  return _add([tf.constant(t) for t in terms]).numpy()


class FixedPointOpsTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.named_parameters(
    ('one_value', 'float32', 1, 1),
    ('a_block', 'float32', 256, 3),
    ('blocks_and_some', 'float32', 1000, 8),
    ('compiled', 'float32', 1 << 14, 8),
    ('compiled_and_some', 'float32', 40001, 3),
    ('blocks_of_250', 'float32', 250 * 1250, 2),
    ('many_and_some', 'float32', (1 << 18) + 1, 2),
    ('double', 'float64', 1000, 8),
    ('double_compiled', 'float64', 40001, 3),
  )
  def test_same_bits_in_any_order_and_near_the_sum(self, dtype, length, count):
    for is_special in (False, True):
      terms = _terms(dtype, length, count, is_special)
      lengths = [length]
      if length < 1 << 18:  # All blocks of an unknown length have 256 values.
        lengths.append(None)
      found = {
        _function(dtype, known, count, num_first)(order).numpy().tobytes()
        for known in lengths
        for order in (terms, terms[::-1])
        for num_first in {0, count - 1}
      }
      self.assertLen(found, 1)
      if not is_special:
        self.assert_near(np.frombuffer(found.pop(), dtype), terms)

  def assert_near(self, found, terms):
    """Checks the bound that the documentation of the format states."""
    dtype, length = found.dtype, len(found)
    block = fixed_point.block_length(length)
    largest = np.abs(terms).max(0)
    starts = np.arange(0, length, block)
    largest = np.maximum.reduceat(largest, starts).repeat(block)[:length]
    bits = fixed_point.format_of(dtype).bits(len(terms))
    exact = np.sum(terms, 0, np.longdouble)
    is_finite = np.abs(exact) < np.finfo(dtype).max / 2
    allowed = len(terms) * (largest * np.longdouble(2) ** -bits)
    allowed += len(terms) * np.finfo(dtype).tiny
    allowed += 2 * np.abs(exact) * np.finfo(dtype).eps
    error = np.abs(found - exact)
    self.assertTrue(np.all(error[is_finite] <= allowed[is_finite]))

  def test_floats_themselves_are_not_the_same(self):
    terms = list(np.random.default_rng(0).normal(size=(4, 300)).astype('f4'))
    sums = {sum(p).tobytes() for p in itertools.permutations(terms)}
    self.assertGreater(len(sums), 1)

  @parameterized.parameters('float32', 'float64')
  def test_most_terms_of_the_largest_magnitude_do_not_overflow(self, dtype):
    below_2 = np.nextafter(np.asarray(2, dtype), np.asarray(0, dtype))
    for count in (1, 2, 3, 8, fixed_point.MAX_TERMS):
      for value in (below_2, -below_2):
        want = np.asarray(float(value) * count).astype(dtype)
        found = _sum(*[np.full(3, value)] * count)
        self.assertEqual(found.tolist(), [want.item()] * 3)

  @parameterized.named_parameters(
    ('nan', [1.0, _NAN], _NAN),
    ('infinity', [1.0, _INF], _INF),
    ('below', [-_INF, 1.0, -_INF], -_INF),
    ('both_infinities', [_INF, -_INF], _NAN),
    ('nan_and_infinity', [_NAN, _INF], _NAN),
    ('minus_zero', [-0.0, -0.0], 0.0),
    ('subnormal', [1e-40, 1e-40], 0.0),
    ('smallest', [2.0**-125, 2.0**-125], 2.0**-124),
    ('overflow', [3e38, 3e38], _INF),
    ('overflow_below', [-3e38, -3e38], -_INF),
    ('back_from_beyond', [3e38, 3e38, -3e38], 3e38),
    ('cancels', [1e8, 1.25, -1e8], 1.25),
    ('one', [1.1], 1.1),
  )
  def test_special_values(self, terms, want):
    found = _sum(*(np.float32([t]) for t in terms))
    np.testing.assert_array_equal(found, np.float32([want]))
    self.assertFalse(np.signbit(found[0]) and want == 0)

  def test_finite_values_beside_an_infinity_become_nan(self):
    first = np.zeros(300, 'f4')
    first[3] = _INF
    found = _sum(first, np.ones(300, 'f4'))
    self.assertEqual(found[3], _INF)
    self.assertTrue(np.isnan(found[[0, 255]]).all())
    # Not those of the next block.
    np.testing.assert_array_equal(found[256:], np.ones(44, 'f4'))

  def test_dtypes(self):
    self.assertEqual(fixed_point_ops.exact_dtype(tf.bfloat16), tf.float32)
    self.assertEqual(fixed_point_ops.exact_dtype(tf.float64), tf.float64)
    self.assertEqual(fixed_point_ops.exact_dtype(tf.int64), tf.int64)
    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'complex64'):
      fixed_point_ops.exact_dtype(tf.complex64)

  def test_too_many_terms(self):
    terms = [np.zeros(1, 'f4')] * (fixed_point.MAX_TERMS + 1)
    with self.assertRaisesRegex(errors.UnsupportedOptionError, '1 to 128'):
      _sum(*terms)


if __name__ == '__main__':
  tf.test.main()
