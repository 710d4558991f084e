"""What the examples measure when flags ask for it."""

import json
import os

import pytest
import tensorflow as tf
from absl.testing import parameterized

from benchmarks import processes
from examples import common
from tests import tiers, virtual_devices
from tests.examples import pages, programs
from tf_strategies.monitoring import merge

virtual_devices.configure()

# 1,437 digits make 15 steps.
_BATCH_SIZE, _STEPS = 100, 15


def _read_lines(path):
  with open(path, encoding='utf-8') as f:
    return [json.loads(line) for line in f]


class MonitoringTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self._directory = self.create_tempdir().full_path
    self._flags = (
      '--dataset=digits',
      '--model=mlp',
      f'--global_batch_size={_BATCH_SIZE}',
      '--noverbose',
    )

  def _path(self, name):
    return os.path.join(self._directory, name)

  @tiers.parameters(tiers.full(pages.NAMES[0]), pages.NAMES[1])
  @pytest.mark.full
  def test_a_line_a_step(self, name):
    path = self._path('metrics.jsonl')
    flags = ('--num_virtual_devices=2', '--epochs=2', f'--metrics_jsonl={path}')
    pages.run(name, *self._flags, *flags)
    lines = _read_lines(self._path('metrics-0.jsonl'))
    self.assertEqual([n['step'] for n in lines], [*range(1, 2 * _STEPS + 1)])
    sizes = [_BATCH_SIZE] * (_STEPS - 1) + [1437 - (_STEPS - 1) * _BATCH_SIZE]
    self.assertEqual([n['examples'] for n in lines], sizes * 2)

  @pytest.mark.soak
  def test_nothing_without_a_flag(self):
    with pages.parsed('mnist_keras_fit', *self._flags, '--epochs=1') as example:
      self.assertIsNone(common.monitor_options())
      example.main()
    self.assertEmpty(os.listdir(self._directory))


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
    merged = processes.run_python(
      '-m',
      'tf_strategies.monitoring.merge',
      *parts,
      f'--output={path}',
      is_checked=True,
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
