import importlib.util
import os
import types
from unittest import mock

import tensorflow as tf
from absl.testing import flagsaver

from examples import reporting
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

  def test_bytes_of_a_step_between_workers(self):
    counted = {'is_counted': True, 'link': 'tcp', 'bytes_sent': 50}
    self.assertEqual(
      reporting.bytes_per_step(counted, steps=5),
      {'sent_by_this_worker': 10.0},
    )
    del counted['bytes_sent']  # TensorFlow's collectives do not count them.
    self.assertIsNone(reporting.bytes_per_step(counted, steps=5))

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
