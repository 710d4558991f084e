"""Hosts reach each other at the configured rate until a link is cut."""

import contextlib
import os
import sys

from absl.testing import absltest, parameterized

from benchmarks import network_namespaces, processes
from tests.processes import wait_until
from tf_strategies import errors

PORT = 20077
SECONDS = 60.0

# The server sends its name to each client.
SERVER = f"""
import socket, sys
with socket.create_server((sys.argv[1], {PORT})) as server:
  print('ready', flush=True)
  while True:
    connection, _ = server.accept()
    with connection:
      connection.sendall(sys.argv[2].encode().ljust(16))
"""
GREET = f"""
import socket, sys
for address in sys.argv[1:]:
  with socket.create_connection((address, {PORT}), 2) as s:
    print(s.recv(16, socket.MSG_WAITALL).decode().strip())
"""


def namespaces():
  listed = processes.run(['ip', 'netns', 'list'], is_checked=True)
  return [line.split()[0] for line in listed.stdout.splitlines()]


@contextlib.contextmanager
def servers(hosts):
  """Runs a server on each host."""
  with contextlib.ExitStack() as stack:
    for index, address in enumerate(hosts.addresses):
      words = [sys.executable, '-c', SERVER, address, f'host {index}']
      server = stack.enter_context(
        processes.Command(
          hosts.command(index, words), name=f'the server of host {index}'
        )
      )
      server.wait_until(lambda s=server: 'ready\n' in s.output())
    yield


class RateTest(parameterized.TestCase):
  @parameterized.parameters('1', '0mbit', '1.5gbit')
  def test_bad_rate(self, text):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, f'link rate {text!r}.*200mbit'
    ):
      network_namespaces.NetworkNamespaces(2, text)

  def test_what_is_missing_is_said(self):
    with absltest.mock.patch.dict(os.environ, {'PATH': ''}):
      self.assertIn('install iproute2', network_namespaces.missing())
      with self.assertRaisesRegex(
        errors.UnsupportedOptionError, "no 'ip' here: install iproute2"
      ):
        network_namespaces.NetworkNamespaces(2).__enter__()


class NetworkNamespacesTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    reason = network_namespaces.missing()
    if reason is not None:
      self.skipTest(reason)

  def python(self, hosts, index, program, *arguments):
    return hosts.run(
      index, [sys.executable, '-c', program, *arguments], SECONDS
    )

  def test_cut_link_blocks_until_it_is_restored(self):
    with network_namespaces.NetworkNamespaces(3) as hosts, servers(hosts):
      others, cut = hosts.addresses[::2], hosts.addresses[1]
      hosts.cut_link(1)
      self.assertIn(
        'Error', self.python(hosts, 0, GREET, cut).stderr.splitlines()[-1]
      )
      done = self.python(hosts, 0, GREET, *others)
      self.assertEqual(done.stdout.splitlines(), ['host 0', 'host 2'])
      hosts.restore_link(1)
      wait_until(lambda: self.python(hosts, 0, GREET, cut).stdout == 'host 1\n')

  def test_nothing_is_left(self):
    with network_namespaces.NetworkNamespaces(2) as hosts:
      names = [n for n in namespaces() if f'-{os.getpid()}-' in n]

      def inside(host):
        name = hosts.command(host, [])[-1]
        return hosts.run(0, ['ip', 'netns', 'pids', name]).stdout.split()

      self.assertLen(names, 3)
      sleeper = self.enter_context(
        processes.Command(hosts.command(1, ['sleep', '3600']))
      )
      # The process is on the host only after `ip` has started the program.
      wait_until(lambda: str(sleeper.pid) in inside(1))
      self.assertNotIn(str(sleeper.pid), inside(0))
    self.assertEqual(sleeper.wait(), -9)
    self.assertEmpty(set(names) & set(namespaces()))


if __name__ == '__main__':
  absltest.main()
