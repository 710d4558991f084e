"""Imports point down only, and only `_tf_internal` uses private TensorFlow names."""

import sys

import pytest
from absl.testing import absltest, parameterized

from tests.architecture import project

# From top to bottom. A directory may import itself and the directories of lower
# layers, but not others of its layer. There is no list of exceptions.
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
# Programs, which may use the package's public names.
_PROGRAMS = ('benchmarks', 'examples')
_DEPTH = {room: depth for depth, rooms in enumerate(_LAYERS) for room in rooms}
# Single files that every directory may import, and the files of ours that they
# import.
_GROUND = {
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
# `tf_strategies/__init__.py`, and the commands in the same directory.
_DOOR = 'tf_strategies'
_PURE = frozenset({'collectives', 'errors', 'option_checks', 'version'})


def _room(module: str) -> str | None:
  """Returns the directory of a dotted name, or None if it is not in the package."""
  top, _, rest = module.partition('.')
  if top in _PROGRAMS:
    return top
  if top != 'tf_strategies':
    return None
  name = rest.partition('.')[0]
  return name if name in _DEPTH or name in _GROUND else _DOOR


def _may_import(importer: str, imported: str) -> bool:
  if importer in _GROUND:
    return imported in _GROUND[importer]
  if imported in _GROUND:
    return importer not in _PURE or imported in _PURE
  if importer == imported:
    return True
  if importer == _DOOR:
    return imported not in _PROGRAMS
  if imported == _DOOR:
    return importer in _PROGRAMS
  return _DEPTH[imported] > _DEPTH[importer]


def _violations(path: str, source: str) -> list[str]:
  """Returns a sentence for each import in a file that breaks a rule."""
  importer = _room(project.module_name(path))
  found = []
  for item in project.imports(path, source):
    where = f'{path}:{item.line}: {importer} imports {item.full}'
    top = item.base.partition('.')[0]
    imported = _room(item.full)
    if imported is not None:
      if not _may_import(importer, imported):
        found.append(f'{where}, which is not below it')
    elif top == 'tests':
      found.append(f'{where}: tests are not part of the package')
    elif importer in _PURE and top not in (*sys.stdlib_module_names, 'numpy'):
      found.append(f'{where}: only NumPy and the standard library may be here')
    elif importer != '_tf_internal' and (
      f'{item.full}.'.startswith('tensorflow.python.')
    ):
      found.append(f'{where}: that is for _tf_internal alone')
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
  def test_every_room_has_a_layer(self):
    rooms = {
      path.split('/')[1]
      for path in project.python_files('tf_strategies')
      if path.count('/') > 1
    }
    self.assertEmpty(rooms - set(_DEPTH) - set(_GROUND))

  @parameterized.named_parameters(
    ('up', 'keras/a.py', 'from tf_strategies.strategies import registry'),
    ('beside', 'keras/a.py', 'import tf_strategies.cross_device.executor'),
    ('relative', 'data/a.py', 'from ..cluster import config'),
    ('inside_function', 'data/a.py', 'def f():\n  import tf_strategies.keras'),
    ('door_from_inside', 'keras/a.py', 'import tf_strategies as tfs'),
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
