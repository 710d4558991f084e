"""Typed errors keep their type and message, even when traced code raises them."""

import ast
import pathlib

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


def _text(node):
  """Returns the text of an argument, with '0' for each value in it."""
  pieces = getattr(node, 'values', [node])
  return ''.join(
    p.value if isinstance(p, ast.Constant) else '0' for p in pieces
  )


def _parts():
  """Yields the place and the three texts of each call that combines them."""
  made = '.UnsupportedOptionError', '.ScopeError', 'option_checks.check'
  for path in pathlib.Path(errors.__file__).parent.rglob('*.py'):
    for node in ast.walk(ast.parse(path.read_text())):
      is_call = isinstance(node, ast.Call) and len(node.args) >= 3
      if is_call and ast.unparse(node.func).endswith(made):
        yield f'{path}:{node.lineno}', *map(_text, node.args[-3:])


class ErrorsTest(tf.test.TestCase, parameterized.TestCase):
  @pytest.mark.smoke
  def test_message_names_value_allowed_and_way_out(self):
    with self.assertRaises(errors.UnsupportedOptionError) as caught:
      _raise()
    self.assertEqual(
      str(caught.exception),
      "Expected red, got colour=7. Fix: write 'red'.",
    )

  def test_parts_fit_into_the_sentence(self):
    parts = list(_parts())
    self.assertGreater(len(parts), 150)
    for place, received, expected, fix in parts:
      with self.subTest(place):
        self.assertNotRegex(received, r'[,.;]$')
        self.assertNotRegex(expected, r'^(Expected|An?|The|One) |[,.;]$')
        self.assertNotRegex(fix, r'^[A-Z][a-z]|[,.;]$')

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
