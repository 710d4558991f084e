"""Jobs that fail, are interrupted or lose their launcher: nothing is left."""

import os
import pathlib
import signal
import subprocess
import sys

import psutil
import pytest
from absl.testing import absltest, parameterized

from benchmarks import processes
from tests import tiers
from tests.launch import programs

# A process that left the task's process group and ignores SIGTERM.
_GRANDCHILD = """
child = subprocess.Popen(
  [sys.executable, '-I', '-S', '-c',
   'import signal, sys, time; signal.signal(15, signal.SIG_IGN);'
   'print(1, flush=True); time.sleep(600)'],
  start_new_session=True, stdout=subprocess.PIPE)
child.stdout.read(1)
note('grandchild', child.pid)
"""
_IGNORE = 'for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)\n'
_SLEEP = "note('ready', 1)\ntime.sleep(600)\n"


def _indented(code):
  return code.strip().replace('\n', '\n  ')


class _JobTest(parameterized.TestCase):
  def _launch(self, code, *flags, **kwargs):
    directory = self.create_tempdir().full_path
    flags = ('--grace_period=0.3', *flags)
    launcher = programs.Launcher(directory, flags, code, **kwargs)
    return self.enter_context(launcher)


class FailureTest(_JobTest):
  @pytest.mark.smoke
  def test_first_failure_ends_the_job_and_is_shown(self):
    code = """
if name == 'worker_1':
  wait_for('ready', 'worker_0'), wait_for('ready', 'worker_2')
  for i in range(30):
    print('line', i, flush=True)
  sys.exit(3)
note('ready', 1)
try:
  time.sleep(600)
finally:
  print('not reached', flush=True)
"""
    launcher = self._launch(code, '--num_workers=3')
    self.assertEqual(launcher.wait(), 3)
    self.assertEmpty(launcher.alive())
    self.assertLen(launcher.pids(), 3)
    report = launcher.stderr().partition('worker 1 failed first')[2]
    first, *tail = report.splitlines()
    self.assertEqual(first, ': exit status 3. Its last lines:')
    self.assertEqual(tail, [f'  line {i}' for i in range(10, 30)])
    self.assertEqual(
      launcher.stdout().splitlines(),
      [b'[worker 1] line %d' % i for i in range(30)],
    )

  def test_the_first_is_named_though_both_are_heard_of_at_once(self):
    launcher = self._launch(_SLEEP, '--num_workers=2')
    launcher.wait_for_notes('ready', 2)
    pids = launcher.notes('pid')
    launcher.process.send_signal(signal.SIGSTOP)
    for index, number in ((1, signal.SIGABRT), (0, signal.SIGBUS)):
      pid = pids[f'worker_{index}-0']
      os.kill(pid, number)
      # Its reaper has noticed when it has reaped it.
      launcher.wait_until(lambda pid=pid: not psutil.pid_exists(pid))
    launcher.process.send_signal(signal.SIGCONT)
    self.assertEqual(launcher.wait(), 128 + signal.SIGABRT)
    self.assertIn('worker 1 failed first', launcher.stderr())
    self.assertNotIn('worker 0 failed', launcher.stderr())

  def test_who_fails_first_is_named_though_its_child_ends_last(self):
    code = f"""
if name == 'worker_1':
  wait_for('ready', 'worker_0')
  {_indented(_GRANDCHILD)}
  sys.exit(3)
note('ready', 1)
child = wait_for('grandchild', 'worker_1')
time.sleep(0.3)
sys.exit(4)
"""
    launcher = self._launch(code, '--num_workers=2', '--grace_period=2')
    self.assertEqual(launcher.wait(), 3)
    self.assertIn('worker 1 failed first: exit status 3', launcher.stderr())

  def test_task_that_ignores_sigterm_is_killed(self):
    code = f"""
if name == 'worker_1':
  wait_for('ready', 'worker_0')
  sys.exit(5)
{_IGNORE}{_GRANDCHILD}{_SLEEP}
"""
    launcher = self._launch(code, '--num_workers=2', '--grace_period=0.5')
    self.assertEqual(launcher.wait(), 5)
    self.assertLen(launcher.pids(), 3)
    self.assertEmpty(launcher.alive())

  def test_command_that_does_not_exist(self):
    directory = self.create_tempdir().full_path
    status, stdout, stderr = programs.run(['--', 'no-such-command'], directory)
    self.assertEqual(status, 127)
    self.assertIn("[worker 0] cannot start 'no-such-command'", stdout)
    self.assertIn('worker 0 failed first: exit status 127', stderr)


