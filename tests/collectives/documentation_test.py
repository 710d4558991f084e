"""The examples in docstrings run, and each file is a known algorithm or codec."""

import ast
import importlib
import inspect
import pathlib
import pkgutil
import sys

import ml_dtypes  # noqa: F401
from absl.testing import absltest, parameterized

from tests import docstrings
from tf_strategies import collectives
from tf_strategies.collectives import algorithms, codecs

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

  def test_every_file_is_an_algorithm_or_a_codec(self):
    names = [name for name, _ in MODULES]
    for kind, registry in (
      ('algorithms', algorithms.ALGORITHMS),
      ('codecs', codecs.CODECS),
    ):
      prefix = f'{kind}.'
      self.assertCountEqual(
        registry, [n.removeprefix(prefix) for n in names if prefix in n]
      )
    for name, codec in codecs.CODECS.items():
      self.assertEqual(codec.name, name)


class ImportsTest(parameterized.TestCase):
  @parameterized.named_parameters(*MODULES)
  def test_only_numpy_checks_and_the_standard_library(self, module):
    tree = ast.parse(pathlib.Path(module.__file__).read_text('utf-8'))
    names = set()
    for node in ast.walk(tree):
      if isinstance(node, ast.Import):
        names |= {alias.name for alias in node.names}
      elif isinstance(node, ast.ImportFrom):
        self.assertEqual(node.level, 0, 'relative import')
        names |= {f'{node.module}.{alias.name}' for alias in node.names}
    for name in names:
      top = name.split('.')[0]
      if top == 'tf_strategies':
        is_ground = name.split('.')[1] in ('errors', 'option_checks')
        self.assertTrue(
          is_ground or name.startswith(collectives.__name__), name
        )
      else:
        self.assertTrue(top == 'numpy' or top in sys.stdlib_module_names, name)


if __name__ == '__main__':
  absltest.main()
