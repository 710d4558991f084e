"""The examples in docstrings run, and commands start without TensorFlow."""

from absl.testing import absltest, parameterized

from tests import docstrings
from tf_strategies import monitoring

# Their examples are the usage of the command.
_COMMANDS = ('tf_strategies.monitoring.merge',)
# Names that `__init__` exports are documented where they are defined.
_UNDOCUMENTED = (monitoring.__name__, *_COMMANDS)


class DocumentationTest(parameterized.TestCase):
  @parameterized.parameters(*docstrings.modules_of(monitoring))
  def test_examples_run(self, name):
    docstrings.assert_examples(self, name, least=name not in _UNDOCUMENTED)

  def test_public_names_exist_and_are_documented(self):
    docstrings.assert_public_names(self, monitoring)

  def test_commands_load_no_tensorflow(self):
    docstrings.assert_imports_load_none(self, _COMMANDS, ['tensorflow'])


if __name__ == '__main__':
  absltest.main()
