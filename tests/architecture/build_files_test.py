"""BUILD files equal those that `make build_files` generates from the imports."""

import pathlib

import pytest
from absl.testing import absltest

from tests.architecture import project
from tools import generate_build_files

pytestmark = pytest.mark.smoke

# The files of a small project, and the expected deps of its targets.
_SOURCES = {
  'tools/__init__.py': 'from tools import b',
  'tools/a.py': 'import numpy as np\nfrom tools.b import thing',
  'tools/b.py': 'import os\nimport torch',
  'tools/c/d.py': 'from .. import a\nfrom importlib import import_module\n'
  "import_module('tools.b')\nif __name__ == '__main__':\n  pass",
  'tools/a_test.py': 'def f():\n  from tools.c import d\n  from . import a',
}
_TARGETS = {
  ('py_library', 'tools', (':b',)),
  ('py_library', 'a', (':b', '@pypi//numpy')),
  ('py_library', 'b', ()),
  ('py_binary', 'd', ('//tools:a', '//tools:b')),
  ('py_test', 'a_test', (':a', '//tools/c:d')),
}


class BuildFilesTest(absltest.TestCase):
  def test_build_files_are_up_to_date(self):
    files = project.text_files()
    found = generate_build_files.Project(project.root())
    expected = generate_build_files.build_files(found)
    self.assertIn('tf_strategies/data/BUILD', expected)
    stale = [path for path, text in expected.items() if files.get(path) != text]
    self.assertEmpty(stale, 'Run `make build_files`.')
    self.assertEmpty(found.unresolved)

  def test_deps_are_derived_from_imports(self):
    root = pathlib.Path(self.create_tempdir())
    for path, text in _SOURCES.items():
      (root / path).parent.mkdir(parents=True, exist_ok=True)
      (root / path).write_text(text, encoding='utf-8')
    found = generate_build_files.Project(root)
    targets = {
      (target.kind, target.name, target.deps)
      for package in found.packages()
      for target in found.targets(package)
    }
    self.assertEqual(targets, _TARGETS)
    self.assertEmpty(found.unresolved)
    (root / 'tools/b.py').write_text('import tools.nowhere, no_such_module')
    found = generate_build_files.Project(root)
    found.targets(pathlib.Path('tools'))
    self.assertLen(found.unresolved, 2)


if __name__ == '__main__':
  absltest.main()
