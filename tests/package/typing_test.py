"""Type checkers find users' mistakes, and report nothing in a correct program."""

import importlib.util
import os
import pathlib
import re
import shutil
import unittest

from absl.testing import absltest

import tf_strategies
from benchmarks import processes

_HERE = pathlib.Path(__file__).parent
_PROGRAMS = ('user_program.py', 'mistaken_program.py')
_SITE = pathlib.Path(tf_strategies.__file__).parents[1]


def _marked(name: str) -> set[tuple[str, int]]:
  lines = (_HERE / name).read_text(encoding='utf-8').splitlines()
  return {(name, n) for n, line in enumerate(lines, 1) if '  # wrong' in line}


@unittest.skipUnless(importlib.util.find_spec('mypy'), 'no mypy')
class CheckersTest(absltest.TestCase):
  def test_mypy(self):
    """Checks that exactly the marked lines are reported."""
    directory = pathlib.Path(self.create_tempdir())
    for name in _PROGRAMS:
      shutil.copy(_HERE / name, directory)
    path = {'MYPYPATH': '' if 'site-packages' in str(_SITE) else str(_SITE)}
    done = processes.run_python(
      *('-m', 'mypy', '--strict', '--ignore-missing-imports'),
      *('--follow-imports=silent', '--cache-dir', os.devnull),
      *_PROGRAMS,
      cwd=directory,
      env=path,
    )
    found = re.findall(r'^(\w+\.py):(\d+): error:', done.stdout, re.MULTILINE)
    self.assertEmpty(_marked('user_program.py'))
    expected = _marked('mistaken_program.py')
    self.assertGreater(len(expected), 10)
    self.assertEqual({(a, int(b)) for a, b in found}, expected, done.stdout)


class SignaturesTest(absltest.TestCase):
  def test_package_contains_py_typed(self):
    package = pathlib.Path(tf_strategies.__file__).parent
    self.assertTrue((package / 'py.typed').is_file())


if __name__ == '__main__':
  absltest.main()
