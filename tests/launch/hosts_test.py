"""`tfs launch --hostfile`: over ssh, on hosts that are network namespaces."""

import contextlib
import os
import pathlib
import shlex
import shutil
import signal
import sys
import time

import psutil
import pytest
from absl.testing import absltest, parameterized

from benchmarks import network_namespaces, processes
from tests import tiers
from tests.launch import programs
from tf_strategies import errors
from tf_strategies.launch import hosts as hosts_lib

_PATH = f'{os.environ.get("PATH", "")}:/usr/sbin:/sbin'
# Where sshd locks itself in; its service makes it at each start.
_EMPTY = pathlib.Path('/run/sshd')
_SSHD = """
ListenAddress {address}
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
"""
_SSH_OPTIONS = (
  'StrictHostKeyChecking=no',
  'UserKnownHostsFile=/dev/null',
  'LogLevel=ERROR',
)
_WAIT = ('sh', '-c', 'echo here; exec sleep 600')


class HostfileTest(parameterized.TestCase):
  @parameterized.parameters(
    ('a', 'with 1 hosts'),
    ('a\n-oProxyCommand=x', ":2: '-oProxyCommand=x'"),
    ('a slots=0x\nb', "hosts:1: 'a slots=0x'"),
  )
  def test_wrong_file_is_named(self, text, words):
    path = self.create_tempfile('hosts', content=text).full_path
    with self.assertRaises(errors.UnsupportedOptionError) as caught:
      hosts_lib.read(path)
    self.assertIn(words, str(caught.exception))
    self.assertIn('Fix: ', str(caught.exception))

  @parameterized.parameters(
    (['--hostfile=/no/such'], '--hostfile=/no/such'),
    (['--node_rank=1', '--hostfile=h'], '--node_rank with --hostfile'),
  )
  def test_wrong_flags_are_explained(self, flags, words):
    status, _, said = programs.run([*flags, '--', 'true'], None, {})
    self.assertEqual(status, 2)
    self.assertIn(words, said)

  def test_lines_differ_by_rank_and_slots(self):
    path = self.create_tempfile(content='# all\na\nme@b slots=3\n').full_path
    status, out, said = programs.run(
      [
        *(f'--hostfile={path}', '--num_workers=2', '--max_restarts=1'),
        *('--noevaluator', '--dry_run', '--', 'true', 'an argument'),
      ],
      None,
      {'TFS_SECRET': programs.SECRET, 'TFS_SOMETHING': "it's"},
    )
    self.assertEqual((status, said), (0, ''))
    first, second = out.split('[node 1]')
    for line, rank, slots in ((first, 0, 2), (second, 1, 3)):
      for flag in (
        *('--nnodes=2', f'--node_rank={rank}', '--rendezvous=a:'),
        *(f'--num_workers={slots} --noevaluator --max_restarts=1 -- true ',),
      ):
        self.assertIn(flag, line)
    # The variable is for the other host alone. shlex quotes its value once more.
    self.assertNotIn('TFS_SOMETHING', first)
    self.assertIn('export TFS_SOMETHING=', second)
    self.assertIn(' me@b /bin/sh', second)
    self.assertNotIn(programs.SECRET, out)


class OverSshTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    why = network_namespaces.missing()
    if why:
      self.skipTest(why)
    self._programs = {
      name: shutil.which(name, path=_PATH)
      for name in ('sshd', 'ssh', 'ssh-keygen')
    }
    if None in self._programs.values():
      self.skipTest('no sshd: apt-get install openssh-server')
    self._hosts = self.enter_context(network_namespaces.NetworkNamespaces(2))
    self._directory = pathlib.Path(self.create_tempdir().full_path)
    for key in ('host_key', 'user_key'):
      processes.run(
        [
          *(self._programs['ssh-keygen'], '-q', '-t', 'ed25519', '-N', ''),
          *('-f', str(self._directory / key)),
        ],
        is_checked=True,
      )
    if not _EMPTY.exists():
      _EMPTY.mkdir(mode=0o755)
      self.addCleanup(_EMPTY.rmdir)
    self._address = self._hosts.addresses[1]
    conf = self._directory / 'sshd_config'
    conf.write_text(
      _SSHD.format(address=self._address, directory=self._directory)
    )
    sshd = self.enter_context(
      processes.Command(
        self._hosts.command(
          1, [self._programs['sshd'], '-D', '-e', '-f', str(conf)]
        )
      )
    )
    sshd.wait_until(lambda: 'listening' in sshd.output())

  def _start(self, *command, hosts=None):
    """The launcher of all hosts, on the first of them."""
    path = self._directory / 'hosts'
    path.write_text('\n'.join(hosts or self._hosts.addresses))
    ssh = [self._programs['ssh'], '-F', 'none']
    ssh += ['-i', str(self._directory / 'user_key')]
    ssh += [word for option in _SSH_OPTIONS for word in ('-o', option)]
    words = [
      *(sys.executable, '-m', 'tf_strategies', 'launch', '--grace_period=2'),
      *(f'--hostfile={path}', f'--ssh={shlex.join(ssh)}', '--', *command),
    ]
    return self.enter_context(
      processes.Command(
        self._hosts.command(0, words),
        env=processes.python_environment({'TFS_SECRET': programs.SECRET}),
        deadline_seconds=120,
        grace_seconds=15,
      )
    )

  def _waiting(self):
    """Tasks that wait on both hosts."""
    started = self._start(*_WAIT)
    started.wait_until(lambda: started.output().count('] here') == 2)
    return started

  def _left(self):
    """Returns the processes that still run on the hosts, except sshd."""
    found = []
    for host in range(2):
      namespace = self._hosts.command(host, [])[3]
      listed = processes.run(['ip', 'netns', 'pids', namespace]).stdout
      for pid in map(int, listed.split()):
        with contextlib.suppress(psutil.Error):  # It has ended since.
          process = psutil.Process(pid)
          if 'sshd' not in process.name():
            found.append(process.cmdline())
    return found

  def test_tasks_of_all_hosts_add_up(self):
    started = self._start(sys.executable, '-c', programs.SUM)
    self.assertEqual(started.wait(), 0, started.output())
    for rank in range(2):
      self.assertIn(
        f'[node {rank}] [worker {rank}] the sum is [1000.0, 1002.0, 1004.0]\n',
        started.output(),
      )

  def test_lost_ssh_ends_all(self):
    started = self._waiting()
    lines, knowing = [], 0
    for process in psutil.process_iter():
      with contextlib.suppress(psutil.Error):
        lines.append(shlex.join(process.cmdline()))
        is_task = process.cmdline() == ['sleep', '600']
        if is_task and process.environ().get('TFS_SECRET') == programs.SECRET:
          knowing += 1
    self.assertEqual(knowing, 2)
    self.assertEmpty([line for line in lines if programs.SECRET in line])
    [ssh] = [p for p in started.descendants() if p.name() == 'ssh']
    ssh.kill()
    self.assertEqual(started.wait(), 137, started.output())
    self.assertIn(f'[launch] node 1 ({self._address}) failed', started.output())
    self.assertEmpty(self._left())

  @tiers.parameters((signal.SIGINT, 130), tiers.soak(signal.SIGKILL, -9))
  def test_end_of_the_launcher_is_the_end_of_all(self, number, status):
    started = self._waiting()
    started.signal(number)
    self.assertEqual(started.wait(), status, started.output())
    self.assert_nothing_is_left()

  def assert_nothing_is_left(self):
    ends_at = time.monotonic() + 30
    while self._left() and time.monotonic() < ends_at:
      time.sleep(0.1)
    self.assertEmpty(self._left())

  @pytest.mark.soak
  def test_host_that_is_cut_off_is_named(self):
    started = self._waiting()
    self._hosts.cut_link(1)
    self.assertIn(started.wait(), (143, 255), started.output())
    self.assertIn(f'[launch] node 1 ({self._address}) failed', started.output())

  def test_host_that_is_not_there_is_named_and_no_launcher_lingers(self):
    hosts = [*self._hosts.addresses, 'no-such-host.invalid']
    started = self._start(*_WAIT, hosts=hosts)
    self.assertEqual(started.wait(), 255, started.output())
    self.assertIn(
      'node 2 (no-such-host.invalid) failed: exit status 255', started.output()
    )
    self.assert_nothing_is_left()


if __name__ == '__main__':
  absltest.main()
