"""What the examples measure when flags ask for it."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from examples import common_flags, mnist_custom_loop, mnist_keras_fit
from tests import tiers, virtual_devices
from tests.examples import programs
from tf_strategies.monitoring import merge

virtual_devices.configure_logical_cpus()

_DEADLINE_SECONDS = 60
# 1,437 digits make 15 steps.
_BATCH_SIZE, _STEPS = 100, 15


def _read_lines(path):
  with open(path, encoding='utf-8') as f:
    return [json.loads(line) for line in f]


class MonitoringTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self._directory = self.create_tempdir().full_path
    self._options = common_flags.TrainingOptions(
      dataset='digits',
      model='mlp',
      global_batch_size=_BATCH_SIZE,
      epochs=2,
      verbose=False,
      metrics_jsonl=self._path('metrics.jsonl'),
    )

  def _path(self, name):
    return os.path.join(self._directory, name)

  @tiers.named_parameters(
    tiers.full('fit', mnist_keras_fit.train), ('loop', mnist_custom_loop.train)
  )
  def test_a_line_a_step(self, train):
    train(self._options, ['CPU:0', 'CPU:1'])
    lines = _read_lines(self._path('metrics-0.jsonl'))
    self.assertEqual([n['step'] for n in lines], [*range(1, 2 * _STEPS + 1)])
    sizes = [_BATCH_SIZE] * (_STEPS - 1) + [1437 - (_STEPS - 1) * _BATCH_SIZE]
    self.assertEqual([n['examples'] for n in lines], sizes * 2)

  @pytest.mark.full
  def test_nothing_without_a_flag(self):
    options = dataclasses.replace(self._options, metrics_jsonl=None, epochs=1)
    mnist_keras_fit.train(options, ['CPU:0'])
    self.assertIsNone(options.monitor_options())
    self.assertEmpty(os.listdir(self._directory))

  @parameterized.named_parameters(
    ('one', {'profile_steps': ['3'], 'log_dir': 'a'}, 'profile_steps=..3'),
    ('no_directory', {'profile_steps': ['3', '4']}, 'without log_dir'),
  )
  def test_refused(self, options, message):
    with self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, message):
      common_flags.TrainingOptions(**options)


@pytest.mark.multi_process
class TwoWorkersTest(tf.test.TestCase):
  @pytest.mark.full
  def test_timelines_of_a_job_are_put_together(self):
    directory = self.create_tempdir().full_path
    path = os.path.join(directory, 'run.json')
    program = programs.Program(
      'mnist_keras_fit',
      '--strategy=multi_worker_ring',
      '--dataset=digits',
      '--model=mlp',
      '--epochs=1',
      f'--log_dir={directory}/logs',
      f'--timeline={path}',
      '--profile_steps=3,4',
      output=os.path.join(directory, 'output'),
      launcher=['--num_workers=2'],
    )
    self.addCleanup(program.kill)
    self.assertEqual(program.wait(), 0, program.output())
    parts = [os.path.join(directory, f'run-{rank}.json') for rank in range(2)]
    merged = subprocess.run(
      [
        sys.executable,
        '-m',
        'tf_strategies.monitoring.merge',
        *parts,
        f'--output={path}',
      ],
      check=True,
      capture_output=True,
      text=True,
      timeout=_DEADLINE_SECONDS,
      env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
    )
    self.assertRegex(merged.stdout, r'rank 1 .*: ahead by .* us, within')
    events = merge.load(path)['traceEvents']
    for rank in range(2):
      steps = [
        e['args']['step']
        for e in events
        if e.get('cat') == 'step' and e['pid'] == rank
      ]
      self.assertEqual(steps, [*range(1, 24)])
      lines = _read_lines(f'{directory}/logs/metrics-{rank}.jsonl')
      self.assertEqual(sum(n['global_examples'] for n in lines), 1437)
      profiles = os.path.join(directory, 'logs', f'rank-{rank}', 'plugins')
      self.assertNotEmpty(os.listdir(os.path.join(profiles, 'profile')))


if __name__ == '__main__':
  tf.test.main()
