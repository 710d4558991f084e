"""Rules for all source files: docstrings, names, and paths that must not appear."""

import ast
import collections
import re

import pytest
from absl.testing import absltest

from tests.architecture import project

pytestmark = pytest.mark.smoke

# The patterns are written so that they do not match themselves.
_MACHINE_PATH = re.compile(r'(?<![\w.])/(?:work|root)/')
_OUTSIDE = re.compile(r'\.\./(?:shared)')


def _machine_paths(path: str, text: str) -> list[str]:
  patterns = [_MACHINE_PATH]
  if not path.startswith('.ci/'):
    patterns.append(_OUTSIDE)
  return [
    f'{path}:{number}: {line.strip()}'
    for number, line in enumerate(text.splitlines(), 1)
    if any(pattern.search(line) for pattern in patterns)
  ]


def _runs_as_script(source: str) -> bool:
  """Returns whether a `__main__` block calls some `main()` or `test_main()`."""
  for node in ast.parse(source).body:
    if not isinstance(node, ast.If):
      continue
    if ast.unparse(node.test) != "__name__ == '__main__'":
      continue
    for call in ast.walk(node):
      if isinstance(call, ast.Call):
        called = ast.unparse(call.func).rpartition('.')[2]
        if called in ('main', 'test_main'):
          return True
  return False


def _without_assertion(source: str) -> list[str]:
  """Returns the names of test methods without an assertion."""
  return [
    method.name
    for node in ast.parse(source).body
    if isinstance(node, ast.ClassDef) and node.name.endswith('Test')
    for method in node.body
    if isinstance(method, ast.FunctionDef)
    and method.name.startswith('test')
    and not any(map(_may_fail, ast.walk(method)))
  ]


def _may_fail(node: ast.AST) -> bool:
  if isinstance(node, ast.Call):
    called = ast.unparse(node.func).rpartition('.')[2]
    return called.startswith('assert') or called == 'fail'
  return isinstance(node, ast.Assert | ast.Raise)


class SourceFilesTest(absltest.TestCase):
  def test_no_file_contains_a_machine_path(self):
    found = []
    for path, text in project.text_files().items():
      found += _machine_paths(path, text)
    self.assertEmpty(found, '\n'.join(found))

  def test_modules_have_docstrings(self):
    missing = [
      path
      for path, text in project.python_files(
        'tf_strategies', 'examples', 'benchmarks', 'tools'
      ).items()
      if text.strip() and not ast.get_docstring(ast.parse(text))
    ]
    self.assertEmpty(missing)

  def test_public_packages_are_not_empty(self):
    empty = [
      path
      for path, text in project.python_files('tf_strategies').items()
      if not text.strip()
    ]
    self.assertEmpty(empty)

  def test_class_names_are_unique(self):
    found = collections.Counter(
      node.name
      for source in project.python_files('tf_strategies').values()
      for node in ast.walk(ast.parse(source))
      if isinstance(node, ast.ClassDef)
    )
    self.assertEqual([name for name, count in found.items() if count > 1], [])

  def test_every_test_file_runs_as_a_script(self):
    files = {
      path: text
      for path, text in project.python_files('tests').items()
      if path.endswith('_test.py')
    }
    self.assertIn('tests/architecture/source_files_test.py', files)
    lacking = [
      path for path, text in files.items() if not _runs_as_script(text)
    ]
    self.assertEmpty(lacking, "no __main__ block that calls a test's main()")

  def test_every_test_asserts(self):
    lacking = [
      f'{path}: {name}'
      for path, text in project.python_files('tests').items()
      for name in _without_assertion(text)
    ]
    self.assertEmpty(lacking, 'no assertion, and no helper called assert...')

  def test_all_test_classes_are_collected(self):
    # pytest collects only `*_test.py`. A test class in another file must be the
    # base of a test class in such a file, or it would not run.
    files = project.python_files('tests')
    collected = [text for path, text in files.items() if '_test.py' in path]
    stray = []
    for path, text in files.items():
      if path.endswith('_test.py'):
        continue
      names = {
        node.name
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name.endswith('Test')
      }
      for name in names:
        base = re.compile(rf'^class \w+\([^)]*\b{name}\b', re.MULTILINE)
        if not any(map(base.search, collected)):
          stray.append(f'{path}: {name}')
    self.assertEmpty(stray)


if __name__ == '__main__':
  absltest.main()
