"""Tests set up devices once and take their type from one place.

Each test runs in its own process, because TensorFlow cannot change its devices
later.
"""

import ast
import pathlib
import re

import pytest
from absl.testing import absltest

from benchmarks import processes
from tests import tiers

_TESTS = pathlib.Path(__file__).parent.parent
# Device names that are only compared, never passed to TensorFlow.
_NAMES_ONLY = {
  'cross_device/auto_test.py',
  'strategies/registry_test.py',
  'strategies/ring_mirrored_test.py',
}

_PREAMBLE = """
import tensorflow as tf
from tests.virtual_devices import configure
"""


def _run(script):
  return processes.run_python('-c', _PREAMBLE + script)


class VirtualDevicesTest(absltest.TestCase):
  @pytest.mark.soak
  def test_repeated_calls_give_the_largest_count(self):
    result = _run("""
configure(2)
configure()
configure(3)
print(len(tf.config.list_logical_devices('CPU')))
configure()
with tf.device('CPU:7'):
  print(tf.reduce_sum(tf.ones(7)).numpy())
""")
    self.assertEqual(result.returncode, 0, result.stderr)
    self.assertEqual(result.stdout.split(), ['8', '7.0'])

  @pytest.mark.smoke
  def test_no_test_on_devices_names_a_type(self):
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

  def _pytest(self, *arguments):
    words = '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *arguments
    result = processes.run_python(*words, cwd=_TESTS.parent)
    self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
    return result.stdout

  @pytest.mark.soak
  def test_switch_to_cpus(self):
    found = self._pytest(
      '--device=cpu',
      'tests/cross_device/destinations_test.py',
      'tests/collectives/layout_test.py',
    )
    self.assertRegex(found, r'[1-9]\d* passed')
    self.assertRegex(found, r'[1-9]\d* deselected')

  @pytest.mark.soak
  def test_switch_to_gpus_where_there_is_none(self):
    import tensorflow as tf

    if tf.config.list_physical_devices('GPU'):
      self.skipTest('there is one')
    for options in ([], ['-n', '2']):
      found = self._pytest('--device=gpu', *options, 'tests/keras')
      self.assertIn('no GPU on this machine: 0 ran', found)
      self.assertNotIn('passed', found)


if __name__ == '__main__':
  absltest.main()
