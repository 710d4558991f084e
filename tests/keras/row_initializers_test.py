"""Initial rows come from splitmix64 and have the distributions of Keras."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tf_strategies import errors
from tf_strategies.keras.tables import dynamic_embedding

virtual_devices.configure()

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_IDS = np.array([0, 1, -1, 2**62, -(2**63), 2**63 - 1])


def _mix(x):
  z = (x + _GOLDEN) & _MASK
  z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
  z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
  return z ^ (z >> 31)


def _uniform(i, seed, column):
  state = (_mix(int(i) & _MASK) ^ _mix(seed)) + column * _GOLDEN
  return ((_mix(state & _MASK) >> 41) + 0.5) * 2.0**-23


def _rows(initializer, ids, seed=7, width=3):
  initializer = keras.initializers.get(initializer)
  make = dynamic_embedding.initial_rows(initializer, seed, width)
  return make(tf.constant(ids, tf.int64)).numpy()


class RowInitializersTest(tf.test.TestCase, parameterized.TestCase):
  def test_hash_decides_the_owner(self):
    expected = [_mix(int(i) & _MASK) for i in _IDS]
    # The published first number of the generator with seed 0.
    self.assertEqual(expected[0], 0xE220A8397B1DCDAF)
    ids = tf.constant(_IDS, tf.int64)
    found = dynamic_embedding.mix(ids)
    self.assertAllEqual(found, np.array(expected, np.uint64))
    owners = dynamic_embedding.owner(ids, 3)
    self.assertAllEqual(owners, [(hashed >> 33) % 3 for hashed in expected])

  def test_numbers_follow_from_seed_id_and_column(self):
    uniform = keras.initializers.RandomUniform(0.0, 1.0)
    expected = [[_uniform(i, 7, j) for j in range(3)] for i in _IDS]
    self.assertAllClose(_rows(uniform, _IDS), expected, 0, 1e-7)
    self.assertAllEqual(_rows(uniform, _IDS[::-1])[::-1], _rows(uniform, _IDS))
    self.assertNotAllClose(_rows(uniform, _IDS, seed=8), expected)

  @parameterized.named_parameters(
    ('normal', keras.initializers.RandomNormal(1.0, 0.2), 1.0, 0.2, None),
    (
      'truncated',
      keras.initializers.TruncatedNormal(1.0, 0.2),
      1.0,
      # Standard deviation of a normal distribution truncated at two.
      0.2 * 0.8796,
      0.4,
    ),
  )
  def test_distribution(self, initializer, mean, deviation, most):
    rows = _rows(initializer, np.arange(20_000), width=5)
    self.assertAllClose(
      rows.mean(0), np.full([5], mean), 0, 4 * deviation / 141
    )
    self.assertAllClose(rows.std(0), np.full([5], deviation), 0.03, 0)
    correlations = np.corrcoef(np.concatenate([rows[1:], rows[:-1]], 1).T)
    self.assertAllClose(correlations, np.eye(10), 0, 0.04)
    self.assertAllInRange(abs(rows - mean), 0, most or 6 * deviation)

  def test_constants(self):
    for initializer, value in (
      ('zeros', 0.0),
      ('ones', 1.0),
      (keras.initializers.Constant(0.5), 0.5),
    ):
      self.assertAllEqual(_rows(initializer, _IDS), np.full([6, 3], value))

  def test_function(self):
    double = dynamic_embedding.initial_rows(
      lambda ids: tf.cast(ids[:, None] * [2, 3], tf.float32), 0, 2
    )
    self.assertAllEqual(double(tf.constant([5])), [[10.0, 15.0]])
    narrow = dynamic_embedding.initial_rows(lambda ids: ids, 0, 2)
    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'one row'):
      narrow(tf.constant([5]))


if __name__ == '__main__':
  tf.test.main()
