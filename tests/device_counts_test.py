"""Each test is counted once, where it belongs."""

import types

from absl.testing import absltest, parameterized

from tests import device_counts

_FIT = 'tests/conformance/fit_test.py::FitTest::test_equals_one_device_'
_WORKERS = 'tests/conformance/multi_worker_test.py::Test::test_few_equal_'


def _report(nodeid, when='call', outcome='passed', **more):
  return types.SimpleNamespace(
    nodeid=nodeid,
    when=when,
    outcome=outcome,
    passed=outcome == 'passed',
    **more,
  )


class DeviceCountsTest(parameterized.TestCase):
  @parameterized.parameters(
    ('tests/keras/scope_checks_test.py::Test::test_it', 'keras'),
    ('tests/strategies/registry_test.py::Test::test_it', 'strategies'),
    (
      'tests/strategies/multi_worker/input_test.py::Test::test_it_ring_2x1',
      'strategies/multi_worker',
    ),
    (f'{_FIT}ring_mirrored_clipnorm', 'conformance, ring_mirrored'),
    (f'{_FIT}central_storage_of_2_1_row', 'conformance, central_storage'),
    (f'{_FIT}0', 'conformance, rows with numbers only'),
    (f'{_WORKERS}ring_2x2', 'conformance, multi_worker_ring'),
    (f'{_WORKERS}collective_1x1', 'conformance, multi_worker_collective'),
    (
      'tests/conformance/parameter_server_test.py::Test::test_it',
      'conformance, parameter_server',
    ),
  )
  def test_name(self, nodeid, expected):
    self.assertEqual(device_counts.name_of(nodeid), expected)

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
