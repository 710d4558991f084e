"""Checks that the documentation tests share."""

import doctest
import importlib
import inspect
import pkgutil
import types
from collections.abc import Iterable

from absl.testing import absltest

from benchmarks import processes

_OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
_DEADLINE_SECONDS = 120


def modules_of(package: types.ModuleType) -> list[str]:
  """Returns the names of a package and of all modules below it."""
  found = pkgutil.walk_packages(package.__path__, f'{package.__name__}.')
  return [package.__name__, *sorted(info.name for info in found)]


def assert_examples(test: absltest.TestCase, name: str, least: int = 1) -> None:
  """Runs the examples of a module and checks that there are at least `least`."""
  runner = doctest.DocTestRunner(optionflags=_OPTIONS)
  for example in _Finder().find(importlib.import_module(name)):
    runner.run(example)
  test.assertEqual(runner.failures, 0, name)
  test.assertGreaterEqual(runner.tries, least, name)


class _Finder(doctest.DocTestFinder):
  """Also finds examples of decorated functions."""

  def _from_module(self, module, value):
    return super()._from_module(module, inspect.unwrap(value))


def assert_imports_load_none(
  test: absltest.TestCase, modules: Iterable[str], unwanted: Iterable[str]
) -> None:
  """Imports modules in a new process and checks that none of `unwanted` is loaded."""
  code = f"""
import importlib, sys
for name in {list(modules)!r}:
  importlib.import_module(name)
print(sorted(set({list(unwanted)!r}) & set(sys.modules)))
"""
  done = processes.run_python(
    '-c', code, deadline_seconds=_DEADLINE_SECONDS, is_checked=True
  )
  test.assertEqual(done.stdout, '[]\n')
