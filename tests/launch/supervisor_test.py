"""Jobs that fail, are interrupted or lose their launcher leave no process."""

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
# A server that records the signal that ended it.
_SERVE = """
def end(number, frame):
  note('ended_by', number)
  sys.exit(0)
signal.signal(signal.SIGTERM, end)
note('ready', 1)
time.sleep(600)
"""
_PARAMETER_SERVERS = ('--chief', '--num_workers=2', '--num_ps=1', '--evaluator')


def _indented(code):
  return code.strip().replace('\n', '\n  ')


class _JobTest(programs.JobTestCase):
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
    self.assert_ends(launcher, 3)
    self.assertLen(launcher.pids(), 3)
    report = launcher.stderr().partition('worker 1 failed first')[2]
    first, *tail = report.splitlines()
    self.assertEqual(first, ': exit status 3. Its last lines:')
    self.assertEqual(tail, [f'  line {i}' for i in range(10, 30)])
    self.assertEqual(
      launcher.stdout().splitlines(),
      [b'[worker 1] line %d' % i for i in range(30)],
    )

  def test_first_of_two_simultaneously_noticed_failures_is_named(self):
    launcher = self._launch(_SLEEP, '--num_workers=2')
    launcher.wait_for_notes('ready', 2)
    pids = launcher.notes('pid')
    launcher.signal(signal.SIGSTOP)
    for index, number in ((1, signal.SIGABRT), (0, signal.SIGBUS)):
      pid = pids[f'worker_{index}-0']
      os.kill(pid, number)
      # The reaper has noticed the end once the process is gone.
      launcher.wait_until(lambda pid=pid: not psutil.pid_exists(pid))
    launcher.signal(signal.SIGCONT)
    self.assert_ends(launcher, 128 + signal.SIGABRT, 'worker 1 failed first')
    self.assertNotIn('worker 0 failed', launcher.stderr())

  def test_missing_command_is_reported(self):
    status, stdout, stderr = programs.run(['--', 'no-such-command'])
    self.assertEqual(status, 127)
    self.assertIn("[worker 0] cannot start 'no-such-command'", stdout)
    self.assertIn('worker 0 failed first: exit status 127', stderr)


# Name, code of the tasks, flags, exit status, message of the launcher, and number of
# processes.
_ENDS = (
  (
    'child_of_failed_task_ends_last',
    f"""
if name == 'worker_1':
  wait_for('ready', 'worker_0')
  {_indented(_GRANDCHILD)}
  sys.exit(3)
note('ready', 1)
child = wait_for('grandchild', 'worker_1')
time.sleep(0.3)
sys.exit(4)
""",
    ['--num_workers=2', '--grace_period=2'],
    3,
    'worker 1 failed first: exit status 3',
    3,
  ),
  (
    'others_ignore_sigterm',
    f"""
if name == 'worker_1':
  wait_for('ready', 'worker_0')
  sys.exit(5)
{_IGNORE}{_GRANDCHILD}{_SLEEP}
""",
    ['--num_workers=2', '--grace_period=0.5'],
    5,
    'worker 1 failed first: exit status 5',
    3,
  ),
  (
    'others_succeed_meanwhile',
    """
if name == 'worker_1':
  wait_for('pid', 'worker_0')
  sys.exit(3)
time.sleep(1)
""",
    ['--num_workers=2', '--grace_period=60'],
    3,
    'worker 1 failed first: exit status 3',
    2,
  ),
  (
    'chief_of_parameter_servers_fails',
    """
if name == 'chief_0':
  for other in ('worker_0', 'worker_1', 'ps_0', 'evaluator_0'):
    wait_for('pid', other)
  sys.exit(4)
time.sleep(600)
""",
    _PARAMETER_SERVERS,
    4,
    'chief 0 failed first: exit status 4',
    5,
  ),
  tiers.smoke(
    'killed_server_is_restarted',
    f"""
if name == 'chief_0':
  for other in ('worker_0', 'worker_1', 'evaluator_0'):
    wait_for('ready', other)
  wait_for('ready', 'ps_0', 1)
  sys.exit(0)
if name == 'ps_0' and attempt == 0:
  os.kill(os.getpid(), signal.SIGKILL)
{_SERVE}
""",
    [*_PARAMETER_SERVERS, '--max_restarts=1'],
    0,
    'ps 0: killed by SIGKILL. Starting it again (1 of 1)',
    6,
  ),
  (
    'last_lines_of_last_attempt',
    """
if attempt == 0:
  print('output of the first attempt', flush=True)
  sys.exit(3)
sys.exit(4)
""",
    ['--max_restarts=1'],
    4,
    'exit status 4 (restarts: 1). It wrote nothing.',
    2,
  ),
  (
    'invalid_command_line_is_not_restarted',
    'sys.exit(2)',
    ['--max_restarts=2'],
    2,
    'exit status 2',
    1,
  ),
  (
    'no_restart_after_another_succeeded',
    """
if name == 'worker_1':
  pid = wait_for('pid', 'worker_0')
  while os.path.exists(f'/proc/{pid}'):
    time.sleep(0.01)
  time.sleep(0.5)
  sys.exit(3)
""",
    ['--num_workers=2', '--max_restarts=2'],
    3,
    'worker 1 failed first: exit status 3',
    2,
  ),
  (
    'restart_waits_for_processes_of_the_last_attempt',
    f"""
if attempt == 0:
  {_indented(_GRANDCHILD)}
  sys.exit(1)
left = wait_for('grandchild', name, 0)
try:
  os.kill(left, 0)
except ProcessLookupError:
  sys.exit(0)
sys.exit(9)
""",
    ['--max_restarts=1'],
    0,
    'Starting it again (1 of 1)',
    3,
  ),
)


