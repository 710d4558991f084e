import doctest
import importlib

from absl.testing import absltest, parameterized

_MODULES = (
  'tf_strategies.process_group',
  'tf_strategies.process_group.buffers',
  'tf_strategies.process_group.connection',
  'tf_strategies.process_group.options',
  'tf_strategies.process_group.plan',
  'tf_strategies.process_group.rendezvous',
  'tf_strategies.process_group.wire',
)


class DocumentationTest(parameterized.TestCase):
  @parameterized.parameters(*[(name,) for name in _MODULES])
  def test_examples_run(self, name):
    results = doctest.testmod(
      importlib.import_module(name),
      optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS,
    )
    self.assertGreater(results.attempted, 0)
    self.assertEqual(results.failed, 0)


if __name__ == '__main__':
  absltest.main()
