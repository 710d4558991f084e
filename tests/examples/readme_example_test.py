"""The program in the README runs as it stands, and is as short as it says."""

import re

import pytest
from absl.testing import absltest

from benchmarks import processes
from tests.architecture import project

_PREAMBLE = """
from tests import virtual_devices
virtual_devices.configure(4)
"""


def _program() -> str:
  readme = (project.root() / 'README.md').read_text(encoding='utf-8')
  return re.search(r'^```python\n(.*?)^```', readme, re.M | re.S).group(1)


@pytest.mark.multi_process
class ReadmeExampleTest(absltest.TestCase):
  @pytest.mark.full
  def test_program_runs_on_four_replicas(self):
    result = processes.run_python('-c', _PREAMBLE + _program())
    self.assertEqual(result.returncode, 0, result.stderr[-2000:])
    report = result.stdout.splitlines()[-1]
    # 1,437 digits in batches of 64 are 23 steps an epoch.
    self.assertIn("'all_reduce': 115", report)
    self.assertIn("'cross_device_ops': 'RingAllReduce'", report)

  def test_program_is_short(self):
    lines = [line for line in _program().splitlines() if line.strip()]
    self.assertLessEqual(len(lines), 15)


if __name__ == '__main__':
  absltest.main()
