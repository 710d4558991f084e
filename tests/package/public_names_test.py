"""The public names of the package, its examples, and the modules that they load."""

import ast
import functools
import importlib
import inspect
import itertools

import pytest
from absl.testing import absltest, parameterized

import tf_strategies as tfs
from tests import docstrings, tf_case, virtual_devices
from tests.architecture import project
from tf_strategies import _public, cluster, kubernetes, launch

virtual_devices.configure()

# Modules with a table of names. `errors` is not one: it contains only classes.
_TABLES = (
  *('_public', 'cluster', 'cross_device', 'data', 'keras'),
  *('launch', 'monitoring', 'process_group'),
)


@functools.cache
def _documented_constants() -> set[str]:
  """Returns the constants of all modules that are followed by a docstring."""
  found = set()
  for source in project.python_files('tf_strategies').values():
    for node, text in itertools.pairwise(ast.parse(source).body):
      if (
        isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
      ):
        targets = (
          node.targets if isinstance(node, ast.Assign) else [node.target]
        )
        found |= {ast.unparse(target) for target in targets}
  return found


def _undocumented_methods(cls: type) -> list[str]:
  """Returns our class's public methods and properties without a docstring."""
  return [
    f'{cls.__name__}.{name}'
    for base in cls.__mro__
    if base.__module__.startswith('tf_strategies')
    for name, member in vars(base).items()
    if not name.startswith('_')
    and (inspect.isfunction(member) or isinstance(member, property))
    and not inspect.getdoc(getattr(cls, name))
  ]


class PublicNamesTest(parameterized.TestCase):
  @pytest.mark.smoke
  def test_every_public_name_exists(self):
    for name in tfs.__all__:
      self.assertIsNotNone(getattr(tfs, name), name)
    self.assertContainsSubset(_public.__all__, tfs.__all__)
    self.assertSameElements(dir(tfs), tfs.__all__)
    values = [getattr(tfs, name) for name in tfs.__all__]
    for module in filter(inspect.ismodule, values):
      for name in dir(module):
        value = getattr(module, name)
        is_ours = getattr(value, '__module__', '').startswith('tf_strategies')
        self.assertTrue(name[0].isalpha() and is_ours, (module, name))

  @parameterized.parameters(*_TABLES)
  @pytest.mark.smoke
  def test_every_name_is_documented(self, room):
    module = importlib.import_module(f'tf_strategies.{room}')
    undocumented, constants = [], _documented_constants()
    for name in module.__all__:
      value = getattr(module, name)
      if inspect.isclass(value):
        undocumented += _undocumented_methods(value)
      is_code = callable(value) or inspect.ismodule(value)
      if not (inspect.getdoc(value) if is_code else name in constants):
        undocumented.append(name)
    self.assertEmpty(undocumented)

  def test_unknown_name_raises(self):
    with self.assertRaisesRegex(AttributeError, 'RingMiroredStrategy'):
      _ = tfs.RingMiroredStrategy


def _modules_with_examples():
  """Returns the modules whose docstrings have examples."""
  return [
    project.module_name(path)
    for path, source in project.python_files(
      'tf_strategies', 'examples'
    ).items()
    if '>>> ' in source and not path.startswith('tf_strategies/collectives')
  ]


class DocumentationTest(tf_case.TestCase):
  @parameterized.parameters(*_modules_with_examples())
  def test_examples_run(self, name):
    docstrings.assert_examples(self, name)

  def test_modules_with_examples_are_found(self):
    self.assertContainsSubset(
      (
        'examples.datasets.idx',
        'tf_strategies',
        'tf_strategies.launch.supervisor',
      ),
      _modules_with_examples(),
    )

  def test_commands_load_no_tensorflow(self):
    packages = (cluster, kubernetes, launch)
    modules = [
      name for each in packages for name in docstrings.modules_of(each)
    ]
    docstrings.assert_imports_load_none(
      self,
      ['tf_strategies._requirements', 'tf_strategies.process_group', *modules],
      ['tensorflow', 'keras', 'yaml'],
    )


if __name__ == '__main__':
  absltest.main()
