"""Each test is counted once, under the right name."""

import types

from absl.testing import absltest, parameterized

from tests import device_counts

_ROW = 'tests/programs/programs_test.py::ProgramsTest::test_equals_one_device_'


def _report(nodeid, when='call', outcome='passed', **more):
  return types.SimpleNamespace(
    nodeid=nodeid,
    when=when,
    outcome=outcome,
    passed=outcome == 'passed',
    **more,
  )


class DeviceCountsTest(parameterized.TestCase):
  def test_counts(self):
    counts = device_counts.DeviceCounts('cpu')
    for report in (
      _report('tests/keras/a_test.py::a', when='setup'),
      _report('tests/keras/a_test.py::a'),
      _report('tests/keras/a_test.py::a', context='a subtest'),
      _report('tests/keras/a_test.py::a', when='teardown'),
      _report('tests/keras/a_test.py::b', outcome='failed'),
      _report('tests/keras/a_test.py::c', when='setup', outcome='failed'),
      _report('tests/museum/a_test.py::a', when='setup', outcome='skipped'),
    ):
      counts.pytest_runtest_logreport(report)
    self.assertEqual(
      counts.lines(),
      [
        'keras     1 passed,    2 failed,    0 skipped',
        'museum    0 passed,    0 failed,    1 skipped',
      ],
    )


if __name__ == '__main__':
  absltest.main()
