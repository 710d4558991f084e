"""The runner of processes keeps deadlines and ends all processes."""

import sys
import time

from absl.testing import absltest

from benchmarks import processes as commands
from tests import processes
from tests.launch import programs
from tf_strategies import errors


def _sleep(rank):
  time.sleep(600)


class WorkersTest(absltest.TestCase):
  def test_deadline_ends_workers(self):
    with processes.Workers(_sleep, 1, deadline=0.1) as workers:
      (outcome,) = workers.wait()
      self.assertFalse(workers.is_alive(0))
    with self.assertRaisesRegex(AssertionError, 'exceeded the deadline'):
      outcome.result()


class CommandTest(absltest.TestCase):
  def _python(self, code, **options):
    words = [sys.executable, '-I', '-S', '-c', code]
    return self.enter_context(commands.Command(words, name='it', **options))

  def test_deadline_ends_a_command_and_its_children(self):
    code = (
      'import subprocess, sys, time\n'
      'child = subprocess.Popen([sys.executable, "-c", "import time; '
      'time.sleep(600)"])\n'
      'print(child.pid, flush=True)\n'
      'time.sleep(600)'
    )
    command = self._python(code, deadline_seconds=3.0)
    command.wait_until(lambda: command.output().endswith('\n'))
    child_pid = int(command.output())
    with self.assertRaisesRegex(
      errors.WorkerUnavailableError,
      f'did not end within {3 * processes.DEADLINE_FACTOR:g} s(?s:.*){child_pid}',
    ):
      command.wait()
    self.assertFalse(programs.is_running(command.pid))
    self.assertFalse(programs.is_running(child_pid))


if __name__ == '__main__':
  absltest.main()
