"""The examples on parameter servers, as real jobs and without a cluster."""

import json
import os

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import tiers, virtual_devices, weights
from tests.examples import pages, programs

virtual_devices.configure()

_FIT = 'mnist_keras_fit'
_JOB = ('--num_workers=2', '--num_ps=2', '--chief')
# 1,437 digits in batches of 64.
_STEPS_PER_EPOCH = 23

_SHORT = {
  'dataset': 'digits',
  'model': 'mlp',
  'steps_per_epoch': 3,
  'epochs': 2,
  'verbose': False,
}


class OneDeviceTest(tf.test.TestCase, parameterized.TestCase):
  """--strategy=parameter_server without a cluster."""

  def _train(self, strategy, **changes):
    path = os.path.join(self.create_tempdir().full_path, 'weights.npz')
    pages.run(
      _FIT, **{**_SHORT, 'strategy': strategy, 'save_weights': path, **changes}
    )
    return dict(np.load(path))

  def test_trains_what_one_device_trains(self):
    expected = self._train('one_device')
    found = self._train('parameter_server', worker_input=True)
    largest, where = weights.largest_difference(expected, found)
    self.assertLessEqual(largest, 1e-6, where)


class JobTest(tf.test.TestCase, parameterized.TestCase):
  @tiers.parameters(
    ('parameter_server', _JOB, 40),
    tiers.soak('multi_worker_ring', ('--num_workers=2',), 20),
  )
  def test_says_what_a_reader_needs(self, strategy, job, most):
    directory = self.create_tempdir().full_path
    report = os.path.join(directory, 'report.json')
    program = programs.Program(
      _FIT,
      *('--dataset=digits', '--epochs=1', f'--strategy={strategy}'),
      f'--report_json={report}',
      output=os.path.join(directory, 'output'),
      launcher=job,
    )
    self.addCleanup(program.kill)
    self.assertEqual(program.wait(), 0, program.output()[-5000:])
    with open(report, encoding='utf-8') as f:
      self.assertEqual(json.load(f)['iterations'], _STEPS_PER_EPOCH)
    for words in ('on digits with', 's/step', 'test accuracy'):
      self.assertIn(words, program.output())
    for words in (
      'default session config',
      'TF_CONFIG will be ignored',
      'oneDNN custom operations',
      'InitializeLog',
    ):
      self.assertNotIn(words, program.output())
    # The time that tasks wait for each other depends on the machine.
    lines = [
      t for t in program.output().splitlines() if 'Waiting to be' not in t
    ]
    self.assertLess(len(lines), most)


if __name__ == '__main__':
  tf.test.main()
