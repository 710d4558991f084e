"""The benchmark runs every strategy, and its report is complete."""

import os

import pytest
from absl.testing import absltest

from benchmarks.strategy_costs import catalogue
from tests.benchmarks import running

STEPS, EPOCHS, DEVICES = 3, 2, 4
# 784-16-16-10.
PARAMETERS = 13_002
GRADIENTS = 4 * PARAMETERS
# Weights and momenta; what counts steps and metrics is small.
STATE = 2 * GRADIENTS


@pytest.mark.soak
class StrategiesTest(absltest.TestCase):
  def _run(self, *flags, status=0):
    """The finished process and its report."""
    path = os.path.join(self.create_tempdir().full_path, 'report.json')
    done = running.run_benchmark(
      'strategies',
      '--model=mlp',
      f'--epochs={EPOCHS}',
      f'--steps_per_epoch={STEPS}',
      f'--num_virtual_devices={DEVICES}',
      f'--report_json={path}',
      *flags,
    )
    self.assertEqual(done.returncode, status, done.stderr[-4000:])
    running.assert_has_table(self, path)
    return done, running.read_json(path)

  def _only_runs(self, records):
    """The run of each row, by name."""
    found = {}
    for record in records:
      self.assertIsNone(record['error'])
      (found[record['name']],) = record['runs']
      self.assertEqual(found[record['name']]['steps'], EPOCHS * STEPS)
    return found

  def test_run_that_does_not_end(self):
    done, found = self._run(
      '--strategies=one_device',
      '--deadline_seconds=1',
      status=1,
    )
    self.assertIn('failed: one_device did not end within', done.stdout)
    self.assertRegex(done.stdout, r'\| `one_device` *\| 1 device *\| failed')
    (record,) = found['costs']
    self.assertIn('did not end', record['error'])
    self.assertEmpty(record['runs'])

  def test_all_strategies(self):
    done, found = self._run()
    self.assertIn('Digits, not MNIST', done.stdout)
    runs = self._only_runs(found['costs'])
    self.assertEqual(list(runs), [job.name for job in catalogue.COSTS])
    one = runs['one_device']['variable_bytes_total']
    for name, copies in (('mirrored', DEVICES), ('ring_mirrored', DEVICES)):
      self.assertEqual(runs[name]['variable_bytes_total'], copies * one)
    for name in ('multi_worker_ring', 'multi_worker_collective'):
      self.assertEqual(runs[name]['variable_bytes_total'], 2 * one)
    # One copy of what is large.
    for name in (
      'central_storage',
      'parameter_server_async',
      'parameter_server_sync',
    ):
      self.assertBetween(runs[name]['variable_bytes_total'], STATE, one + 200)
    self.assertEqual(runs['one_device']['bytes_per_step_total'], 0)
    # 2(N-1)/N of the gradients into each device, the mean.
    moved = 2 * (DEVICES - 1) * GRADIENTS
    ring = runs['ring_mirrored']['bytes_per_step_total']
    self.assertBetween(ring, moved, moved + 200)
    # Both workers send as much as there is. Before the first one's clock starts the
    # second may have sent a quarter of its epoch's first step.
    workers = runs['multi_worker_ring']['bytes_per_step_total']
    self.assertGreater(workers, 1.75 * GRADIENTS)
    self.assertIsNone(runs['mirrored']['bytes_per_step_total'])
    # All but the asynchronous one, and TensorFlow's where batches are partial,
    # train one device's weights.
    for name in set(runs) - {'parameter_server_async'}:
      self.assertAlmostEqual(
        runs[name]['test']['loss'],
        runs['one_device']['test']['loss'],
        places=4,
        msg=name,
      )

  def test_bad_flags(self):
    for flag, words in (
      ('--strategies=ring', "strategies='ring'"),
      ('--data_path=/nowhere', "data_path='/nowhere' does not exist"),
    ):
      with self.subTest(flag):
        done = running.run_benchmark('strategies', flag)
        self.assertEqual(done.returncode, 1)
        self.assertIn(words, done.stderr)


if __name__ == '__main__':
  absltest.main()
