import importlib.util
import io
import os
import types
from contextlib import redirect_stdout
from unittest import mock

import tensorflow as tf
from absl import flags
from absl.testing import flagsaver

from examples import common, reporting
from tests.examples import pages  # The import defines the flags.

_STRATEGY = tf.distribute.get_strategy()


def _data(num_examples):
  split = types.SimpleNamespace(num_examples=num_examples)
  return types.SimpleNamespace(name='made_up', train=split, test=split)


class ReportingTest(tf.test.TestCase):
  def _run(self, num_examples, start=(0, 0)):
    self.enter_context(pages.parsed('mnist_keras_fit', '--noverbose'))
    return reporting.Run('example', _STRATEGY, _data(num_examples), start)

  def test_speed_leaves_the_first_step_out(self):
    # The first step takes 100 s, the others 2 s. An evaluation of 50 s follows
    # each epoch. The clock is read at the start of each epoch except the first,
    # and at the end of each step.
    times = iter([100.0, 102.0, 104.0, 154.0, 156.0, 158.0, 159.0])
    run = self._run(160)  # Batches of 64, 64 and 32 rows.
    with mock.patch('time.perf_counter', lambda: next(times)):
      run.begin_epoch(0)
      self.assertIsNone(run.images_per_second)
      for step in range(3):
        run.end_step(step + 1)
      self.assertEqual(run.images_per_second, 96 / 4)
      run.end_epoch()
      run.begin_epoch(1)
      for step in range(3):
        run.end_step(step + 1)
      run.end_epoch()
    self.assertEqual(run.median_images_per_second, (96 / 4 + 160 / 5) / 2)

  def test_speed_of_one_step_is_unknown(self):
    run = self._run(64)
    run.begin_epoch(0)
    run.end_step(1)
    run.end_epoch()
    self.assertIsNone(run.median_images_per_second)

  def test_bytes_of_a_step_are_of_all_kinds(self):
    counted = {
      'is_counted': True,
      'cross_device_ops': 'AutoAllReduce',
      'all_reduce_bytes_in': {},
      'reduce_bytes_in': {'CPU:0': 900, 'CPU:1': 0},
      'read_bytes_in': {'CPU:0': 0, 'CPU:1': 1000},
    }
    self.assertEqual(
      reporting.bytes_per_step(counted, steps=10),
      {'into_busiest_device': 100.0, 'into_all_devices': 190.0},
    )
    self.assertIsNone(reporting.bytes_per_step(counted, steps=0))

  def test_staleness_says_what_it_counts(self):
    servers = {'mode': 'async', 'bytes_per_server': [1e6], 'dropped': 0}
    report = {'steps_this_run': 9, 'all_reduce': None}
    for staleness, words in (
      (
        {0: 7, 2: 1},
        'updates that gradients had missed: 0 (7 steps), 2 (1 steps);',
      ),
      ({0: 0}, 'updates that gradients had missed: none;'),
    ):
      report['parameter_server'] = {**servers, 'staleness': staleness}
      self.assertIn(words, reporting._describe_traffic(report))

  def test_bytes_of_a_step_between_workers(self):
    counted = {'is_counted': True, 'link': 'tcp', 'bytes_sent': 50}
    self.assertEqual(
      reporting.bytes_per_step(counted, steps=5),
      {'sent_by_this_worker': 10.0},
    )
    del counted['bytes_sent']  # TensorFlow's collectives do not count them.
    self.assertIsNone(reporting.bytes_per_step(counted, steps=5))

  @flagsaver.flagsaver
  def test_missing_tensorboard_is_one_line_of_warning(self):
    printed = io.StringIO()
    with (
      mock.patch.object(importlib.util, 'find_spec', lambda name: None),
      redirect_stdout(printed),
    ):
      self.assertFalse(common.can_log(_STRATEGY))
      flags.FLAGS.log_dir = 'logs'
      self.assertFalse(common.can_log(_STRATEGY))
    self.assertIn('TensorBoard is not installed', printed.getvalue())
    self.assertEqual(printed.getvalue().count('\n'), 1)

  def test_curves_are_written_where_tensorboard_is_installed(self):
    if importlib.util.find_spec('tensorboard') is None:
      self.skipTest('TensorBoard is not installed')
    run = self._run(64)
    directory = self.create_tempdir().full_path
    with flagsaver.flagsaver(log_dir=directory):
      results = {'loss': 1.0, 'accuracy': 0.5}
      run.log_epoch(0, train=results, test=results)
    self.assertCountEqual(os.listdir(directory), ['train', 'validation'])


if __name__ == '__main__':
  tf.test.main()
