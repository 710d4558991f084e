"""The examples on parameter servers, as real jobs and without a cluster."""

import json
import os

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import tiers, virtual_devices, weights
from tests.examples import pages, programs

virtual_devices.configure()

_FIT, _LOOP = 'mnist_keras_fit', 'mnist_custom_loop'
_JOB = ('--num_workers=2', '--num_ps=2', '--chief')
# 1,437 digits in batches of 64.
_STEPS_PER_EPOCH = 23
_EPOCHS = 6
_SERVER_DEVICE = '/job:ps/replica:0/task:{}/device:CPU:0'

_SHORT = {
  'dataset': 'digits',
  'model': 'mlp',
  'steps_per_epoch': 3,
  'epochs': 2,
  'verbose': False,
}


class OneDeviceTest(tf.test.TestCase, parameterized.TestCase):
  """--strategy=parameter_server without a cluster."""

  def _train(self, name, strategy='parameter_server', **changes):
    path = os.path.join(self.create_tempdir().full_path, 'weights.npz')
    changes = {'strategy': strategy, 'save_weights': path, **changes}
    report = pages.run(name, **{**_SHORT, **changes})
    return dict(np.load(path)), report

  def test_trains_what_one_device_trains(self):
    expected, _ = self._train(_FIT, 'one_device')
    found, _ = self._train(_FIT, worker_input=True)
    largest, where = weights.largest_difference(expected, found)
    self.assertLessEqual(largest, 1e-6, where)


class JobTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self._directory = self.create_tempdir().full_path

  def _path(self, name):
    return os.path.join(self._directory, name)

  def _run(self, name, *arguments, launcher=_JOB, **options):
    """Runs a job that must succeed, and returns its report."""
    report = self._path('report.json')
    program = programs.Program(
      name,
      '--strategy=parameter_server',
      '--dataset=digits',
      f'--report_json={report}',
      *arguments,
      output=self._path('output'),
      launcher=launcher,
      **options,
    )
    self.addCleanup(program.kill)
    self.assertEqual(program.wait(), 0, program.output()[-5000:])
    self._output = program.output()
    with open(report, encoding='utf-8') as f:
      return json.load(f)

  def assert_result(self, report, steps):
    self.assertEqual(report['steps'], steps)
    self.assertEqual(report['iterations'], steps)
    servers = report['parameter_server']
    self.assertEqual((servers['workers'], servers['servers']), (2, 2))
    # Workers ran every step of this run, and each step counted once.
    self.assertEqual(servers['steps'], report['steps_this_run'])
    # The weights and the optimizer's momenta.
    self.assertGreater(
      sum(servers['bytes_per_server']), 2 * 4 * report['parameters']
    )
    self.assertGreater(min(servers['bytes_per_server']), 0)
    # The chief holds no variables, and each part of a split variable is on its
    # server.
    by_device = report['variable_bytes']
    self.assertEqual(
      [by_device.get(_SERVER_DEVICE.format(i)) for i in range(2)],
      servers['bytes_per_server'],
    )
    self.assertLen(by_device, 2)
    self.assertIsNone(report['all_reduce'])
    for split in ('train', 'test'):
      self.assertBetween(report[split]['accuracy'], 0, 1)

  @tiers.parameters(
    ('parameter_server', _JOB, 40),
    tiers.soak('multi_worker_ring', ('--num_workers=2',), 20),
  )
  def test_says_what_a_reader_needs(self, strategy, job, most):
    self._run(_FIT, '--epochs=1', f'--strategy={strategy}', launcher=job)
    for words in ('on digits with', 's/step', 'test accuracy'):
      self.assertIn(words, self._output)
    for words in (
      'default session config',
      'TF_CONFIG will be ignored',
      'oneDNN custom operations',
      'InitializeLog',
    ):
      self.assertNotIn(words, self._output)
    # The time that tasks wait for each other depends on the machine.
    lines = [t for t in self._output.splitlines() if 'Waiting to be' not in t]
    self.assertLess(len(lines), most)

  @parameterized.named_parameters(
    ('fit_async', _FIT, '--mode=async', '--variable_partitions=2'),
    (
      'loop_bounded',
      _LOOP,
      *('--mode=bounded', '--max_staleness=2', '--worker_input'),
    ),
    ('backup_workers', _FIT, '--mode=sync', '--backup_workers=1'),
  )
  @pytest.mark.soak
  def test_learns(self, name, *arguments):
    report = self._run(
      name,
      f'--epochs={_EPOCHS}',
      '--min_accuracy=0.8',
      *arguments,
      spreads_variables=True,
    )
    self.assertRegex(
      self._output,
      r'\[chief 0\] .* parameter_server \(workers: 2, servers: 2\)',
    )
    self.assert_result(report, _EPOCHS * _STEPS_PER_EPOCH)


if __name__ == '__main__':
  tf.test.main()
