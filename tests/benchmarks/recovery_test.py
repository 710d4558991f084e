"""The benchmark of recovery kills a worker, and its report is complete."""

import os

import pytest
from absl.testing import absltest

from tests.benchmarks import running


@pytest.mark.soak
class RecoveryTest(absltest.TestCase):
  def test_kills(self):
    path = os.path.join(self.create_tempdir().full_path, 'report.json')
    done = running.run_benchmark(
      'recovery', '--kills=2', '--width=8', f'--report_json={path}'
    )
    self.assertEqual(done.returncode, 0, done.stderr[-4000:])
    running.assert_has_table(self, path)
    found = running.read_json(path)
    self.assertEqual(found['settings'], {'kills': 2, 'width': 8, 'seed': 0})
    [ours] = found['results']
    self.assertEqual((ours['peer'], ours['kills']), ('ours', 2))
    self.assertLen(ours['seconds'], 2)
    self.assertAlmostEqual(ours['median_s'], sum(ours['seconds']) / 2)
    self.assertEqual(ours['most_s'], max(ours['seconds']))
    self.assertGreater(min(ours['seconds']), 0)
    # The import of TensorFlow is part of one, not of the other.
    self.assertGreater(ours['median_rejoin_s'], ours['most_s'])
    self.assertRegex(done.stdout, rf'\| ours \| +2 \| +{ours["median_s"]:.3f} ')

  def test_target_is_checked_before_anything_runs(self):
    done = running.run_benchmark('recovery', '--report_json=/missing/a.json')
    self.assertNotEqual(done.returncode, 0)
    self.assertIn("report_json='/missing/a.json'", done.stderr)


if __name__ == '__main__':
  absltest.main()
