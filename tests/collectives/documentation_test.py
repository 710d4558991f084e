"""The examples in docstrings run, and each file is a known algorithm."""

import importlib
import inspect
import pkgutil

from absl.testing import absltest, parameterized

from tests import docstrings
from tf_strategies import collectives
from tf_strategies.collectives import algorithms

MODULES = [
  (
    module.name.removeprefix('tf_strategies.collectives.'),
    importlib.import_module(module.name),
  )
  for module in pkgutil.walk_packages(
    collectives.__path__, f'{collectives.__name__}.'
  )
  if not module.ispkg
]


def public_callables(module):
  return [
    value
    for name, value in vars(module).items()
    if not name.startswith('_')
    and (inspect.isfunction(value) or inspect.isclass(value))
    and value.__module__ == module.__name__
  ]


class DocumentationTest(parameterized.TestCase):
  @parameterized.named_parameters(*MODULES)
  def test_examples_run(self, module):
    callables = public_callables(module)
    has_functions = any(inspect.isfunction(value) for value in callables)
    docstrings.assert_examples(self, module.__name__, least=has_functions)

  def test_example_of_the_package_runs(self):
    docstrings.assert_examples(self, collectives.__name__)

  def test_every_file_is_an_algorithm(self):
    prefix = 'algorithms.'
    self.assertCountEqual(
      algorithms.ALGORITHMS,
      [n.removeprefix(prefix) for n, _ in MODULES if prefix in n],
    )


if __name__ == '__main__':
  absltest.main()
