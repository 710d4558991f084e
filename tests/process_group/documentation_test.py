"""The examples in docstrings run."""

from absl.testing import absltest, parameterized

from tests import docstrings

_MODULES = (
  'tf_strategies.process_group',
  'tf_strategies.process_group.buffers',
  'tf_strategies.process_group.options',
  'tf_strategies.process_group.plan',
  'tf_strategies.process_group.rendezvous.rendezvous',
)


class DocumentationTest(parameterized.TestCase):
  @parameterized.parameters(*[(name,) for name in _MODULES])
  def test_examples_run(self, name):
    docstrings.assert_examples(self, name)


if __name__ == '__main__':
  absltest.main()
