"""Jobs with parameter servers and a chief: they are over when the chief is."""

import signal

import pytest
from absl.testing import absltest, parameterized

from tests.launch import programs

# A server that says which signal ended it.
_SERVE = """
def end(number, frame):
  note('ended_by', number)
  sys.exit(0)
signal.signal(signal.SIGTERM, end)
note('ready', 1)
time.sleep(600)
"""
_PARAMETER_SERVERS = ('--chief', '--num_workers=2', '--num_ps=1', '--evaluator')


class ParameterServersTest(parameterized.TestCase):
  def _launch(self, code, *flags):
    directory = self.create_tempdir().full_path
    return self.enter_context(programs.Launcher(directory, flags, code))

  @pytest.mark.smoke
  def test_servers_are_ended_when_the_chief_has_ended(self):
    code = f"""
if name == 'chief_0':
  for other in ('worker_0', 'worker_1', 'ps_0', 'evaluator_0'):
    wait_for('ready', other)
  sys.exit(0)
{_SERVE}
"""
    launcher = self._launch(code, *_PARAMETER_SERVERS, '--grace_period=60')
    self.assertEqual(launcher.wait(), 0, launcher.stderr())
    self.assertEqual(
      launcher.notes('ended_by'),
      dict.fromkeys(
        ['evaluator_0-0', 'ps_0-0', 'worker_0-0', 'worker_1-0'],
        signal.SIGTERM,
      ),
    )
    self.assertLen(launcher.pids(), 5)
    self.assertEmpty(launcher.alive())
    self.assertEqual(launcher.stderr(), '')

  @pytest.mark.smoke
  def test_killed_server_is_started_again(self):
    code = f"""
if name == 'chief_0':
  wait_for('ready', 'ps_0', 1)
  sys.exit(0)
if name == 'ps_0' and attempt == 0:
  os.kill(os.getpid(), signal.SIGKILL)
{_SERVE}
"""
    launcher = self._launch(code, *_PARAMETER_SERVERS, '--max_restarts=1')
    self.assertEqual(launcher.wait(), 0, launcher.stderr())
    self.assertIn('ps_0-1', launcher.notes('pid'))
    self.assertEmpty(launcher.alive())
    self.assertIn(
      'ps 0: killed by SIGKILL. Starting it again (1 of 1)', launcher.stderr()
    )

  def test_server_that_was_told_to_end_is_started_again(self):
    # It ends as `run_task` does.
    code = """
if name == 'chief_0':
  wait_for('ready', 'ps_0', 1)
  sys.exit(0)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
note('ready', 1)
if attempt == 0:
  os.kill(os.getpid(), signal.SIGTERM)
time.sleep(600)
"""
    flags = ('--chief', '--num_workers=0', '--num_ps=1', '--max_restarts=1')
    launcher = self._launch(code, *flags)
    self.assertEqual(launcher.wait(), 0, launcher.stderr())
    self.assertIn('ps 0: exit status 143. Starting it', launcher.stderr())

  def test_chief_that_fails_fails_the_job(self):
    code = """
if name == 'chief_0':
  sys.exit(4)
time.sleep(600)
"""
    launcher = self._launch(code, *_PARAMETER_SERVERS)
    self.assertEqual(launcher.wait(), 4)
    self.assertEmpty(launcher.alive())

  @parameterized.parameters('--num_ps=1', '--chief')
  def test_otherwise_workers_train_to_their_end(self, flag):
    code = """
if task['type'] == 'ps':
  time.sleep(600)
if name == 'worker_1':
  if 'chief' in config['cluster']:
    wait_for('end', 'chief_0')
  wait_for('end', 'worker_0')
  # Long enough to be ended, if the end of the others were that of the job.
  time.sleep(0.5)
note('end', 1)
"""
    launcher = self._launch(code, '--num_workers=2', flag)
    self.assertEqual(launcher.wait(), 0, launcher.stderr())
    self.assertIn('worker_1-0', launcher.notes('end'))
    self.assertEmpty(launcher.alive())


if __name__ == '__main__':
  absltest.main()
