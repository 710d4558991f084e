"""Typed errors keep their type and message, even when traced code raises them."""

import pickle

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import tf_case
from tf_strategies import _graph_errors, errors

_TYPES = [
  t
  for t in vars(errors).values()
  if isinstance(t, type) and issubclass(t, errors.Error)
]


def _raise():
  raise errors.UnsupportedOptionError('colour=7', 'red', "write 'red'")


class ErrorsTest(tf_case.TestCase):
  @pytest.mark.smoke
  def test_message_contains_expected_value_and_fix(self):
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
  def test_every_type_takes_one_message(self, error_type):
    self.assertEqual(str(error_type('why')), 'why')
    self.assertIs(error_type.__init__, Exception.__init__)

  def test_argument_errors_are_value_errors(self):
    for error_type in (
      errors.UnsupportedOptionError,
      errors.ScheduleError,
      errors.DataError,
      errors.CheckpointMismatchError,
      errors.ClusterConfigError,
    ):
      self.assertTrue(issubclass(error_type, ValueError), error_type)


_MESSAGE = """Graph execution error:

Detected at node a/Assert defined at (most recent call last):
  File "/home/me/train.py", line 3, in <module>

  File "/lib/python3/site-packages/keras/src/layers/layer.py", line 5, in __call__

  File "/home/me/model.py", line 7, in call

Detected at node a/Assert defined at (most recent call last):
  File "/home/me/train.py", line 3, in <module>

  File "/lib/python3/site-packages/tensorflow/python/ops/x.py", line 5, in f

  File "/home/me/model.py", line 7, in call

assertion failed: [

too much] [32]
\t [[{{node a/Assert}}]]
Additional GRPC error information from remote target /job:worker while calling x:
:UNKNOWN:Error received from peer  {grpc_message:"too much"} [Op:__inference_f]"""
_READABLE = """Graph execution error:

Detected at node a/Assert defined at (most recent call last):
  File "/home/me/train.py", line 3, in <module>
  File "/home/me/model.py", line 7, in call
assertion failed: [

too much] [32]
\t [[{{node a/Assert}}]]"""


class ReadableTest(parameterized.TestCase):
  def test_only_user_frames_are_kept(self):
    error = tf.errors.InvalidArgumentError(None, None, _MESSAGE)
    found = _graph_errors.readable(error)
    self.assertIs(type(found), tf.errors.InvalidArgumentError)
    self.assertEqual(found.message, _READABLE)
    self.assertEqual(found.error_code, tf.errors.INVALID_ARGUMENT)

  def test_readable_message_is_unchanged(self):
    once = _graph_errors.readable(tf.errors.AbortedError(None, None, _READABLE))
    self.assertEqual(once.message, _READABLE)


class ThroughGraphTest(parameterized.TestCase):
  @parameterized.parameters(
    errors.DataError('a\nb'),
    tf.errors.InvalidArgumentError(None, None, 'a\nb'),
    tf.errors.UnknownError(None, None, 'a'),
  )
  def test_type_and_message_survive_a_graph(self, error):
    def fail(x):
      try:
        raise error
      except Exception as e:
        _graph_errors.raise_through_graph(e)

    @tf.function
    def graph(x):
      return tf.numpy_function(fail, [x], tf.float32)

    with self.assertRaises(type(error)) as caught:
      graph(tf.constant(1.0))
    self.assertEqual(str(caught.exception), str(error))
    again = pickle.loads(pickle.dumps(caught.exception))
    self.assertIs(type(again), type(error))
    self.assertEqual(str(again), str(error))
    if isinstance(error, tf.errors.OpError):
      self.assertEqual(caught.exception.error_code, error.error_code)


if __name__ == '__main__':
  tf.test.main()
