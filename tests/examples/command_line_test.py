"""The examples as processes: exit codes, messages, reports, kills."""

import dataclasses
import json
import os
import signal
import time

import numpy as np
import pytest
import tensorflow as tf
from absl import app, flags
from absl.testing import parameterized

from examples import (
  command_line,
  common_flags,
  compare_weights,
  mnist_custom_loop,
  mnist_keras_fit,
)
from tests import tiers, virtual_devices
from tests.examples import programs
from tf_strategies.checkpoint import checkpointer
from tf_strategies.cluster import exit_codes

virtual_devices.configure_logical_cpus()


# Of the 0.7 s or more that an epoch of 240 steps takes.
_SECONDS_INTO_EPOCH = 0.1


def _was_saved(directory):
  """Whether there is a checkpoint, and training has gone on since."""
  paths = checkpointer.Checkpointer(directory).paths()
  if not paths:
    return False
  age = time.time() - os.path.getmtime(paths[-1])
  return age > _SECONDS_INTO_EPOCH


class FlagsTest(parameterized.TestCase):
  def _parse(self, *arguments):
    flag_values = flags.FlagValues()
    common_flags.define(flag_values)
    flag_values(['program', *arguments])
    return flag_values

  def test_every_option_has_a_flag(self):
    options = common_flags.parse(self._parse())
    for field in dataclasses.fields(common_flags.TrainingOptions):
      self.assertTrue(hasattr(options, field.name))

  @parameterized.parameters(
    ('mnist', 3, 64), ('digits', 12, 64), ('synthetic', 1, 128)
  )
  def test_defaults_follow_the_data_set(self, dataset, epochs, batch_size):
    options = common_flags.parse(self._parse(f'--dataset={dataset}'))
    self.assertEqual(options.epochs, epochs)
    self.assertEqual(options.global_batch_size, batch_size)

  @parameterized.parameters(
    '--strategy=ring',
    '--all_reduce=nccl',
    '--dataset=cifar',
    '--model=resnet',
    '--dropout=1',
    '--global_batch_size=0',
    '--epochs=-1',
    '--learning_rate=0',
    '--num_virtual_devices=-1',
    '--mixed_precision=float8',
  )
  def test_bad_value_is_refused(self, argument):
    with self.assertRaises(flags.IllegalFlagValueError):
      self._parse(argument)

  def test_stray_argument_is_refused(self):
    with self.assertRaisesRegex(app.UsageError, 'digits'):
      command_line.main(['program', 'digits'], None, self._parse())


