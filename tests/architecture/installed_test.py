"""The tests run against the installed wheel of this checkout."""

import os
import pathlib
import sysconfig
import unittest

import pytest
from absl.testing import absltest

from tests.architecture import project
from tf_strategies import version

pytestmark = pytest.mark.smoke


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

  def test_wheel_holds_every_module_of_the_checkout(self):
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
