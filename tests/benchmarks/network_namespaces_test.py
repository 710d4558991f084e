"""Hosts end with all that runs on them; `cut_link_test.py` cuts their links."""

import os

from absl.testing import absltest, parameterized

from benchmarks import network_namespaces, processes
from tests.processes import wait_until
from tf_strategies import errors


def namespaces():
  listed = processes.run(['ip', 'netns', 'list'], is_checked=True)
  return [line.split()[0] for line in listed.stdout.splitlines()]


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