class RestartTest(_JobTest):
  @pytest.mark.smoke
  def test_failed_task_is_started_again_alone(self):
    code = """
note('config', [os.environ['TF_CONFIG'], os.environ['TFS_SECRET']])
print('attempt', attempt, flush=True)
if name == 'worker_1' and attempt < 2:
  sys.exit(7)
if name == 'worker_0':
  wait_for('pid', 'worker_1', 2)
"""
    launcher = self._launch(code, '--num_workers=2', '--max_restarts=2')
    self.assertEqual(launcher.wait(), 0, launcher.stderr())
    pids = launcher.notes('pid')
    self.assertEqual(
      list(pids), ['worker_0-0', 'worker_1-0', 'worker_1-1', 'worker_1-2']
    )
    self.assertLen(set(pids.values()), 4)
    configs = launcher.notes('config')
    self.assertEqual(configs['worker_1-0'], configs['worker_1-2'])
    self.assertNotEqual(configs['worker_1-0'], configs['worker_0-0'])
    for count in (1, 2):
      self.assertIn(
        f'worker 1: exit status 7. Starting it again ({count} of 2)',
        launcher.stderr(),
      )
    of_worker_1 = [
      line for line in launcher.stdout().splitlines() if b'worker 1' in line
    ]
    self.assertEqual(
      of_worker_1, [b'[worker 1] attempt %d' % i for i in range(3)]
    )

  def test_last_lines_are_those_of_the_last_attempt(self):
    code = """
if attempt == 0:
  print('words of the first attempt', flush=True)
  sys.exit(3)
sys.exit(4)
"""
    launcher = self._launch(code, '--max_restarts=1')
    self.assertEqual(launcher.wait(), 4)
    self.assertIn(
      'exit status 4 (restarts: 1). It wrote nothing.', launcher.stderr()
    )

  def test_wrong_command_line_is_not_started_again(self):
    launcher = self._launch('sys.exit(2)', '--max_restarts=2')
    self.assertEqual(launcher.wait(), 2)
    self.assertLen(launcher.notes('pid'), 1)

  def test_task_is_not_started_again_when_another_has_ended_well(self):
    code = """
if name == 'worker_1':
  pid = wait_for('pid', 'worker_0')
  while os.path.exists(f'/proc/{pid}'):
    time.sleep(0.01)
  time.sleep(0.5)
  sys.exit(3)
"""
    launcher = self._launch(code, '--num_workers=2', '--max_restarts=2')
    self.assertEqual(launcher.wait(), 3)
    self.assertLen(launcher.notes('pid'), 2)

  def test_nothing_of_an_attempt_is_left_when_the_next_begins(self):
    code = f"""
if attempt == 0:
  {_indented(_GRANDCHILD)}
  sys.exit(1)
left = wait_for('grandchild', name, 0)
try:
  os.kill(left, 0)
except ProcessLookupError:
  note('gone', left)
"""
    launcher = self._launch(code, '--max_restarts=1', '--grace_period=0.3')
    self.assertEqual(launcher.wait(), 0, launcher.stderr())
    gone = launcher.notes('gone')['worker_0-1']
    self.assertEqual(gone, launcher.notes('grandchild')['worker_0-0'])


class SignalTest(_JobTest):
  def setUp(self):
    super().setUp()
    # Tests under nohup ignore SIGHUP, and their child processes would too.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    self.addCleanup(signal.signal, signal.SIGHUP, before)

  @tiers.parameters(signal.SIGHUP, tiers.soak(signal.SIGINT))
  def test_signal_is_forwarded_and_nobody_is_started_again(self, number):
    code = """
def end(number, frame):
  note('signal', number)
  sys.exit(3)
for number in (1, 2, 15):
  signal.signal(number, end)
note('ready', 1)
time.sleep(600)
"""
    launcher = self._launch(
      code, '--num_workers=2', '--num_ps=1', '--max_restarts=5'
    )
    launcher.wait_for_notes('ready', 3)
    launcher.process.send_signal(number)
    self.assertEqual(launcher.wait(), 128 + number)
    self.assertEqual(
      launcher.notes('signal'),
      dict.fromkeys(['ps_0-0', 'worker_0-0', 'worker_1-0'], number),
    )
    self.assertEmpty(launcher.alive())
    self.assertIn(f'{number.name}: ending all tasks', launcher.stderr())

  def test_task_that_is_being_ended_gets_no_second_sigterm(self):
    code = """
count = 0
def save(number, frame):
  global count
  count += 1
signal.signal(signal.SIGTERM, save)
if name == 'worker_1':
  wait_for('ready', 'worker_0')
  sys.exit(3)
note('ready', 1)
while not count:
  time.sleep(0.01)
note('saving', 1)
time.sleep(2)
note('saved', count)
"""
    launcher = self._launch(
      code, '--num_workers=2', '--num_ps=1', '--grace_period=30'
    )
    launcher.wait_for_notes('saving', 1)
    launcher.process.send_signal(signal.SIGTERM)
    self.assertEqual(launcher.wait(), 3)
    self.assertEqual(launcher.notes('saved')['worker_0-0'], 1)


