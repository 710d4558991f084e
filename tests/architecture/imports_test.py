"""Imports point down only, and only `_tf_internal` uses private TensorFlow names."""

import sys

import pytest
from absl.testing import absltest, parameterized

from tests.architecture import project

# From top to bottom. A directory may import itself and directories in lower
# layers, but no other directory in its own layer. There are no exceptions.
_LAYERS = (
  ('benchmarks',),
  ('examples',),
  ('fault_tolerance', 'launch'),
  ('strategies',),
  (
    'keras',
    'cross_device',
    'process_group',
    'monitoring',
    'checkpoint',
    'kubernetes',
  ),
  ('cluster', 'data'),
  ('collectives', 'spmd'),
)
# Directories of programs. They may import `tf_strategies` itself.
_PROGRAMS = ('benchmarks', 'examples')
_DEPTH = {name: depth for depth, names in enumerate(_LAYERS) for name in names}
# Base modules that every directory may import, and the modules of the package
# that each of them may import.
_BASE = {
  'errors': (),
  'option_checks': ('errors',),
  'version': (),
  '_requirements': ('errors',),
  '_tf_internal': ('errors', '_requirements', '_tf_internal'),
  '_keras_internal': (
    'errors',
    '_requirements',
    '_tf_internal',
    '_keras_internal',
  ),
  '_graph_errors': ('errors', '_tf_internal'),
}
# `tf_strategies/__init__.py` and the commands beside it.
_TOP_LEVEL = 'tf_strategies'
# These may import only the standard library and NumPy.
_PURE = frozenset({'collectives', 'errors', 'option_checks', 'version'})


def _directory(module: str) -> str | None:
  """Returns the directory of a dotted name, or None if it is not in the package."""
  top, _, rest = module.partition('.')
  if top in _PROGRAMS:
    return top
  if top != 'tf_strategies':
    return None
  name = rest.partition('.')[0]
  return name if name in _DEPTH or name in _BASE else _TOP_LEVEL


def _may_import(importer: str, imported: str) -> bool:
  if importer in _BASE:
    return imported in _BASE[importer]
  if imported in _BASE:
    return importer not in _PURE or imported in _PURE
  if importer == imported:
    return True
  if importer == _TOP_LEVEL:
    return imported not in _PROGRAMS
  if imported == _TOP_LEVEL:
    return importer in _PROGRAMS
  return _DEPTH[imported] > _DEPTH[importer]


def _violations(path: str, source: str) -> list[str]:
  """Returns a sentence for each import in a file that breaks a rule."""
  importer = _directory(project.module_name(path))
  found = []
  for item in project.imports(path, source):
    where = f'{path}:{item.line}: {importer} imports {item.full}'
    top = item.base.partition('.')[0]
    imported = _directory(item.full)
    if imported is not None:
      if not _may_import(importer, imported):
        found.append(f'{where}, which is not below it')
    elif top == 'tests':
      found.append(f'{where}: tests are not part of the package')
    elif importer in _PURE and top not in (*sys.stdlib_module_names, 'numpy'):
      found.append(f'{where}: only NumPy and the standard library are allowed')
    elif importer != '_tf_internal' and (
      f'{item.full}.'.startswith('tensorflow.python.')
    ):
      found.append(f'{where}: only _tf_internal may import it')
  return found


class ImportsTest(parameterized.TestCase):
  @pytest.mark.smoke
  def test_imports_point_down(self):
    files = project.python_files('tf_strategies', 'examples', 'benchmarks')
    self.assertIn('tf_strategies/errors.py', files)
    found = []
    for path, source in files.items():
      found += _violations(path, source)
    self.assertEmpty(found, '\n'.join(found))

  @pytest.mark.smoke
  def test_every_directory_has_a_layer(self):
    used = {
      path.split('/')[1]
      for path in project.python_files('tf_strategies')
      if path.count('/') > 1
    }
    self.assertEmpty(used - set(_DEPTH) - set(_BASE))

  @parameterized.named_parameters(
    (
      'upper_layer',
      'keras/a.py',
      'from tf_strategies.strategies import registry',
    ),
    ('same_layer', 'keras/a.py', 'import tf_strategies.cross_device.executor'),
    ('relative', 'data/a.py', 'from ..cluster import config'),
    ('inside_function', 'data/a.py', 'def f():\n  import tf_strategies.keras'),
    ('top_level_from_inside', 'keras/a.py', 'import tf_strategies as tfs'),
    ('example', '__init__.py', 'import examples'),
    ('errors_import', 'errors.py', 'from tf_strategies import version'),
    ('test', 'keras/a.py', 'from tests import virtual_devices'),
    ('private_module', 'keras/a.py', 'from tensorflow import python'),
    (
      'private_dynamic',
      'data/a.py',
      'import importlib\nimportlib.import_module("tensorflow.python.eager")',
    ),
    ('tensorflow', 'collectives/a.py', 'import tensorflow as tf'),
    ('internal', 'collectives/a.py', 'from tf_strategies import _tf_internal'),
  )
  def test_violation_is_reported(self, path, source):
    self.assertLen(_violations(f'tf_strategies/{path}', source), 1)


if __name__ == '__main__':
  absltest.main()
