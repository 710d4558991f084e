"""Launchers of several hosts: the cluster, and the end of all launchers."""

import json
import socket
import sys

import pytest
from absl.testing import absltest, parameterized

from benchmarks import network_namespaces, processes
from tests.launch import programs
from tests.processes import addresses
from tf_strategies import cluster

_WAIT = 'time.sleep(600)'


def _messages(launcher):
  """Returns the messages of a launcher, except that it waits for another one."""
  lines = launcher.stderr().splitlines()
  return '\n'.join(line for line in lines if ' waits at ' not in line)


class SeveralHostsTest(programs.JobTestCase):
  def _start(self, code, flags=(), count=2, **options):
    """Starts a launcher for each rank, all with one rendezvous."""
    started = programs.launchers(
      self.create_tempdir().full_path,
      code,
      ('--grace_period=0.5', *flags),
      count,
      **options,
    )
    return [self.enter_context(launcher) for launcher in started]

  def assert_all_end(self, started, status, *words):
    for launcher in started:
      self.assert_ends(launcher, status, *words)

  @pytest.mark.smoke
  def test_all_tasks_are_in_one_cluster(self):
    code = """
note('environment', dict(os.environ))
if task['type'] in ('ps', 'evaluator', 'worker'):
  time.sleep(600)
top = os.path.dirname(directory)
wanted = {'0/environment-worker_0-0', '0/environment-worker_1-0',
          '1/environment-worker_2-0', '1/environment-worker_3-0',
          '0/environment-evaluator_0-0', '0/environment-ps_0-0',
          '1/environment-ps_1-0'}
while not all(os.path.exists(os.path.join(top, w)) for w in wanted):
  time.sleep(0.01)
"""
    flags = ('--num_workers=2', '--num_ps=1', '--chief', '--evaluator')
    started = self._start(code, flags)
    self.assert_all_end(started, 0)
    names, jobs = [], set()
    for launcher in started:
      self.assertEqual(_messages(launcher), '')
      notes = launcher.notes('environment')
      names.append([name.removesuffix('-0') for name in notes])
      for name, environment in notes.items():
        config = cluster.ClusterConfig.from_env(environment)
        self.assertEqual(f'{config.task_type}_{config.task_index}-0', name)
        self.assertEqual(environment['TFS_SECRET'], programs.SECRET)
        jobs.add(json.dumps(json.loads(environment['TF_CONFIG'])['cluster']))
    self.assertEqual(
      names,
      [
        ['chief_0', 'evaluator_0', 'ps_0', 'worker_0', 'worker_1'],
        ['ps_1', 'worker_2', 'worker_3'],
      ],
    )
    self.assertLen(jobs, 1)

  def test_launcher_may_restart_before_the_job_starts(self):
    [address] = addresses(1)
    first, left = self._start('pass', count=3, ranks=[0, 1], address=address)
    left.wait_until(lambda: 'for the others' in left.stderr())
    left.kill()
    left.wait()
    others = self._start('pass', count=3, ranks=[1, 2], address=address)
    self.assert_all_end([first, *others], 0)

  def test_failure_is_named_on_all_hosts(self):
    code = f"""
if task['index'] == 1:
  print('my last words')
  sys.exit(7)
{_WAIT}
"""
    started = self._start(code, count=3)
    first, victim, third = started
    self.assert_ends(
      victim, 7, 'worker 1 failed: exit status 7', 'my last words'
    )
    for launcher in (first, third):
      self.assert_ends(launcher, 7)
      [line] = _messages(launcher).splitlines()
      self.assertIn(
        'worker 1 on node 1 (127.0.0.1) failed: exit status 7', line
      )

  def test_killed_launcher_is_named(self):
    started = self._start(_WAIT)
    for launcher in started:
      launcher.wait_for_notes('pid', 1)
    first, second = started
    first.kill()
    self.assert_ends(
      second, 143, 'node 0 (127.0.0.1) failed: its launcher is gone'
    )
    first.wait_until(lambda: not first.alive())

  def test_task_is_restarted_on_its_host(self):
    code = """
if task['index'] == 1 and attempt == 0:
  sys.exit(143)
top = os.path.dirname(directory)
note('end', attempt)
while not os.path.exists(os.path.join(top, '1', 'end-worker_1-1')):
  time.sleep(0.01)
"""
    started = self._start(code, ['--max_restarts=1'])
    first, restarted = started
    self.assert_ends(first, 0)
    self.assert_ends(restarted, 0, 'Starting it again (1 of 1)')
    self.assertEqual(_messages(first), '')

  def test_different_secret_is_refused(self):
    started = self._start(
      'pass',
      ['--rendezvous_timeout=4'],
      secrets=[programs.SECRET, programs.SECRET[::-1]],
    )
    self.assert_ends(
      started[0],
      143,
      'for node 1 (--nnodes=2)',
      'Task 0 refused a connection',
      'the same secret',
    )
    self.assert_ends(started[1], 1, 'does not know the secret')

  def test_missing_and_duplicate_hosts_are_named(self):
    started = self._start(
      'pass', ['--rendezvous_timeout=3'], count=3, ranks=[0, 1, 1]
    )
    self.assert_all_end(started, 143)
    output = ''.join(launcher.stderr() for launcher in started)
    self.assertIn('another launcher has --node_rank=1', output)
    self.assertIn('for node 2 (--nnodes=3)', started[0].stderr())

  def test_late_host_is_refused_and_the_job_continues(self):
    [address] = addresses(1)
    started = self._start(_WAIT, address=address)
    for launcher in started:
      launcher.wait_for_notes('pid', 1)
    [late] = self._start('pass', ranks=[1], address=address)
    self.assert_ends(late, 143, 'refused node 1: the job has begun')
    for launcher in started:
      self.assertLen(launcher.alive(), 1)

  def test_different_version_is_refused(self):
    [address] = addresses(1)
    [first] = self._start(
      'pass', ['--rendezvous_timeout=4'], ranks=[0], address=address
    )
    program = """
import sys
from tf_strategies import launch, version
version.__version__ = '0.0.1'
sys.exit(launch.main(['launch', *sys.argv[1:]]))
"""
    other = processes.run_python(
      *('-c', program, '--nnodes=2', '--node_rank=1'),
      *(f'--rendezvous={address}', '--', 'true'),
      env={'TFS_SECRET': programs.SECRET},
    )
    self.assertEqual(other.returncode, 143)
    self.assertIn('node 1 runs tf_strategies 0.0.1', other.stderr)
    self.assert_ends(first, 143, 'node 1 runs tf_strategies 0.0.1')

  def test_rendezvous_address_in_use_is_reported(self):
    with socket.create_server(('127.0.0.1', 0)) as taken:
      address = f'127.0.0.1:{taken.getsockname()[1]}'
      status, _, output = programs.run(
        ['--nnodes=2', f'--rendezvous={address}', '--', 'true'],
        {'TFS_SECRET': programs.SECRET},
      )
    self.assertEqual(status, 143)
    self.assertIn(f'cannot listen at {address}', output)

  @parameterized.parameters(
    ({'TFS_SECRET': ''}, 'h:1', 0, 'a secret'),
    ({'TFS_SECRET': programs.SECRET}, 'h', 0, '--rendezvous: its value'),
    ({'TFS_SECRET': programs.SECRET}, 'h:1', 2, '--node_rank=2'),
  )
  def test_invalid_flags_are_explained(self, environment, address, rank, words):
    flags = ['--nnodes=2', f'--node_rank={rank}', f'--rendezvous={address}']
    status, _, output = programs.run([*flags, '--', 'true'], environment)
    self.assertEqual(status, 2)
    self.assertIn(words, output)


class NamespacesTest(absltest.TestCase):
  """Launchers on separate hosts."""

  def test_tasks_of_two_hosts_form_a_group(self):
    reason = network_namespaces.missing()
    if reason:
      self.skipTest(reason)
    with network_namespaces.NetworkNamespaces(2) as hosts:
      launch = [
        *(sys.executable, '-m', 'tf_strategies', 'launch', '--nnodes=2'),
        *(f'--rendezvous={hosts.addresses[0]}:29400', '--grace_period=2'),
      ]
      task = ['--', sys.executable, '-c', programs.SUM]
      started = [
        self.enter_context(
          processes.Command(
            hosts.command(rank, [*launch, f'--node_rank={rank}', *task]),
            env=processes.python_environment({'TFS_SECRET': programs.SECRET}),
            deadline_seconds=120,
            grace_seconds=10,
          )
        )
        for rank in range(2)
      ]
      statuses = [command.wait() for command in started]
      output = [command.output() for command in started]
    self.assertEqual(statuses, [0, 0], output)
    for rank in range(2):
      self.assertIn(
        f'[worker {rank}] the sum is [1000.0, 1002.0, 1004.0]', output[rank]
      )


if __name__ == '__main__':
  absltest.main()
