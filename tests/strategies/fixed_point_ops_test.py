"""TensorFlow's side of reproducible sums does what the reference does, to the bit."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tf_strategies import errors
from tf_strategies.collectives import fixed_point
from tf_strategies.strategies.mirrored import fixed_point_ops


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
  def test_as_the_reference(self, dtype, length, count):
    for is_special, is_known in ((0, 1), (1, 1), (0, 0)):
      if not is_known and length > 1 << 18:
        continue  # All blocks of an unknown length have 256 values.
      terms = _terms(dtype, length, count, is_special)
      shared = np.maximum.reduce([fixed_point.exponents(t) for t in terms])
      total = sum(fixed_point.encode(t, shared, count) for t in terms)
      want = fixed_point.decode(total, shared, count, np.dtype(dtype))

      spec = tf.TensorSpec([length if is_known else None], dtype)

      @tf.function(input_signature=[[spec] * count])
      def add(terms):
        found = [fixed_point_ops.exponents(t) for t in terms]
        shared = found[0]
        for exponents in found[1:]:
          shared = tf.maximum(shared, exponents)
        # Some together, and the last one by itself.
        total = fixed_point_ops.encode(terms[-1:], shared, len(terms))
        if len(terms) > 1:
          total += fixed_point_ops.encode(terms[:-1], shared, len(terms))
        sums = fixed_point_ops.decode(total, shared, len(terms), terms[0].dtype)
        return shared, total, sums

      found = add([tf.constant(t) for t in terms])
      np.testing.assert_array_equal(found[0], shared)
      np.testing.assert_array_equal(found[1], total)
      np.testing.assert_array_equal(found[2], want)

  def test_dtypes(self):
    self.assertEqual(fixed_point_ops.exact_dtype(tf.bfloat16), tf.float32)
    self.assertEqual(fixed_point_ops.exact_dtype(tf.float64), tf.float64)
    self.assertEqual(fixed_point_ops.exact_dtype(tf.int64), tf.int64)
    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'complex64'):
      fixed_point_ops.exact_dtype(tf.complex64)


if __name__ == '__main__':
  tf.test.main()
