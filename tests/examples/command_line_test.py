"""The examples as processes: exit codes, messages, reports, kills."""

import os
import pathlib
import re
import signal
import time

import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from absl.testing import parameterized

from benchmarks import processes
from examples import common
from tests import virtual_devices
from tests.examples import pages, programs
from tf_strategies.checkpoint import checkpointer
from tf_strategies.cluster import exit_codes

virtual_devices.configure()


# Takes half a second on an idle machine.
_HELP_SECONDS = 30
# An epoch of 240 steps takes at least 0.7 s.
_SECONDS_INTO_EPOCH = 0.1


def _was_saved(directory):
  """Returns whether training has continued for a while since the last checkpoint."""
  paths = checkpointer.Checkpointer(directory).paths()
  if not paths:
    return False
  age = time.time() - os.path.getmtime(paths[-1])
  return age > _SECONDS_INTO_EPOCH


class FlagsTest(parameterized.TestCase):
  @parameterized.parameters(('mnist', 3), ('digits', 12))
  def test_default_of_epochs_follows_the_data_set(self, dataset, epochs):
    with pages.parsed('mnist_keras_fit', f'--dataset={dataset}'):
      self.assertEqual(flags.FLAGS.epochs, epochs)

  @parameterized.parameters('--strategy=ring', '--dropout=1')
  def test_bad_value_is_refused(self, argument):
    with (
      self.assertRaises(flags.IllegalFlagValueError),
      pages.parsed('mnist_keras_fit', argument),
    ):
      pass


class HelpTest(parameterized.TestCase):
  @parameterized.parameters(*zip(pages.NAMES, [True, False], strict=True))
  def test_help_shows_all_flags_at_once(self, name, as_file):
    program = [f'examples/{name}.py'] if as_file else ['-m', f'examples.{name}']
    shown = processes.run_python(
      *('-X', 'importtime', *program, '--help'),
      cwd=programs.ROOT,
      deadline_seconds=_HELP_SECONDS,
    )
    with pages.parsed(name) as example:
      defined = {
        flag
        for module in (example, common)
        for flag in re.findall(
          r"DEFINE_\w+\(\s*'(\w+)'",
          pathlib.Path(module.__file__).read_text(encoding='utf-8'),
        )
      }
    self.assertGreater(len(defined), 25)
    found = re.findall(r'^  --(?:\[no\])?(\w+):', shown.stdout, re.M)
    self.assertContainsSubset(defined, found)
    # `--help` must not wait for TensorFlow, which takes seconds to load.
    self.assertIn('absl', shown.stderr)
    self.assertNotRegex(shown.stderr, r'\| +(tensorflow|keras)\n')


class ProgramsTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self._directory = self.create_tempdir().full_path

  def _path(self, name):
    return os.path.join(self._directory, name)

  def _start(self, name, *arguments, **options):
    program = programs.Program(
      name, *arguments, output=self._path('output'), **options
    )
    self.addCleanup(program.kill)
    return program

  def test_refusal_is_a_message(self):
    program = self._start('mnist_keras_fit', '--data_path=missing.npz')
    self.assertEqual(program.wait(), 1)
    self.assertIn(
      'DataError: data_path=missing.npz: no such file', program.output()
    )
    for line in ('Traceback', 'oneDNN'):
      self.assertNotIn(line, program.output())

  @parameterized.parameters(
    ('mnist_keras_fit', signal.SIGKILL), ('mnist_custom_loop', signal.SIGTERM)
  )
  @pytest.mark.soak
  def test_interrupted_run_resumes_exactly(self, name, number):
    checkpoints = self._path('checkpoints')
    flags = (
      '--num_virtual_devices=2',
      '--dataset=digits',
      '--model=mlp',
      '--global_batch_size=6',
      '--epochs=2',
    )
    program = self._start(name, *flags, f'--checkpoint_dir={checkpoints}')
    program.wait_until(lambda: _was_saved(checkpoints))
    is_kill = number == signal.SIGKILL
    self.assertEqual(
      program.end(number),
      -number if is_kill else exit_codes.RESTARTABLE_EXIT_CODE,
    )
    where = checkpointer.Checkpointer(checkpoints).newest().metadata
    self.assertEqual(where['epoch'], 1)

    weights = []
    for changes in ((), (f'--checkpoint_dir={checkpoints}',)):
      path = self._path('weights.npz')
      report = pages.run(
        name, *flags, '--noverbose', f'--save_weights={path}', *changes
      )
      weights.append(dict(np.load(path)))
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
