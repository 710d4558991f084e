"""The examples in docstrings run, and public names are documented."""

import pkgutil

import tensorflow as tf
from absl.testing import parameterized

from examples import datasets
from tests import docstrings

_MODULES = sorted(
  info.name
  for info in pkgutil.walk_packages(datasets.__path__, datasets.__name__ + '.')
  if not info.name.endswith('__main__')
)


class DocumentationTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(_MODULES)
  def test_examples_run(self, name):
    if name.endswith(('.sources', '.digits')):
      try:
        import sklearn  # noqa: F401
      except ImportError:
        self.skipTest('scikit-learn is not installed')
    docstrings.assert_examples(self, name)

  def test_every_module_is_found(self):
    self.assertIn('examples.datasets.idx', _MODULES)
    self.assertIn('examples.datasets.extract.shards', _MODULES)

  def test_public_names(self):
    docstrings.assert_public_names(self, datasets)


if __name__ == '__main__':
  tf.test.main()