class KilledTest(_JobTest):
  def test_launcher_that_is_killed_leaves_nothing(self):
    code = _IGNORE + _GRANDCHILD + _SLEEP
    launcher = self._launch(code, '--num_workers=2', '--grace_period=0.5')
    launcher.wait_for_notes('ready', 2)
    reapers = [reaper.pid for reaper in launcher.reapers()]
    self.assertLen(reapers, 2)
    self.assertLen(launcher.alive(), 4)
    launcher.process.kill()
    self.assertEqual(launcher.wait(), -signal.SIGKILL)
    launcher.wait_until(lambda: not launcher.alive())
    launcher.wait_until(lambda: not any(map(programs.is_running, reapers)))

  def test_launcher_that_is_killed_while_it_starts_tasks_leaves_nothing(self):
    launcher = self._launch(
      _IGNORE + _SLEEP, '--num_workers=4', '--grace_period=0.3'
    )
    launcher.wait_for_notes('pid', 1)
    # Also those that had no time to note anything, and their reapers.
    script = str(launcher.directory / 'task.py')
    self.assertNotEmpty(programs.with_argument(script))
    launcher.process.kill()
    launcher.wait()
    launcher.wait_until(lambda: not programs.with_argument(script))

  @pytest.mark.skipif(sys.platform != 'linux', reason='prctl is of Linux')
  def test_reaper_that_is_killed_takes_its_task_along(self):
    code = _IGNORE + _GRANDCHILD + _SLEEP
    launcher = self._launch(code, '--num_workers=2', '--grace_period=0.5')
    launcher.wait_for_notes('ready', 2)
    launcher.reapers()[1].kill()
    self.assertEqual(launcher.wait(), 137)
    self.assertLen(launcher.pids(), 4)
    self.assertEmpty(launcher.alive())


class OutputTest(_JobTest):
  def test_lines_are_whole_and_every_byte_survives(self):
    code = r"""
number = task['index']
raw = os.fdopen(1, 'wb', buffering=0)
def write(data):
  while data:
    data = data[raw.write(data):]
for i in range(200):
  # In pieces, so that another task's lines come between.
  write(b'%d:%d:' % (number, i))
  write(b'x' * ((i * 37 + number) % 500))
  write(b'\n')
write(b'%d:' % number + bytes([48 + number]) * 1_500_000 + b'\n')
write(bytes(b for b in range(256) if b != 10) + b'\xff\xfe\xc3(\n\n')
print('error', number, file=sys.stderr, flush=True)
write(b'unfinished %d' % number)
"""
    directory = self.create_tempdir().full_path
    launcher = self._launch(
      code, '--num_workers=3', f'--log_dir={directory}/new/logs'
    )
    self.assertEqual(launcher.wait(), 0, launcher.stderr())
    *lines, last = launcher.stdout().split(b'\n')
    self.assertEqual(last, b'')
    for number in range(3):
      expected = [
        b'%d:%d:' % (number, i) + b'x' * ((i * 37 + number) % 500)
        for i in range(200)
      ]
      expected.append(b'%d:' % number + bytes([48 + number]) * 1_500_000)
      odd = bytes(b for b in range(256) if b != 10) + b'\xff\xfe\xc3('
      expected += [odd, b'', b'error %d' % number, b'unfinished %d' % number]
      start = b'[worker %d] ' % number
      found = [line[len(start) :] for line in lines if line.startswith(start)]
      # Of a line with carriage returns, its last text is shown.
      shown = [line.rpartition(b'\r')[2] for line in expected]
      self.assertTrue(found == shown, f'lines of worker {number} differ')
      log = pathlib.Path(directory, 'new', 'logs', f'worker_{number}.log')
      self.assertTrue(log.read_bytes() == b'\n'.join(expected))
    self.assertLen(lines, 3 * 205)

  def test_reader_that_went_away_ends_the_job(self):
    code = """
note('ready', 1)
while True:
  print('x' * 1000, flush=True)
"""
    launcher = self._launch(code, '--num_workers=2', stdout=subprocess.PIPE)
    launcher.wait_for_notes('ready', 2)
    launcher.process.stdout.close()
    self.assertEqual(launcher.wait(), 128 + signal.SIGPIPE)
    self.assertEmpty(launcher.alive())

  def test_closed_stdout_takes_no_descriptor_of_ours(self):
    launch = [sys.executable, '-m', 'tf_strategies.launch', '--num_workers=2']
    task = ['--', 'sh', '-c', 'echo last words; exit 3']
    done = processes.run(
      ['sh', '-c', '"$@" >&-', 'sh', *launch, *task],
      env=processes.python_environment(),
    )
    self.assertEqual(done.returncode, 3, done.stderr)
    self.assertIn('exit status 3. Its last lines:\n  last words', done.stderr)
    self.assertEqual(done.stdout, '')


if __name__ == '__main__':
  absltest.main()
