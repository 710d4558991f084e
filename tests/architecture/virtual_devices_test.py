"""Tests take the device type from `tests/virtual_devices.py`."""

import ast
import pathlib
import re

import pytest
from absl.testing import absltest

from tests import tiers

_TESTS = pathlib.Path(__file__).parent.parent
# Device names that are only compared, never passed to TensorFlow.
_NAMES_ONLY = {
  'cross_device/auto_test.py',
  'strategies/registry_test.py',
  'strategies/ring_mirrored_test.py',
}


class VirtualDevicesTest(absltest.TestCase):
  @pytest.mark.smoke
  def test_device_tests_do_not_name_a_device_type(self):
    literal = re.compile(r'[CG]PU:\d')
    found = []
    for path in filter(tiers.is_on_devices, sorted(_TESTS.rglob('*.py'))):
      name = str(path.relative_to(_TESTS))
      for node in ast.walk(ast.parse(path.read_text())):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if (
          is_text and literal.fullmatch(node.value) and name not in _NAMES_ONLY
        ):
          found.append(f'{name}:{node.lineno}: {node.value}')
    self.assertEqual(found, [])


if __name__ == '__main__':
  absltest.main()
