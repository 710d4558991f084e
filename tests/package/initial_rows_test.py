"""Rows of Keras's initial values, computed alone, equal rows of the whole variable."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import tf_case, virtual_devices
from tf_strategies import _keras_internal

virtual_devices.configure()

initializers = keras.initializers
# A shape whose rows do not start at a new counter of the random generator.
_SHAPE = (1001, 7)


def _initial_value(initializer, shape, dtype):
  """Returns the initial value that Keras passes to `tf.Variable`, and the whole
  value.
  """
  given = []

  def creator(next_creator, **kwargs):
    given.append(kwargs['initial_value'])
    return next_creator(**kwargs)

  with tf.variable_creator_scope(creator):
    variable = keras.Variable(initializer, shape=shape, dtype=dtype)
  return given[0], variable.numpy()


class _CustomInitializer(initializers.RandomUniform):
  def __call__(self, shape, dtype=None):
    return 1 + super().__call__(shape, dtype)


class InitialRowsTest(tf_case.TestCase):
  @parameterized.product(
    initializer=(
      initializers.Constant(0.25),
      initializers.RandomUniform(-1.0, 3.0, seed=5),
      initializers.RandomNormal(2.0, 3.0, seed=6),
      initializers.TruncatedNormal(-1.0, 0.5, seed=7),
      initializers.GlorotUniform(seed=8),
      initializers.RandomUniform(),
    ),
    dtype=('float32', 'bfloat16'),
    shape=(_SHAPE, (64,)),
  )
  def test_rows_equal_rows_of_the_whole_variable(
    self, initializer, dtype, shape
  ):
    value, whole = _initial_value(initializer, shape, dtype)
    make = _keras_internal.initial_rows(value, shape, tf.as_dtype(dtype))
    for first, rows in ((0, shape[0]), (0, 3), (1, 2), (5, 40), (62, 2)):
      found = make(rows, first)
      self.assertEqual(found.dtype, dtype)
      self.assertAllEqual(found, whole[first : first + rows])
    is_random = np.unique(np.float32(whole)).size > 1
    if is_random:  # Detects rows from a wrong position.
      self.assertNotAllEqual(make(2, 5), whole[6:8])

  @parameterized.named_parameters(
    ('whole', initializers.Orthogonal(seed=1)),
    ('custom', _CustomInitializer(seed=1)),
    (
      'generator',
      initializers.RandomUniform(seed=keras.random.SeedGenerator(1)),
    ),
    ('float64', initializers.RandomUniform(seed=1), 'float64'),
    ('values', initializers.Constant(np.arange(7.0))),
  )
  def test_unsupported_initializer_returns_none(
    self, initializer, dtype='float32'
  ):
    value, _ = _initial_value(initializer, _SHAPE, dtype)
    make = _keras_internal.initial_rows(value, _SHAPE, tf.as_dtype(dtype))
    self.assertIsNone(make)
    # An initial value that Keras did not create.
    make = _keras_internal.initial_rows(
      lambda: tf.zeros(_SHAPE), _SHAPE, tf.float32
    )
    self.assertIsNone(make)


if __name__ == '__main__':
  tf.test.main()
