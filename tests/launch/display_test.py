"""What of the tasks' output the launcher shows, and how it looks."""

import os
import pathlib
import pty
import select
import sys
import time

import pytest
from absl.testing import absltest, parameterized

from benchmarks import processes
from tests import tiers
from tests.launch import programs

_SPEAK = "print('from', name, flush=True)\n"


@pytest.mark.multi_process
class ShownTest(parameterized.TestCase):
  def _run(self, code, *flags):
    directory = self.create_tempdir().full_path
    flags = ('--grace_period=1', *flags)
    with programs.Launcher(directory, flags, code) as launcher:
      status = launcher.wait()
      return (
        status,
        sorted(launcher.stdout().decode().splitlines()),
        launcher.stderr(),
      )

  def _logs(self, directory):
    return {
      path.name: path.read_text(encoding='utf-8')
      for path in sorted(pathlib.Path(directory).iterdir())
    }

  def test_rank_filter_hides_lines_but_not_from_the_logs(self):
    logs = self.create_tempdir().full_path
    status, lines, _ = self._run(
      _SPEAK,
      '--num_workers=3',
      '--chief',
      '--rank_filter=chief,worker:1-2',
      f'--log_dir={logs}',
    )
    self.assertEqual(status, 0)
    self.assertEqual(
      lines,
      [
        '[chief 0] from chief_0',
        '[worker 1] from worker_1',
        '[worker 2] from worker_2',
      ],
    )
    self.assertEqual(
      self._logs(logs),
      {
        f'{name}.log': f'from {name}\n'
        for name in ('chief_0', 'worker_0', 'worker_1', 'worker_2')
      },
    )

  def test_without_tee_only_the_logs_are_written(self):
    logs = self.create_tempdir().full_path
    status, lines, stderr = self._run(
      _SPEAK, '--num_workers=2', '--notee', f'--log_dir={logs}'
    )
    self.assertEqual((status, lines, stderr), (0, [], ''))
    self.assertEqual(
      self._logs(logs),
      {f'worker_{i}.log': f'from worker_{i}\n' for i in range(2)},
    )

  @tiers.parameters('--rank_filter=worker:0', tiers.soak('--notee'))
  def test_last_lines_of_a_failure_appear_in_any_case(self, flag):
    code = """
if name == 'worker_1':
  print('out of luck', flush=True)
  sys.exit(4)
time.sleep(600)
"""
    logs = self.create_tempdir().full_path
    status, lines, stderr = self._run(
      code, '--num_workers=2', flag, f'--log_dir={logs}'
    )
    self.assertEqual((status, lines), (4, []))
    self.assertIn('worker 1 failed first: exit status 4', stderr)
    self.assertIn('  out of luck\n', stderr)


@pytest.mark.multi_process
class RefusedTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('unknown', ['--rank_filter=gpu'], '--rank_filter=gpu'),
    ('index', ['--rank_filter=worker:1'], '--rank_filter=worker:1'),
    ('lost', ['--notee'], '--notee without --log_dir'),
    ('both', ['--notee', '--rank_filter=worker'], '--notee with --rank_filter'),
  )
  def test_wrong_command_line_is_explained(self, arguments, words):
    directory = self.create_tempdir().full_path
    status, stdout, stderr = programs.run([*arguments, '--', 'true'], directory)
    self.assertEqual((status, stdout), (2, ''))
    self.assertIn(words, stderr)
    self.assertNotIn('Traceback', stderr)


@pytest.mark.multi_process
@pytest.mark.skipif(sys.platform != 'linux', reason='ends of terminals differ')
class ColourTest(parameterized.TestCase):
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

  @parameterized.parameters({}, {'NO_COLOR': ''})
  def test_terminal_gets_colours(self, **environment):
    self.assertEqual(
      self._on_terminal(**environment), b'\x1b[36m[worker 0]\x1b[0m hello\n'
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