class EndTest(_JobTest):
  @tiers.named_parameters(*_ENDS)
  def test_job_ends_with_status_and_message(
    self, code, flags, status, words, count
  ):
    launcher = self._launch(code, *flags)
    self.assert_ends(launcher, status, words)
    self.assertLen(launcher.pids(), count)


class RestartTest(_JobTest):
  @pytest.mark.smoke
  def test_only_the_failed_task_is_restarted(self):
    code = """
note('config', [os.environ['TF_CONFIG'], os.environ['TFS_SECRET']])
print('attempt', attempt, flush=True)
if name == 'worker_1' and attempt < 2:
  sys.exit(7)
if name == 'worker_0':
  wait_for('pid', 'worker_1', 2)
"""
    launcher = self._launch(code, '--num_workers=2', '--max_restarts=2')
    again = 'worker 1: exit status 7. Starting it again'
    self.assert_ends(launcher, 0, f'{again} (1 of 2)', f'{again} (2 of 2)')
    pids = launcher.notes('pid')
    self.assertEqual(
      list(pids), ['worker_0-0', 'worker_1-0', 'worker_1-1', 'worker_1-2']
    )
    self.assertLen(set(pids.values()), 4)
    configs = launcher.notes('config')
    self.assertEqual(configs['worker_1-0'], configs['worker_1-2'])
    self.assertNotEqual(configs['worker_1-0'], configs['worker_0-0'])
    of_worker_1 = [
      line for line in launcher.stdout().splitlines() if b'worker 1' in line
    ]
    self.assertEqual(
      of_worker_1, [b'[worker 1] attempt %d' % i for i in range(3)]
    )


class SignalTest(_JobTest):
  def setUp(self):
    super().setUp()
    # Tests under nohup ignore SIGHUP, and their child processes would too.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    self.addCleanup(signal.signal, signal.SIGHUP, before)

  @tiers.parameters(signal.SIGHUP, tiers.soak(signal.SIGINT))
  def test_signal_is_forwarded_and_no_task_is_restarted(self, number):
    code = """
# Another process of the task's group.
child = os.fork() if name == 'ps_0' else None
if child == 0:
  name = 'child_of_ps_0'
  note('pid', os.getpid())
def end(number, frame):
  if child:
    os.waitpid(child, 0)
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
    launcher.wait_for_notes('ready', 4)
    launcher.signal(number)
    self.assert_ends(launcher, 128 + number, f'{number.name}: ending all tasks')
    self.assertEqual(
      launcher.notes('signal'),
      dict.fromkeys(
        ['child_of_ps_0-0', 'ps_0-0', 'worker_0-0', 'worker_1-0'], number
      ),
    )

  def test_second_sigterm_during_shutdown_is_not_forwarded(self):
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
    launcher.signal(signal.SIGTERM)
    self.assert_ends(launcher, 3)
    self.assertEqual(launcher.notes('saved')['worker_0-0'], 1)


class KilledTest(_JobTest):
  def launch_two(self):
    """Starts two tasks that ignore signals and have a child each."""
    code = _IGNORE + _GRANDCHILD + _SLEEP
    launcher = self._launch(code, '--num_workers=2', '--grace_period=0.5')
    launcher.wait_for_notes('ready', 2)
    return launcher

  def test_killed_launcher_leaves_no_process(self):
    launcher = self.launch_two()
    reapers = [reaper.pid for reaper in launcher.reapers()]
    self.assertLen(reapers, 2)
    self.assertLen(launcher.alive(), 4)
    launcher.process.kill()
    self.assertEqual(launcher.wait(), -signal.SIGKILL)
    launcher.wait_until(lambda: not launcher.alive())
    launcher.wait_until(lambda: not any(map(programs.is_running, reapers)))

  def test_launcher_killed_during_start_leaves_no_process(self):
    launcher = self._launch(
      _IGNORE + _SLEEP, '--num_workers=4', '--grace_period=0.3'
    )
    launcher.wait_for_notes('pid', 1)
    # Includes processes that have not written a note, and their reapers.
    script = str(launcher.directory / 'task.py')
    self.assertNotEmpty(programs.with_argument(script))
    launcher.process.kill()
    launcher.wait()
    launcher.wait_until(lambda: not programs.with_argument(script))

  @pytest.mark.skipif(sys.platform != 'linux', reason='prctl needs Linux')
  def test_task_ends_with_its_killed_reaper(self):
    launcher = self.launch_two()
    launcher.reapers()[1].kill()
    self.assert_ends(launcher, 137)
    self.assertLen(launcher.pids(), 4)


class OutputTest(_JobTest):
  def test_rank_filter_does_not_apply_to_logs(self):
    code = """
