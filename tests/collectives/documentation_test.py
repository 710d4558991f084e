"""The examples in docstrings run, and each file is a registered algorithm."""

import importlib
import inspect

from absl.testing import absltest, parameterized

from tests import docstrings
from tf_strategies import collectives
from tf_strategies.collectives import algorithms

_MODULES = docstrings.modules_of(collectives)


class DocumentationTest(parameterized.TestCase):
  @parameterized.parameters(*_MODULES)
  def test_examples_run(self, name):
    module = importlib.import_module(name)
    has_functions = any(
      inspect.isfunction(value) and value.__module__ == name
      for key, value in vars(module).items()
      if not key.startswith('_')
    )
    docstrings.assert_examples(self, name, least=has_functions)

  def test_every_file_is_an_algorithm(self):
    prefix = f'{algorithms.__name__}.'
    self.assertCountEqual(
      algorithms.ALGORITHMS,
      [n.removeprefix(prefix) for n in _MODULES if n.startswith(prefix)],
    )


if __name__ == '__main__':
  absltest.main()
