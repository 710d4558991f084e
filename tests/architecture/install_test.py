"""`make` on a bare machine: the right TensorFlow and Python, and clear failures."""

import os
import pathlib
import shutil
import sys
import sysconfig
import unittest

import pytest
from absl.testing import absltest, parameterized

from benchmarks import processes
from tests.architecture import project
from tf_strategies import version

pytestmark = pytest.mark.smoke

_NO_VENV = """#!/bin/bash
# A Python whose `venv` fails halfway, as it does without ensurepip.
for word in "$@"; do directory=$word; done
case "$*" in
  '-m venv'*) mkdir -p "$directory/bin"; touch "$directory/pyvenv.cfg"
    ln -s /bin/false "$directory/bin/python"; exit 1 ;;
  *'pip --'*) echo 'no such option: --python' >&2; exit 2 ;;
  *) exec {python} "$@" ;;
esac
"""
_OLD = """#!/bin/bash
if [[ $1 == --version ]]; then echo Python 3.9.1; exit; fi
exit 1
"""


@unittest.skipIf(shutil.which('make') is None, 'needs make')
class DefaultsTest(parameterized.TestCase):
  @parameterized.parameters(
    ('Linux', 'x86_64', '.venv-cpu-9.9'),
    ('Linux', 'aarch64', '.venv-tensorflow-9.9'),
    ('Darwin', 'arm64', '.venv-tensorflow-9.9'),
  )
  def test_default_package_has_a_wheel_for_the_platform(
    self, system, machine, venv
  ):
    directory = pathlib.Path(self.create_tempdir())
    _write(directory / 'uname', f'#!/bin/sh\necho {system} {machine}\n')
    unset = ('TF_PACKAGE', 'VENV', 'MAKEFLAGS', 'MAKELEVEL')
    path = f'{directory}:{os.environ["PATH"]}'
    done = processes.run(
      ['make', '-n', 'demo', 'TF_VERSION=9.9'],
      cwd=project.root(),
      env=processes.environment({'PATH': path}, unset),
      is_checked=True,
    )
    self.assertIn(f'tools/install.sh {venv} examples', done.stdout)


class InstallTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self._directory = pathlib.Path(self.create_tempdir())
    self._venv = self._directory / 'venv'

  def assert_fails(self, python, *words):
    """Checks that installing fails with a sentence that contains `words`, and
    cleans up.
    """
    path = self._directory / 'python'
    _write(path, python)
    script = project.root() / 'tools' / 'install.sh'
    done = processes.run(
      ['bash', str(script), str(self._venv), 'dev'],
      env=processes.environment(
        {'PYTHON': str(path), 'TF_PACKAGE': 'tensorflow-cpu'}
      ),
    )
    self.assertEqual(done.returncode, 1, done.stderr)
    for word in (str(path), *words):
      self.assertIn(word, done.stderr)
    self.assertFalse(self._venv.exists())

  def test_unsupported_python_is_refused(self):
    self.assert_fails(_OLD, '3.9.1', '3.10 to 3.13', 'PYTHON=python3.13')

  def test_failed_install_removes_the_environment(self):
    python = _NO_VENV.format(python=sys.executable)
    for _ in range(2):
      self.assert_fails(python, 'apt install python3-venv', 'pip 22.3')

  def test_existing_broken_environment_is_not_used(self):
    (self._venv / 'bin').mkdir(parents=True)
    (self._venv / 'pyvenv.cfg').touch()
    (self._venv / 'bin' / 'python').symlink_to('/bin/false')
    python = _NO_VENV.format(python=sys.executable)
    self.assert_fails(python, 'apt install python3-venv')


def _write(path, text):
  path.write_text(text, encoding='utf-8')
  path.chmod(0o755)


@unittest.skipUnless(
  os.environ.get('TFS_EXPECT_INSTALLED') == '1',
  'the package is not installed: `make test` runs this',
)
class InstalledTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self._installed = pathlib.Path(version.__file__).resolve().parent

  def test_package_is_imported_from_site_packages(self):
    site_packages = pathlib.Path(sysconfig.get_path('purelib')).resolve()
    self.assertEqual(self._installed, site_packages / 'tf_strategies')

  def test_wheel_contains_every_module(self):
    sources = {
      path.removeprefix('tf_strategies/')
      for path in project.python_files('tf_strategies')
    }
    installed = {
      path.relative_to(self._installed).as_posix()
      for path in self._installed.rglob('*.py')
    }
    self.assertEqual(installed, sources)


if __name__ == '__main__':
  absltest.main()