@pytest.mark.multi_process
class ProgramsTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self._directory = self.create_tempdir().full_path

  def _path(self, name):
    return os.path.join(self._directory, name)

  def _start(self, name, *arguments):
    program = programs.Program(name, *arguments, output=self._path('output'))
    self.addCleanup(program.kill)
    return program

  # Each pays the import of TensorFlow for another text.
  @tiers.named_parameters(
    tiers.soak(
      'strategy_of_another_example',
      'mnist_keras_fit',
      '--strategy=parameter_server',
      'Fix: run python -m examples.mnist_parameter_server',
    ),
    (
      'missing_data',
      'mnist_keras_fit',
      '--data_path=missing.npz',
      'DataError: data_path=missing.npz: no such file',
    ),
    tiers.soak(
      'bad_flag',
      'mnist_keras_fit',
      '--all_reduce=nccl',
      'value should be one of <ring|auto|direct',
    ),
  )
  def test_refusal_is_a_message(self, name, argument, message):
    program = self._start(name, argument)
    code = program.wait()
    self.assertEqual(code, 1)
    self.assertIn(message, program.output())
    self.assertNotIn('Traceback', program.output())

  def test_report_of_four_devices(self):
    path = self._path('report.json')
    program = self._start(
      'mnist_keras_fit',
      '--strategy=ring_mirrored',
      '--num_virtual_devices=4',
      '--dataset=digits',
      '--epochs=1',
      '--steps_per_epoch=5',
      '--min_accuracy=0.999',
      f'--report_json={path}',
    )
    # Five steps do not reach that accuracy; the report is there nonetheless.
    self.assertEqual(program.wait(), 2)
    self.assertIn('is below --min_accuracy=0.999', program.output())
    self.assertIn('RingAllReduce: 5 calls in 5 steps', program.output())
    self.assertIn('test  loss', program.output())
    with open(path, encoding='utf-8') as f:
      report = json.load(f)
    self.assertEqual(report['example'], 'mnist_keras_fit')
    self.assertEqual(report['strategy'], 'ring_mirrored')
    self.assertEqual(report['replicas'], 4)
    self.assertLen(set(report['devices']), 4)
    self.assertEqual(report['steps'], 5)
    self.assertEqual(report['global_batch_size'], 64)
    self.assertEqual(report['versions']['tensorflow'], tf.__version__)
    self.assertGreater(report['examples_per_second'], 0)
    for split in ('train', 'test'):
      self.assertBetween(report[split]['accuracy'], 0, 1)
      self.assertGreater(report[split]['loss'], 0)
    all_reduce = report['all_reduce']
    self.assertEqual(all_reduce['cross_device_ops'], 'RingAllReduce')
    self.assertEqual(all_reduce['calls']['all_reduce'], report['steps'])
    received = all_reduce['all_reduce_bytes_in']
    self.assertSameElements(received, report['devices'])
    # All devices together receive 2(N-1) times the gradients in each step.
    self.assertEqual(
      sum(received.values()), 5 * 2 * 3 * 4 * report['parameters']
    )

  @pytest.mark.soak
  def test_killed_fit_resumes_exactly(self):
    self._check_resumes('mnist_keras_fit', mnist_keras_fit.train)

  @pytest.mark.soak
  def test_killed_loop_resumes_exactly(self):
    self._check_resumes('mnist_custom_loop', mnist_custom_loop.train)

  @pytest.mark.soak
  def test_preempted_fit_resumes_exactly(self):
    self._check_resumes(
      'mnist_keras_fit', mnist_keras_fit.train, signal.SIGTERM
    )

  def test_preempted_loop_resumes_exactly(self):
    self._check_resumes(
      'mnist_custom_loop', mnist_custom_loop.train, signal.SIGTERM
    )

  def _check_resumes(self, name, train, number=signal.SIGKILL):
    checkpoints = self._path('checkpoints')
    options = common_flags.TrainingOptions(
      dataset='digits',
      model='mlp',
      global_batch_size=6,
      epochs=2,
      verbose=False,
    )
    program = self._start(
      name,
      '--num_virtual_devices=2',
      '--dataset=digits',
      '--model=mlp',
      '--global_batch_size=6',
      '--epochs=2',
      f'--checkpoint_dir={checkpoints}',
    )
    program.wait_until(lambda: _was_saved(checkpoints))
    is_kill = number == signal.SIGKILL
    self.assertEqual(
      program.end(number),
      -number if is_kill else exit_codes.RESTARTABLE_EXIT_CODE,
    )
    where = checkpointer.Checkpointer(checkpoints).newest().metadata
    self.assertEqual(where['epoch'], 1)

    weights = []
    for changes in ({}, {'checkpoint_dir': checkpoints}):
      path = self._path('weights.npz')
      report = train(
        dataclasses.replace(options, save_weights=path, **changes),
        ['CPU:0', 'CPU:1'],
      )
      weights.append(compare_weights.read(path))
    self.assertEqual(report['steps'], 480)
    self.assertEqual(report['steps_this_run'], 240 - where['step'])
    if is_kill:
      self.assertEqual(where['step'], 0)
    else:
      self.assertBetween(where['step'], 1, 240)
    self.assertSameElements(*weights)
    for variable, value in weights[0].items():
      np.testing.assert_array_equal(value, weights[1][variable], variable)


if __name__ == '__main__':
  tf.test.main()
