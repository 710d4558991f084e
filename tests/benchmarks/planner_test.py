"""The benchmark of predictions runs, where hosts can be made, and is complete."""

import os

import pytest
from absl.testing import absltest

from benchmarks import network_namespaces
from tests.benchmarks import running

pytestmark = pytest.mark.full


@pytest.mark.multi_process
class PlannerBenchmarkTest(absltest.TestCase):
  def test_two_hosts_with_two_workers(self):
    reason = network_namespaces.missing()
    if reason is not None:
      self.skipTest(reason)
    path = os.path.join(self.create_tempdir().full_path, 'report.json')
    done = running.run_benchmark(
      'planner',
      '--world_sizes=4',
      '--workers_per_host=2',
      '--link_rates=300mbit',
      '--variables_bytes=1200000,4000',
      '--compressions=none,int8',
      '--repeats=2',
      f'--report_json={path}',
    )
    self.assertEqual(done.returncode, 0, done.stderr[-4000:])
    running.assert_has_table(self, path)
    [run] = running.read_json(path)['runs']
    self.assertLess(run['links'][0][1][1], run['links'][0][3][1])
    ways = {(r['all_reduce'], r['compression']) for r in run['results']}
    self.assertContainsSubset(
      {('hierarchical(2)', 'none'), ('ring', 'none'), ('direct', 'int8')}, ways
    )
    for result in run['results']:
      self.assertLen(result['seconds'], 2)
      # Half of the array crosses a link of 37.5 MB/s twice, or a fourth of it.
      self.assertGreater(result['measured_ms'], 8)
      self.assertGreater(result['predicted_ms'], 8)
    self.assertGreaterEqual(run['choice_any'], 1.0)
    self.assertIn('the choice took', done.stdout)


if __name__ == '__main__':
  absltest.main()
