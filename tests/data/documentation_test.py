"""The examples in docstrings run, and public names are documented."""

import inspect
import pkgutil

import tensorflow as tf
from absl.testing import parameterized

from tests import docstrings
from tf_strategies import data as data_lib

_MODULES = sorted(
  info.name
  for info in pkgutil.walk_packages(data_lib.__path__, data_lib.__name__ + '.')
  if not info.name.endswith('__main__')
)


class DocumentationTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(_MODULES)
  def test_examples_run(self, name):
    least = 0 if name.endswith('.tfrecord') else 1
    docstrings.check_examples(self, name, least)

  def test_every_module_is_found(self):
    self.assertIn('tf_strategies.data.options', _MODULES)
    self.assertIn('tf_strategies.data.shuffle', _MODULES)


class PublicNamesTest(tf.test.TestCase):
  def test_all_names_exist_and_are_sorted(self):
    self.assertEqual(data_lib.__all__, sorted(data_lib.__all__))
    for name in data_lib.__all__:
      value = getattr(data_lib, name)
      self.assertFalse(inspect.ismodule(value), name)
      self.assertNotEmpty(value.__doc__, name)


if __name__ == '__main__':
  tf.test.main()
