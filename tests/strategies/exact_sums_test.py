"""Integer sums of floats give the same bits for any order of the terms."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tf_strategies import errors
from tf_strategies.strategies.mirrored import exact_sums


def _sum(terms):
  terms = list(map(tf.constant, terms))
  largest = tf.reduce_max(tf.stack(list(map(exact_sums.magnitude, terms))))
  scale = exact_sums.scale_of(largest)
  total = sum(exact_sums.encode(t, scale) for t in terms)
  return exact_sums.decode(total, scale, terms[0].dtype).numpy()


class ExactSumsTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.product(
    name=('float32', 'float64', 'bfloat16', 'float16'),
    largest=(1e-42, 1.0, 3e4),
    count=(3, 128),
  )
  def test_any_order(self, name, largest, count):
    rng = np.random.default_rng(count)
    dtype = tf.as_dtype(name).as_numpy_dtype
    magnitudes = largest * 10.0 ** rng.integers(-9, 1, (count, 1000))
    terms = (rng.uniform(-1, 1, (count, 1000)) * magnitudes).astype(dtype)
    found = _sum(terms)
    self.assertEqual(found.dtype, dtype)
    for _ in range(3):
      rng.shuffle(terms)
      self.assertEqual(_sum(terms).tobytes(), found.tobytes())
    with np.errstate(over='ignore'):  # float16 may overflow.
      want = terms.astype('f8').sum(0).astype(dtype).astype('f8')
    rounding = {'float32': 2.0**-23, 'float64': 2.0**-45}.get(name, 2.0**-7)
    largest = np.abs(terms.astype('f8')).max() * count * 2.0**-55
    np.testing.assert_allclose(
      found.astype('f8'), want, rounding, largest + 2.0**-125
    )

  def test_terms_that_cancel(self):
    terms = np.float32([[1e8], [1.25], [-1e8]])
    self.assertEqual(_sum(terms), 1.25)

  def test_largest_terms(self):
    largest = np.finfo('f4').max
    self.assertEqual(_sum(np.float32([[largest], [-largest]])), 0)
    self.assertEqual(_sum(np.full([128, 1], largest)), np.inf)

  @parameterized.parameters(np.inf, -np.inf, np.nan)
  def test_not_finite(self, special):
    for terms in ([[special, 1], [2, 3]], [[2, 3], [1, special]]):
      found = _sum(np.float32(terms))
      self.assertAllEqual(np.isnan(found), [True, True])

  def test_minus_zero_and_nothing(self):
    zeros = np.float32([[-0.0], [-0.0]])
    self.assertEqual(_sum(zeros).tobytes(), np.float32([0]).tobytes())
    self.assertEmpty(_sum(np.zeros([2, 0], 'f4')))

  def test_other_dtypes(self):
    self.assertEqual(_sum(np.int32([[1], [2]])), 3)
    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'complex64'):
      _sum(np.complex64([[1]]))


if __name__ == '__main__':
  tf.test.main()
