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


@pytest.mark.multi_process
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

  @pytest.mark.soak
  def test_costs(self):
    names = ['ring_mirrored', 'multi_worker_ring']
    done, found = self._run(f'--strategies={",".join(names)}')
    self.assertIn('Digits, not MNIST', done.stdout)
    self.assertEqual(found['settings']['dataset'], 'digits')
    runs = self._only_runs(found['costs'])
    self.assertEqual(list(runs), names)
    for name, run in runs.items():
      self.assertIn(f'| `{name}` ', done.stdout)
      self.assertRegex(done.stderr, rf'{name} begins\n(.*\n)*.*{name} ends')
      self.assertGreater(run['images_per_s'], 0)
    ring, workers = (runs[name] for name in names)

    # 2(N-1)/N of the gradients into each device, the mean. So small ones are added
    # up by one device, which gets (N-1) of them.
    share = 2 * (DEVICES - 1) / DEVICES * GRADIENTS
    self.assertBetween(
      ring['bytes_per_step_total'], DEVICES * share, DEVICES * share + 200
    )
    self.assertBetween(
      ring['bytes_per_step_into_busiest'], share, (DEVICES - 1) * GRADIENTS
    )
    # With two workers each sends as much as there is, and once, when variables
    # are made, all of them. There were three untimed steps.
    steps = EPOCHS * STEPS + 3
    sent = steps * workers['bytes_per_step_counted']['sent_by_this_worker']
    expected = steps * GRADIENTS + STATE
    self.assertBetween(sent, expected, 1.02 * expected)
    # Both do. Others may use the loopback too, and before the first worker's
    # clock starts the second may have sent a quarter of its epoch's first step.
    self.assertGreater(workers['bytes_per_step_total'], 1.75 * GRADIENTS)

    # Each replica has a copy, whichever process it is in.
    self.assertLen(ring['variable_bytes'], DEVICES)
    self.assertLen(workers['variable_bytes'], 2)
    for run in (ring, workers):
      most = run['variable_bytes_most']
      self.assertBetween(most, STATE + 16, STATE + 100)
      self.assertEqual(
        run['variable_bytes_total'], len(run['variable_bytes']) * most
      )
    # And both trained one device's weights.
    for metric in ('loss', 'accuracy'):
      self.assertAlmostEqual(
        ring['test'][metric], workers['test'][metric], places=4
      )

  @pytest.mark.soak
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

  @pytest.mark.soak
  def test_all_strategies(self):
    _, found = self._run()
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

  @pytest.mark.soak
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
