"""Ports that connections of other programs do not take."""

import socket
from unittest import mock

from absl.testing import absltest

from benchmarks import processes
from tf_strategies import errors
from tf_strategies.launch import ports


class PickPortsTest(absltest.TestCase):
  def test_no_other_process_gives_them(self):
    picked = ports.pick_ports(20)
    ask = (
      'from tf_strategies.launch import ports; import sys; '
      'ports._PORTS = [int(p) for p in sys.argv[1:]]; '
      'print(ports.pick_ports(1))'
    )
    found = processes.run_python('-c', ask, *map(str, picked), '32001')
    self.assertEqual(found.stdout.strip(), '[32001]')

  def test_only_the_last_are_held(self):
    """Or a process would run out of descriptors."""
    for _ in range(10):
      ports.pick_ports(50)
    self.assertLessEqual(len(ports._held), ports._HELD)

  def test_taken_ports_are_not_given(self):
    with socket.create_server(('127.0.0.1', 0)) as server:
      port = server.getsockname()[1]
      with (
        mock.patch.object(ports, '_PORTS', [port]),
        self.assertRaisesRegex(errors.RendezvousError, 'Expected 1 .* got 0'),
      ):
        ports.pick_ports(1)


if __name__ == '__main__':
  absltest.main()