print('from', name, flush=True)
note('ready', 1)
if name == 'worker_0':
  wait_for('ready', 'worker_1'), wait_for('ready', 'chief_0')
  sys.exit(4)
time.sleep(600)
"""
    logs = pathlib.Path(self.create_tempdir().full_path)
    launcher = self._launch(
      code,
      *('--num_workers=2', '--chief', f'--log_dir={logs}'),
      '--rank_filter=chief, worker:1,worker:1',
    )
    self.assert_ends(launcher, 4, 'Its last lines:\n  from worker_0\n')
    shown = launcher.stdout().decode().splitlines()
    self.assertIn('[chief 0] from chief_0', shown)
    self.assertIn('[worker 1] from worker_1', shown)
    self.assertNotIn('[worker 0] from worker_0', shown)
    self.assertEqual((logs / 'worker_0.log').read_text(), 'from worker_0\n')

  def test_lines_are_complete_and_no_byte_is_lost(self):
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
    self.assert_ends(launcher, 0)
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
      # A line with carriage returns shows its last text.
      shown = [line.rpartition(b'\r')[2] for line in expected]
      self.assertTrue(found == shown, f'lines of worker {number} differ')
      log = pathlib.Path(directory, 'new', 'logs', f'worker_{number}.log')
      self.assertTrue(log.read_bytes() == b'\n'.join(expected))
    self.assertLen(lines, 3 * 205)

  def test_closed_output_pipe_ends_the_job(self):
    code = """
note('ready', 1)
while True:
  print('x' * 1000, flush=True)
"""
    launcher = self._launch(code, '--num_workers=2', stdout=subprocess.PIPE)
    launcher.wait_for_notes('ready', 2)
    launcher.process.stdout.close()
    self.assert_ends(launcher, 128 + signal.SIGPIPE)

  def test_closed_stdout_is_not_reused(self):
    launch = [sys.executable, '-m', 'tf_strategies.launch', '--num_workers=2']
    task = ['--', 'sh', '-c', 'echo last words; exit 3']
    done = processes.run(
      ['sh', '-c', '"$@" >&-', 'sh', *launch, *task],
      env=processes.python_environment(),
    )
    self.assertEqual(done.returncode, 3, done.stderr)
    self.assertIn('exit status 3. Its last lines:\n  last words', done.stderr)
    self.assertEqual(done.stdout, '')


class ParameterServersTest(_JobTest):
  """Jobs with parameter servers end with the chief."""

  @pytest.mark.smoke
  def test_other_tasks_end_with_the_chief(self):
    code = f"""
if name == 'chief_0':
  for other in ('worker_0', 'worker_1', 'ps_0', 'evaluator_0'):
    wait_for('ready', other)
  sys.exit(0)
{_SERVE}
"""
    launcher = self._launch(code, *_PARAMETER_SERVERS, '--grace_period=60')
    self.assert_ends(launcher, 0)
    self.assertEqual(
      launcher.notes('ended_by'),
      dict.fromkeys(
        ['evaluator_0-0', 'ps_0-0', 'worker_0-0', 'worker_1-0'],
        signal.SIGTERM,
      ),
    )
    self.assertLen(launcher.pids(), 5)
    self.assertEqual(launcher.stderr(), '')

  @parameterized.parameters('--num_ps=1', '--chief')
  def test_job_without_chief_or_servers_waits_for_all_workers(self, flag):
    code = """
if task['type'] == 'ps':
  time.sleep(600)
if name == 'worker_1':
  if 'chief' in config['cluster']:
    wait_for('end', 'chief_0')
  wait_for('end', 'worker_0')
  # Long enough to be ended if the job ended with the others.
  time.sleep(0.5)
note('end', 1)
"""
    launcher = self._launch(code, '--num_workers=2', flag)
    self.assert_ends(launcher, 0)
    self.assertIn('worker_1-0', launcher.notes('end'))


if __name__ == '__main__':
  absltest.main()
