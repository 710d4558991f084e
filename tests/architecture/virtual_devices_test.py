"""Logical CPUs are set up once, and too few of them is an error.

In a process of its own each, because TensorFlow fixes its devices for good.
"""

import pytest
from absl.testing import absltest

from benchmarks import processes

_PREAMBLE = """
import tensorflow as tf
from tests.virtual_devices import configure
"""


def _run(script):
  return processes.run_python('-c', _PREAMBLE + script)


@pytest.mark.multi_process
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

  @pytest.mark.full
  def test_too_late_is_an_error_that_says_so(self):
    result = _run("""
configure(2)
tf.constant(1)
try:
  configure(4)
except RuntimeError as e:
  print(e)
""")
    self.assertEqual(result.returncode, 0, result.stderr)
    self.assertStartsWith(result.stdout, 'count (4) logical CPUs')
    self.assertIn('already with 2.', result.stdout)


if __name__ == '__main__':
  absltest.main()
