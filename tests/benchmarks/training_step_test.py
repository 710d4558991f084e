"""The benchmark trains with every peer, and its report is complete."""

import os

import pytest
from absl.testing import absltest

from benchmarks import training_peers
from tests.benchmarks import running

WIDTH, LAYERS = 16, 3


@pytest.mark.soak
class TrainingStepTest(absltest.TestCase):
  def test_all_peers(self):
    path = os.path.join(self.create_tempdir().full_path, 'report.json')
    done = running.run_benchmark(
      'training_step',
      f'--width={WIDTH}',
      f'--layers={LAYERS}',
      '--per_replica_batch_size=4',
      '--rounds=2',
      '--blocks=2',
      '--steps=2',
      f'--report_json={path}',
    )
    self.assertEqual(done.returncode, 0, done.stderr[-4000:])
    running.assert_has_table(self, path)
    found = running.read_json(path)
    self.assertEqual(found['parameter_bytes'], 4 * LAYERS * WIDTH * (WIDTH + 1))
    records = {r['peer']: r for r in found['results']}
    self.assertEqual(list(records), list(training_peers.NAMES))
    reference = records['collective']['median_ms']
    for name, record in records.items():
      self.assertLen(record['seconds'], 4, name)
      self.assertGreater(min(record['seconds']), 0, name)
      self.assertGreater(record['median_cpu_ms'], 0, name)
      self.assertAlmostEqual(
        record['ratio_to_collective'], record['median_ms'] / reference
      )
      self.assertIn(f'| {name} ', done.stdout)

  def test_bad_flags(self):
    done = running.run_benchmark('training_step', '--peers=ring')
    self.assertNotEqual(done.returncode, 0)
    self.assertIn("'ring' is none of ring_1mb", done.stdout + done.stderr)


if __name__ == '__main__':
  absltest.main()
