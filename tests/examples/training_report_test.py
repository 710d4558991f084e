import importlib.util
import io
import json
import os
from contextlib import redirect_stdout
from unittest import mock

from absl.testing import absltest

from examples import training_report


class TrainingReportTest(absltest.TestCase):
  def test_throughput_leaves_the_first_step_out(self):
    # The first step takes 100 s, each further one 2 s; an evaluation of 50 s
    # follows each epoch. The clock is read at the start of an epoch after the
    # first, and at the end of each step.
    times = iter([100.0, 102.0, 104.0, 154.0, 156.0, 158.0, 159.0])
    throughput = training_report.Throughput()
    with mock.patch('time.perf_counter', lambda: next(times)):
      throughput.start_epoch()
      self.assertIsNone(throughput.current)
      for rows in (64, 64, 32):
        throughput.end_step(rows)
      self.assertEqual(throughput.current, 96 / 4)
      throughput.end_epoch()
      throughput.start_epoch()
      for rows in (64, 64, 32):
        throughput.end_step(rows)
      throughput.end_epoch()
    self.assertEqual(throughput.examples_per_second, (96 / 4 + 160 / 5) / 2)

  def test_throughput_of_one_step_is_unknown(self):
    throughput = training_report.Throughput()
    throughput.start_epoch()
    throughput.end_step(64)
    throughput.end_epoch()
    self.assertIsNone(throughput.examples_per_second)

  def test_bytes_of_a_step_are_of_all_kinds(self):
    counted = {
      'is_counted': True,
      'cross_device_ops': 'NaiveAllReduce',
      'all_reduce_bytes_in': {},
      'reduce_bytes_in': {'CPU:0': 900, 'CPU:1': 0},
      'read_bytes_in': {'CPU:0': 0, 'CPU:1': 1000},
    }
    self.assertEqual(
      training_report.bytes_per_step(counted, steps=10),
      {'into_busiest_device': 100.0, 'into_all_devices': 190.0},
    )
    self.assertIsNone(training_report.bytes_per_step(counted, steps=0))

  def test_bytes_of_a_step_between_workers(self):
    counted = {'is_counted': True, 'link': 'tcp', 'bytes_sent': 50}
    self.assertEqual(
      training_report.bytes_per_step(counted, steps=5),
      {'sent_by_this_worker': 10.0},
    )
    del counted['bytes_sent']  # TensorFlow's collectives do not say.
    self.assertIsNone(training_report.bytes_per_step(counted, steps=5))

  def test_missing_tensorboard_is_one_line_of_warning(self):
    printed = io.StringIO()
    with (
      mock.patch.object(importlib.util, 'find_spec', lambda name: None),
      redirect_stdout(printed),
    ):
      self.assertFalse(training_report.can_log('logs'))
      self.assertFalse(training_report.can_log(None))
    self.assertIn('TensorBoard is not installed', printed.getvalue())
    self.assertEqual(printed.getvalue().count('\n'), 1)

  def test_scalars_are_written_where_tensorboard_is_installed(self):
    if importlib.util.find_spec('tensorboard') is None:
      self.skipTest('TensorBoard is not installed')
    directory = self.create_tempdir().full_path
    logger = training_report.ScalarLogger(directory)
    logger.write(0, train={'loss': 1.0}, test={'loss': 2.0})
    self.assertCountEqual(os.listdir(directory), ['train', 'validation'])

  def test_json_is_written_with_its_directory(self):
    path = os.path.join(self.create_tempdir().full_path, 'new', 'report.json')
    training_report.write_json({'steps': 3}, path)
    with open(path, encoding='utf-8') as f:
      self.assertEqual(json.load(f), {'steps': 3})
    self.assertEqual(os.listdir(os.path.dirname(path)), ['report.json'])


if __name__ == '__main__':
  absltest.main()
