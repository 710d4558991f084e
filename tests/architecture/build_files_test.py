"""BUILD files name every Python file once, with the deps of its imports.

Independent of tools/generate_build_files.py, which writes them: the deps are
worked out again here, from what the BUILD files themselves say of who owns a
file and from the names in tools/requirements_lock.txt.
"""

import ast
import dataclasses
import graphlib
import sys

import pytest
from absl.testing import absltest

from tests.architecture import project

pytestmark = pytest.mark.smoke

# Where a distribution is not called as the module that it brings.
_DISTRIBUTIONS = {
  'absl': 'absl_py',
  'google': 'protobuf',
  'grpc': 'grpcio',
  'sklearn': 'scikit_learn',
}


@dataclasses.dataclass(frozen=True)
class _Target:
  kind: str
  sources: tuple[str, ...]
  deps: frozenset[str]


def _absolute(label: str, package: str) -> str:
  """`:a` and `//p/q` written in full, as `//p:a` and `//p/q:q`."""
  if label.startswith(':'):
    return f'//{package}{label}'
  if label.startswith('//') and ':' not in label:
    return f'{label}:{label.rpartition("/")[2]}'
  return label


def _targets(package: str, text: str) -> list[tuple[str, _Target]]:
  """The labelled py_* targets of a BUILD file, which parses as Python."""
  targets = []
  for statement in ast.parse(text).body:
    call = getattr(statement, 'value', None)
    if not isinstance(call, ast.Call) or not call.func.id.startswith('py_'):
      continue
    given = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
    target = _Target(
      kind=call.func.id,
      sources=tuple(f'{package}/{source}' for source in given['srcs']),
      deps=frozenset(_absolute(d, package) for d in given.get('deps', ())),
    )
    targets.append((f'//{package}:{given["name"]}', target))
  return targets


def _loaded(text: str) -> set[str]:
  return {
    statement.value.args[1].value
    for statement in ast.parse(text).body
    if isinstance(statement, ast.Expr)
    and isinstance(statement.value, ast.Call)
    and statement.value.func.id == 'load'
  }


def _module_labels(owners: dict[str, str]) -> dict[str, str]:
  return {project.module_name(path): owner for path, owner in owners.items()}


def _expected_deps(
  path: str, source: str, owners: dict[str, str], locked: set[str]
) -> set[str]:
  modules = _module_labels(owners)
  deps = set()
  for item in project.imports(path, source):
    top = item.base.partition('.')[0]
    label = modules.get(item.full) or modules.get(item.base)
    if label is not None:
      deps.add(label)
    elif top in project.PYTHON_ROOTS:
      deps.add(f'no file of the project is {item.base}')
    elif top not in sys.stdlib_module_names:
      name = _DISTRIBUTIONS.get(top, top)
      # What the lock does not pin is optional where it is imported.
      if name in locked:
        deps.add(f'@pypi//{name}')
  return deps - {owners[path]}


def _problems(
  builds: dict[str, str], sources: dict[str, str], locked: set[str]
) -> list[str]:
  """What is wrong with the BUILD texts (by package), a sentence each."""
  found = []
  targets = {}
  owners = {}
  for package, text in builds.items():
    for label, target in _targets(package, text):
      if label in targets:
        found.append(f'{label} is defined twice')
      targets[label] = target
      if target.kind not in _loaded(text):
        found.append(f'//{package} does not load {target.kind}')
      for source in target.sources:
        if source not in sources:
          found.append(f'{label}: {source} does not exist')
        elif source in owners:
          found.append(f'{source} is in {owners[source]} and in {label}')
        owners[source] = label
      is_test = label.endswith('_test')
      if is_test != (target.kind == 'py_test'):
        found.append(f'{label} is a {target.kind}')
  for path in sources:
    if path not in owners:
      found.append(f'{path} is in no target')
  for label, target in targets.items():
    expected = set()
    for path in target.sources:
      if path in sources:
        expected |= _expected_deps(path, sources[path], owners, locked)
    for missing in sorted(expected - target.deps):
      found.append(f'{label} lacks {missing}')
    for surplus in sorted(target.deps - expected):
      found.append(f'{label} does not import {surplus}')
  try:
    order = graphlib.TopologicalSorter({k: v.deps for k, v in targets.items()})
    order.prepare()
  except graphlib.CycleError as e:
    found.append(f'deps form a cycle: {" -> ".join(e.args[1])}')
  return found


