"""The examples in docstrings run, and the package does not import TensorFlow."""

from absl.testing import absltest, parameterized

from tests import docstrings
from tf_strategies import doctor

_MODULES = docstrings.modules_of(doctor)


class DocumentationTest(parameterized.TestCase):
  @parameterized.parameters(
    'tf_strategies.doctor',
    'tf_strategies.doctor.findings',
  )
  def test_examples_run(self, name):
    docstrings.assert_examples(self, name)

  def test_public_names_exist_and_are_documented(self):
    docstrings.assert_public_names(self, doctor)

  def test_no_import_loads_tensorflow(self):
    docstrings.assert_imports_load_none(self, _MODULES, ['tensorflow', 'keras'])


if __name__ == '__main__':
  absltest.main()
