"""The runner of processes reports outcomes, keeps deadlines and leaves nothing
behind.
"""

import os
import sys
import time

import psutil
import pytest
from absl.testing import absltest

from benchmarks import processes as commands
from tests import processes
from tf_strategies import errors

_SECONDS = 120.0


def _sleep(rank):
  time.sleep(600)


def _start_one_and_tell(rank, path):
  """Starts a process that sleeps. The test then kills both."""
  # This process is daemonic and could not have children otherwise.
  processes.multiprocessing.current_process()._config['daemon'] = False
  workers = processes.Workers(_sleep, 1)
  with open(f'{path}~', 'w', encoding='utf-8') as f:
    f.write(str(workers.pid(0)))
  os.rename(f'{path}~', path)
  time.sleep(600)


def _is_running(pid):
  try:
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return False


class WorkersTest(absltest.TestCase):
  def test_deadline(self):
    with processes.Workers(_sleep, 1, deadline=0.1) as workers:
      (outcome,) = workers.wait()
      self.assertFalse(workers.is_alive(0))
    with self.assertRaisesRegex(AssertionError, 'ran into the deadline'):
      outcome.result()

  @pytest.mark.soak
  def test_ends_with_the_process_that_started_it(self):
    path = os.path.join(self.create_tempdir().full_path, 'pid')
    # A copy would share the server that makes copies.
    with processes.Workers(
      _start_one_and_tell, 1, args=(path,), is_fresh=True
    ) as workers:
      processes.wait_until(lambda: os.path.exists(path))
      with open(path, encoding='utf-8') as f:
        pid = int(f.read())
      self.assertTrue(_is_running(pid))
      workers.kill(0)
      processes.wait_until(lambda: not _is_running(pid))


class CommandTest(absltest.TestCase):
  def _python(self, code, **options):
    words = [sys.executable, '-I', '-S', '-c', code]
    return self.enter_context(commands.Command(words, name='it', **options))

  def test_deadline_ends_it_and_what_is_below(self):
    code = (
      'import subprocess, sys, time\n'
      'child = subprocess.Popen([sys.executable, "-c", "import time; '
      'time.sleep(600)"])\n'
      'print(child.pid, flush=True)\n'
      'time.sleep(600)'
    )
    command = self._python(code, deadline_seconds=3.0)
    command.wait_until(lambda: command.output().endswith('\n'))
    below = int(command.output())
    with self.assertRaisesRegex(
      errors.WorkerUnavailableError,
      f'did not end within {3 * processes.DEADLINE_FACTOR:g} s(?s:.*){below}',
    ):
      command.wait()
    self.assertFalse(_is_running(command.pid))
    self.assertFalse(_is_running(below))

  def test_ends_too_early(self):
    command = self._python('print("last words")')
    with self.assertRaisesRegex(
      errors.WorkerUnavailableError, 'ended too early, with status 0(?s:.*)last'
    ):
      command.wait_until(lambda: False)

  def test_environment_leaves_out_clusters_and_proxies(self):
    outside = {'TF_CONFIG': '{}', 'HTTPS_PROXY': 'x', 'KEPT': 'y'}
    with absltest.mock.patch.dict(os.environ, outside):
      found = commands.environment({'NEW': 'z'}, without=['PATH'])
    self.assertContainsSubset({'KEPT': 'y', 'NEW': 'z'}.items(), found.items())
    self.assertNoCommonElements(found, ['TF_CONFIG', 'HTTPS_PROXY', 'PATH'])


class RunTest(absltest.TestCase):
  def test_status_and_both_outputs(self):
    code = 'import sys; print("out"); sys.exit("err")'
    with self.assertRaisesRegex(
      errors.WorkerUnavailableError, r'ended with status 1\.(?s:.*)out\s*err'
    ):
      commands.run([sys.executable, '-c', code], is_checked=True)


if __name__ == '__main__':
  absltest.main()