def _locked(text: str) -> set[str]:
  return {
    line.partition('==')[0].replace('-', '_')
    for line in text.splitlines()
    if '==' in line
  }


_SOURCES = {
  'p/__init__.py': 'from p import b',
  'p/a.py': 'import numpy as np\nfrom p.b import thing',
  'p/b.py': 'import os\nimport not_in_the_lock',
  'p/a_test.py': 'def f():\n  from . import a',
}
_BUILD = """
load("@rules_python//python:py_library.bzl", "py_library")
load("@rules_python//python:py_test.bzl", "py_test")

py_library(
    name = "p",
    srcs = ["__init__.py"],
    deps = [":b"],
)

py_library(
    name = "a",
    srcs = ["a.py"],
    deps = [
        ":b",
        "@pypi//numpy",
    ],
)

py_library(
    name = "b",
    srcs = ["b.py"],
)

py_test(
    name = "a_test",
    srcs = ["a_test.py"],
    deps = [":a"],
)
"""
_LOCKED = {'numpy', 'keras'}


class BuildFilesTest(absltest.TestCase):
  def test_build_files_agree_with_the_imports(self):
    files = project.text_files()
    sources = project.python_files(*project.PYTHON_ROOTS)
    builds = {
      path.removesuffix('/BUILD'): text
      for path, text in files.items()
      if path.endswith('/BUILD')
    }
    self.assertIn('tf_strategies', builds)
    locked = _locked(files['tools/requirements_lock.txt'])
    self.assertIn('numpy', locked)
    found = _problems(builds, sources, locked)
    self.assertEmpty(found, '\n'.join([*found, 'Run `make build_files`.']))

  def test_right_build_file_has_no_problems(self):
    self.assertEmpty(_problems({'p': _BUILD}, _SOURCES, _LOCKED))

  def test_altered_build_file_is_reported(self):
    library = '\n\npy_library(\n    name = "{}",\n    srcs = ["b.py"],\n)\n'
    alterations = {
      '//p:a lacks //p:b': ('        ":b",\n', ''),
      '//p:a lacks @pypi//numpy': ('        "@pypi//numpy",\n', ''),
      '//p:a does not import @pypi//keras': (
        'numpy",',
        'numpy",\n"@pypi//keras",',
      ),
      '//p:a_test does not import //p:b': ('[":a"]', '[":a", ":b"]'),
      'p/b.py is in no target': (library.format('b'), ''),
      'p/b.py is in //p:b and in //p:c': (
        '\n\npy_test',
        library.format('c') + '\n\npy_test',
      ),
      '//p:b: p/c.py does not exist': ('"b.py"', '"b.py", "c.py"'),
      '//p:a_test is a py_library': ('py_test(', 'py_library('),
      '//p does not load py_test': (', "py_test")', ', "py_binary")'),
      'deps form a cycle': ('"b.py"],', '"b.py"], deps = [":a"],'),
    }
    for problem, (old, new) in alterations.items():
      with self.subTest(problem):
        altered = _BUILD.replace(old, new)
        self.assertNotEqual(altered, _BUILD)
        found = _problems({'p': altered}, _SOURCES, _LOCKED)
        self.assertIn(problem, '\n'.join(found))

  def test_import_that_no_file_answers_is_reported(self):
    sources = {**_SOURCES, 'p/b.py': 'from tf_strategies.nowhere import x'}
    found = _problems({'p': _BUILD}, sources, _LOCKED)
    self.assertIn('no file of the project is tf_strategies.nowhere', found[0])


if __name__ == '__main__':
  absltest.main()
