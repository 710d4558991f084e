"""Typed errors keep their type and message, even when traced code raises them."""

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tf_strategies import errors

_TYPES = [
  t
  for t in vars(errors).values()
  if isinstance(t, type) and issubclass(t, errors.Error)
]


def _raise():
  raise errors.UnsupportedOptionError('colour=7', 'red', "write 'red'")


class ErrorsTest(tf.test.TestCase, parameterized.TestCase):
  @pytest.mark.smoke
  def test_message_names_value_allowed_and_way_out(self):
    with self.assertRaises(errors.UnsupportedOptionError) as caught:
      _raise()
    self.assertEqual(
      str(caught.exception),
      "Expected red, got colour=7. Fix: write 'red'.",
    )

  @pytest.mark.smoke
  def test_type_survives_autograph(self):
    @tf.function
    def traced(x):
      if x > 0:
        _raise()
      return x

    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'colour=7'):
      traced(tf.constant(1))

  def test_type_survives_keras(self):
    class Layer(keras.layers.Layer):
      def call(self, x):
        _raise()

    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'colour=7'):
      Layer()(tf.ones([1]))

  @parameterized.parameters(*[(t,) for t in _TYPES])
  def test_every_type_is_made_of_one_message(self, error_type):
    self.assertEqual(str(error_type('why')), 'why')
    self.assertIs(error_type.__init__, Exception.__init__)

  def test_bad_arguments_are_value_errors(self):
    for error_type in (
      errors.UnsupportedOptionError,
      errors.ScheduleError,
      errors.DataError,
      errors.CheckpointMismatchError,
      errors.ClusterConfigError,
    ):
      self.assertTrue(issubclass(error_type, ValueError), error_type)


if __name__ == '__main__':
  tf.test.main()
