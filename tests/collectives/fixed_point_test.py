"""Sums of floats that do not depend on the order of their terms."""

import functools
import itertools
import math

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from tf_strategies import errors
from tf_strategies.collectives import fixed_point

_INF, _NAN = np.inf, np.nan


def _terms(dtype, **elements):
  """Lists of arrays of one length, of more than one block too."""
  width = 8 * np.dtype(dtype).itemsize
  return st.tuples(st.integers(1, 9), st.integers(0, 600)).flatmap(
    lambda shape: st_numpy.arrays(
      dtype,
      shape,
      elements=st.floats(width=width, **elements),
      fill=st.floats(width=width, **elements),
    )
  )


def _grouped(terms, groups, shared):
  """The sum whose terms are added up in groups first."""
  count = len(terms)
  partial = [
    functools.reduce(
      np.add, [fixed_point.encode(terms[i], shared, count) for i in group]
    )
    for group in groups
  ]
  total = functools.reduce(np.add, partial)
  return fixed_point.decode(total, shared, count, terms[0].dtype)


class AnyOrderTest(parameterized.TestCase):
  @parameterized.parameters('float32', 'float64')
  def test_same_bits_in_any_order_and_grouping(self, dtype):
    @hypothesis.given(terms=_terms(dtype), random=st.randoms())
    @hypothesis.settings(deadline=None, max_examples=40)
    def check(terms, random):
      want = fixed_point.add(list(terms))
      order = list(range(len(terms)))
      random.shuffle(order)
      again = fixed_point.add([terms[i] for i in order])
      self.assertEqual(want.tobytes(), again.tobytes())
      cuts = sorted(random.sample(range(1, len(order) + 1), 1) + [0])
      groups = [g for g in (order[: cuts[1]], order[cuts[1] :]) if g]
      shared = np.maximum.reduce([fixed_point.exponents(t) for t in terms])
      grouped = _grouped(terms, groups, shared)
      self.assertEqual(want.tobytes(), grouped.tobytes())

    check()

  @pytest.mark.smoke
  def test_floats_themselves_are_not_the_same(self):
    terms = list(np.random.default_rng(0).normal(size=(8, 300)).astype('f4'))
    sums = {sum(p).tobytes() for p in itertools.permutations(terms[:4])}
    self.assertGreater(len(sums), 1)

  @parameterized.parameters(('float32', 24), ('float64', 53))
  def test_error_is_bounded_by_the_largest_of_a_block(self, dtype, bits):
    @hypothesis.given(
      terms=_terms(
        dtype, allow_nan=False, min_value=-(2.0**90), max_value=2.0**90
      )
    )
    @hypothesis.settings(deadline=None, max_examples=40)
    def check(terms):
      count = len(terms)
      found = fixed_point.add(list(terms))
      kept = fixed_point.format_of(dtype).bits(count)
      for i, value in enumerate(found):
        exact = math.fsum(float(t[i]) for t in terms)
        start = i - i % fixed_point.BLOCK_LENGTH
        block = np.abs(terms[:, start : start + fixed_point.BLOCK_LENGTH])

        allowed = count * (float(block.max()) * 2.0**-kept)
        allowed += count * float(np.finfo(dtype).tiny)
        allowed += 2 * abs(exact) * 2.0**-bits
        self.assertLessEqual(abs(float(value) - exact), allowed)

    check()

  def test_better_than_floats_in_order_of_rank(self):
    rng = np.random.default_rng(1)
    terms = rng.normal(size=(16, 20000)) * 10.0 ** rng.uniform(-6, 0, 20000)
    terms = terms.astype('f4')
    exact = terms.astype('f8').sum(0)

    def error(found):
      return np.sqrt(np.mean((found - exact) ** 2))

    self.assertLess(error(fixed_point.add(list(terms))), error(sum(terms)))

  @parameterized.parameters('float32', 'float64')
  def test_most_terms_of_the_largest_magnitude_do_not_overflow(self, dtype):
    below_2 = np.nextafter(np.asarray(2, dtype), np.asarray(0, dtype))
    for count in (1, 2, 3, 7, 8, 127, fixed_point.MAX_TERMS):
      for value in (below_2, -below_2):
        found = fixed_point.add([np.full(3, value)] * count)
        want = np.asarray(float(value) * count).astype(dtype)
        self.assertEqual(found.tolist(), [want.item()] * 3)


class SpecialValuesTest(parameterized.TestCase):
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
  def test_sum(self, terms, want):
    found = fixed_point.add([np.float32([t]) for t in terms])
    np.testing.assert_array_equal(found, np.float32([want]))
    self.assertFalse(np.signbit(found[0]) and want == 0)

  def test_finite_values_beside_an_infinity_become_nan(self):
    first = np.zeros(300, 'f4')
    first[3] = _INF
    found = fixed_point.add([first, np.ones(300, 'f4')])
    self.assertEqual(found[3], _INF)
    self.assertTrue(np.isnan(found[[0, 255]]).all())
    # Not those of the next block.
    np.testing.assert_array_equal(found[256:], np.ones(44, 'f4'))

  @parameterized.parameters('float16', ml_dtypes.bfloat16)
  def test_halves_are_rounded_once(self, dtype):
    # In 16 bits 2048 + 1 is 2048, however often one is added.
    terms = [np.array([2048], dtype)] + 8 * [np.array([1], dtype)]
    found = fixed_point.add(terms)
    self.assertEqual(found.dtype, np.dtype(dtype))
    self.assertEqual(found[0], np.array(2056).astype(dtype))

  def test_nothing(self):
    self.assertEqual(fixed_point.add([np.zeros(0, 'f4')] * 3).shape, (0,))

  @parameterized.parameters('complex64', 'bool')
  def test_numbers_without_such_sums(self, dtype):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, dtype):
      fixed_point.add([np.zeros(1, dtype)])

  def test_too_many_terms(self):
    terms = [np.zeros(1, 'f4')] * (fixed_point.MAX_TERMS + 1)
    with self.assertRaisesRegex(errors.UnsupportedOptionError, '1 to 128'):
      fixed_point.add(terms)


if __name__ == '__main__':
  absltest.main()
