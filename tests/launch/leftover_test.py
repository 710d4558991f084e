"""Who is lost, or still runs, when another training task has ended well."""

import signal

import pytest
from absl.testing import absltest, parameterized

from tests import tiers
from tests.launch import programs

_HELPERS = """
def wait_for_end_of(whose, of_attempt=0):
  pid = wait_for('pid', whose, of_attempt)
  try:
    while True:
      os.kill(pid, 0)
      time.sleep(0.01)
  except ProcessLookupError:
    # The launcher hears of it.
    time.sleep(0.1)
"""
# The first attempt of `victim` is lost; the other ends well once it is back.
_RETURNED = """
if name == '{victim}':
  if attempt == 0:
    sys.exit({status})
  {then}
  note('ready', 1)
  time.sleep(600)
wait_for('ready', '{victim}', 1)
"""


@pytest.mark.multi_process
class LeftoverTest(parameterized.TestCase):
  def _launch(self, code, *flags):
    directory = self.create_tempdir().full_path
    flags = ('--num_workers=2', '--max_restarts=3', *flags)
    launcher = programs.Launcher(directory, flags, _HELPERS + code)
    return self.enter_context(launcher)

  def test_task_that_is_lost_is_not_started_again(self):
    code = """
if name == 'worker_1':
  wait_for_end_of('worker_0')
  os.kill(os.getpid(), signal.SIGKILL)
"""
    launcher = self._launch(code)
    self.assertEqual(launcher.wait(), 0, launcher.stderr())
    self.assertEqual(list(launcher.notes('pid')), ['worker_0-0', 'worker_1-0'])
    (line,) = launcher.stderr().splitlines()
    self.assertEqual(
      line,
      '[launch] worker 1: killed by SIGKILL. Not starting it again: worker 0 '
      'has ended well, so it would train alone, from the beginning.',
    )

  @tiers.parameters(tiers.soak('worker_0'), 'worker_1')
  def test_task_that_came_back_is_ended(self, victim):
    self.assert_returned(victim, 'pass')

  @pytest.mark.soak
  def test_task_that_came_back_and_ignores_sigterm_is_killed(self):
    self.assert_returned('worker_1', 'signal.signal(15, signal.SIG_IGN)')

  def assert_returned(self, victim, then):
    """A victim that came back, did `then` and sleeps, is no failure."""
    code = _RETURNED.format(victim=victim, status=143, then=then)
    launcher = self._launch(code, '--grace_period=0.2')
    self.assertEqual(launcher.wait(), 0, launcher.stderr())
    self.assertLen(launcher.notes('pid'), 3)
    self.assertEmpty(launcher.alive())
    again, ended = launcher.stderr().splitlines()
    self.assertIn('Starting it again (1 of 3)', again)
    other = 'worker 1' if victim == 'worker_0' else 'worker 0'
    self.assertIn(f'{other} has ended well', ended)
    self.assertIn(f'Ending {victim.replace("_", " ")}', ended)

  @pytest.mark.soak
  def test_task_that_came_back_and_finds_nobody_is_no_failure(self):
    code = _RETURNED.format(
      victim='worker_1',
      status=143,
      then="note('ready', 1), wait_for_end_of('worker_0'), sys.exit(1)",
    )
    launcher = self._launch(code)
    self.assertEqual(launcher.wait(), 0, launcher.stderr())
    self.assertLen(launcher.notes('pid'), 3)

  @pytest.mark.soak
  def test_task_that_came_back_has_time_to_end_by_itself(self):
    code = _RETURNED.format(
      victim='worker_0',
      status=143,
      then="note('ready', 1), wait_for_end_of('worker_1'), "
      "note('saved', 1), sys.exit(0)",
    )
    launcher = self._launch(code)
    self.assertEqual(launcher.wait(), 0, launcher.stderr())
    self.assertEqual(launcher.notes('saved'), {'worker_0-1': 1})

  def test_result_that_is_lost_with_the_first_worker_is_no_success(self):
    code = """
if name == 'worker_0':
  wait_for_end_of('worker_1')
  os.kill(os.getpid(), signal.SIGKILL)
"""
    launcher = self._launch(code)
    self.assertEqual(launcher.wait(), 128 + signal.SIGKILL)
    self.assertLen(launcher.notes('pid'), 2)
    self.assertIn('worker 0 failed first', launcher.stderr())

  @pytest.mark.soak
  def test_chief_is_whose_result_counts(self):
    code = """
if name == 'chief_0':
  wait_for_end_of('worker_0')
  wait_for_end_of('worker_1')
elif name == 'worker_0':
  wait_for_end_of('worker_1')
  os.kill(os.getpid(), signal.SIGKILL)
"""
    launcher = self._launch(code, '--chief')
    self.assertEqual(launcher.wait(), 0, launcher.stderr())
    self.assertLen(launcher.notes('pid'), 3)

  def test_error_of_the_program_stays_one(self):
    code = """
if name == 'worker_1':
  wait_for_end_of('worker_0')
  sys.exit(1)
"""
    launcher = self._launch(code)
    self.assertEqual(launcher.wait(), 1)
    self.assertLen(launcher.notes('pid'), 2)

  @pytest.mark.soak
  def test_job_that_was_started_again_as_a_whole_ends_by_itself(self):
    code = """
if attempt == 0:
  sys.exit(143)
if name == 'worker_1':
  wait_for('pid', 'worker_0', 1)
else:
  wait_for_end_of('worker_1', 1)
  # Longer than the grace period.
  time.sleep(1.5)
  note('saved', 1)
"""
    launcher = self._launch(code, '--grace_period=0.2')
    self.assertEqual(launcher.wait(), 0, launcher.stderr())
    self.assertEqual(launcher.notes('saved'), {'worker_0-1': 1})

  @pytest.mark.soak
  def test_with_parameter_servers_a_lost_worker_is_started_again(self):
    code = """
if task['type'] == 'ps':
  time.sleep(600)
if name == 'worker_1' and attempt == 0:
  wait_for_end_of('worker_0')
  sys.exit(143)
"""
    launcher = self._launch(code, '--num_ps=1')
    self.assertEqual(launcher.wait(), 0, launcher.stderr())
    self.assertIn('worker_1-1', launcher.notes('pid'))


if __name__ == '__main__':
  absltest.main()
