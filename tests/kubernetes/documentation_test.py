"""The examples in docstrings run, and the package does not import TensorFlow."""

from absl.testing import absltest, parameterized

from tests import docstrings
from tf_strategies import kubernetes

_MODULES = docstrings.modules_of(kubernetes)


class DocumentationTest(parameterized.TestCase):
  @parameterized.parameters(*_MODULES)
  def test_examples_run(self, name):
    if not name.endswith('.__main__'):
      docstrings.assert_examples(self, name)

  def test_every_module_is_found(self):
    self.assertIn('tf_strategies.kubernetes.manifests', _MODULES)

  def test_public_names_exist_and_are_documented(self):
    docstrings.assert_public_names(self, kubernetes)

  def test_no_import_loads_tensorflow(self):
    docstrings.assert_imports_load_none(
      self, _MODULES, ['tensorflow', 'keras', 'yaml']
    )


if __name__ == '__main__':
  absltest.main()
