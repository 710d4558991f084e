"""The launcher's command line and the environment of its tasks."""

import json
import os

import psutil
import pytest
from absl.testing import absltest, parameterized

from tests.launch import programs


class EnvironmentTest(programs.JobTestCase):
  @pytest.mark.smoke
  def test_secret_is_not_in_command_lines_or_output(self):
    code = """
note('secret', os.environ['TFS_SECRET'])
while not os.path.exists(os.path.join(directory, 'end')):
  time.sleep(0.01)
"""
    directory = self.create_tempdir().full_path
    flags = ('--num_workers=2', f'--log_dir={directory}/logs')
    with programs.Launcher(directory, flags, code) as launcher:
      secret, other = launcher.wait_for_notes('secret', 2).values()
      self.assertEqual(secret, other)
      above = psutil.Process(launcher.process.pid)
      below = above.children(recursive=True)
      self.assertLen(below, 4)
      for process in (above, *below):
        self.assertNotIn(secret, ' '.join(process.cmdline()))
      (launcher.directory / 'end').touch()
      self.assert_ends(launcher, 0)
      self.assertNotIn(secret.encode(), launcher.stdout())
      self.assertNotIn(secret, launcher.stderr())


class CommandLineTest(parameterized.TestCase):
  @parameterized.parameters(
    (['--num_workers=2'], 'Expected a command after a lone --, got none. Fix'),
    (
      ['--num_workers=2', 'true'],
      "Expected only flags before a lone --, got 'true'. Fix: write -- before",
    ),
    (
      ['--num_workers=two', '--', 'true'],
      'Expected an integer, got --num_workers=two. Fix: write for instance '
      '--num_workers=1.',
    ),
    (['--grace_period=x', '--', 'true'], 'a number, got --grace_period=x.'),
    (['--chief=x', '--', 'true'], 'True or False, got --chief=x.'),
    (['--num_worker=2', '--', 'true'], 'num_worker'),
    (['--num_ps=-2', '--', 'true'], '--num_ps=-2'),
    (['--rank_filter=', '--', 'true'], 'got --rank_filter=.'),
    (
      ['--num_workers=2', '--chief', '--rank_filter=worker:2', '--', 'true'],
      '(chief 0, worker 0, worker 1), got --rank_filter=worker:2.',
    ),
  )
  def test_invalid_command_line_is_explained(self, arguments, words):
    status, stdout, stderr = programs.run(arguments)
    self.assertEqual((status, stdout), (2, ''))
    self.assertIn(words, stderr)
    self.assertIn('Usage: tfs launch', stderr)
    self.assertNotIn('Traceback', stderr)

  def test_dry_run_starts_nothing(self):
    touched = os.path.join(self.create_tempdir().full_path, 'touched')
    arguments = ['--num_workers=2', '--num_ps=1', '--dry_run', '--']
    status, stdout, stderr = programs.run([*arguments, 'touch', '--', touched])
    self.assertEqual((status, stderr), (0, ''))
    self.assertFalse(os.path.exists(touched))
    lines = stdout.splitlines()
    self.assertLen(lines, 3)
    for line, name in zip(lines, ('worker 0', 'worker 1', 'ps 0'), strict=True):
      self.assertStartsWith(line, f'[{name}] ')
      self.assertEndsWith(line, f'touch -- {touched}')
      self.assertIn("TFS_SECRET='<hidden>'", line)
      task = {'type': name.split()[0], 'index': int(name.split()[1])}
      self.assertIn(f'"task": {json.dumps(task)}', line)


if __name__ == '__main__':
  absltest.main()
