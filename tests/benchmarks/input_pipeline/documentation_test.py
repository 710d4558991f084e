"""The examples in docstrings run, and public names are documented."""

import pkgutil

import tensorflow as tf
from absl.testing import parameterized

from benchmarks import input_pipeline
from tests import docstrings

_MODULES = sorted(
  info.name
  for info in pkgutil.walk_packages(
    input_pipeline.__path__, input_pipeline.__name__ + '.'
  )
  if not info.name.endswith('__main__')
)


class DocumentationTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(_MODULES)
  def test_examples_run(self, name):
    docstrings.assert_examples(self, name)

  def test_every_module_is_found(self):
    self.assertIn('benchmarks.input_pipeline.stages', _MODULES)
    self.assertIn('benchmarks.input_pipeline.child', _MODULES)

  def test_public_names(self):
    docstrings.assert_public_names(self, input_pipeline)


if __name__ == '__main__':
  tf.test.main()
