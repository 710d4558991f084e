"""The examples in docstrings run, and public names are documented."""

import inspect

import tensorflow as tf
from absl.testing import parameterized

from tests import docstrings
from tf_strategies import data as data_lib

# Modules with public names.
_MODULES = ('arrays', 'files', 'options', 'pipeline')


class DocumentationTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(*_MODULES)
  def test_examples_run(self, name):
    docstrings.assert_examples(self, f'tf_strategies.data.{name}')


class PublicNamesTest(tf.test.TestCase):
  def test_all_names_exist_and_are_sorted(self):
    self.assertEqual(data_lib.__all__, sorted(data_lib.__all__))
    for name in data_lib.__all__:
      value = getattr(data_lib, name)
      self.assertFalse(inspect.ismodule(value), name)
      self.assertNotEmpty(value.__doc__, name)


if __name__ == '__main__':
  tf.test.main()
