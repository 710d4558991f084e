"""What of the tasks' output the launcher shows, and how it looks."""

import os
import pathlib
import pty
import select
import sys
import time

import pytest
from absl.testing import absltest

from benchmarks import processes
from tests.launch import programs


class ShownTest(absltest.TestCase):
  def test_rank_filter_hides_lines_but_not_from_the_logs(self):
    code = """
print('from', name, flush=True)
if name == 'worker_0':
  wait_for('pid', 'worker_1')
  sys.exit(4)
time.sleep(600)
"""
    directory = pathlib.Path(self.create_tempdir().full_path)
    logs = directory / 'logs'
    flags = (
      *('--num_workers=2', '--chief', '--rank_filter=chief,worker:1'),
      *(f'--log_dir={logs}', '--grace_period=1'),
    )
    with programs.Launcher(directory, flags, code) as launcher:
      self.assertEqual(launcher.wait(), 4)
      shown = launcher.stdout().decode().splitlines()
      self.assertIn('[worker 1] from worker_1', shown)
      self.assertNotIn('[worker 0] from worker_0', shown)
      self.assertIn(
        'its last lines:\n  from worker_0\n', launcher.stderr().lower()
      )
    self.assertEqual((logs / 'worker_0.log').read_text(), 'from worker_0\n')


@pytest.mark.skipif(sys.platform != 'linux', reason='ends of terminals differ')
class ColourTest(absltest.TestCase):
  def _on_terminal(self, **environment):
    """What the launcher writes to a terminal."""
    ours, theirs = pty.openpty()
    self.addCleanup(os.close, ours)
    command = processes.Command(
      [sys.executable, '-c', programs.PAST_THE_DOOR, '--', 'echo', 'hello'],
      stdout=theirs,
      env=processes.environment(environment, without=['NO_COLOR']),
      cwd=self.create_tempdir().full_path,
      deadline_seconds=programs.DEADLINE_SECONDS,
    )
    os.close(theirs)
    written = b''
    ends_at = time.monotonic() + programs.DEADLINE_SECONDS
    with command:
      while select.select([ours], [], [], ends_at - time.monotonic())[0]:
        try:
          data = os.read(ours, 4096)
        # The other end of a terminal is closed.
        except OSError:
          break
        if not data:
          break
        written += data
      self.assertEqual(command.wait(), 0)
    return written.replace(b'\r', b'')

  def test_terminal_gets_colours(self):
    self.assertEqual(
      self._on_terminal(NO_COLOR=''), b'\x1b[36m[worker 0]\x1b[0m hello\n'
    )

  @pytest.mark.soak
  def test_not_where_they_are_not_wanted(self):
    self.assertEqual(self._on_terminal(NO_COLOR='1'), b'[worker 0] hello\n')

  def test_not_in_a_file(self):
    directory = self.create_tempdir().full_path
    _, stdout, _ = programs.run(['--', 'echo', 'hello'], directory)
    self.assertEqual(stdout, '[worker 0] hello\n')


if __name__ == '__main__':
  absltest.main()
