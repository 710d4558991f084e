"""Sockets with forked children, with their own port, and at the limit of open files."""

import asyncio
import errno
import os
import resource
import signal
import socket
import time
from unittest import mock

import numpy as np
import psutil
from absl.testing import absltest

from tests import processes
from tests.process_group import meetings
from tf_strategies import errors, process_group
from tf_strategies.launch import ports as ports_lib
from tf_strategies.process_group.network import server, sockets

# Shorter than the heartbeat timeout and the lifetime of the child.
_SOON_SECONDS = 10.0


def _work_with_a_child(rank, directory):
  """Forks a child on rank 1 that outlives it. Rank 0 returns when it sees the end."""
  with meetings.meet(rank) as meeting, meeting.form() as group:
    group.barrier()
    if rank == 1:
      if not os.fork():
        time.sleep(120)
        os._exit(0)
      meetings.touch(directory, 'child')
    try:
      while True:
        group.all_reduce(np.ones(10))
        time.sleep(0.01)
    except errors.WorkerUnavailableError as e:
      return e.rank, time.time()


class ForkTest(absltest.TestCase):
  def test_surviving_child_does_not_hide_the_death_of_its_parent(self):
    directory = self.create_tempdir().full_path
    with processes.Workers(_work_with_a_child, 2, args=(directory,)) as workers:
      meetings.wait_for(directory, 'child')
      [child] = psutil.Process(workers.pid(1)).children()
      self.addCleanup(child.kill)
      time.sleep(0.2)
      workers.kill(1)
      killed = time.time()
      host, port = workers.addresses[1].split(':')
      with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind((host, int(port)))
      (outcome,) = workers.wait([0])
      self.assertTrue(child.is_running())
    rank, heard = outcome.result()
    self.assertEqual(rank, 1)
    self.assertLess(heard - killed, _SOON_SECONDS)

  def test_only_the_parent_can_form_a_group_after_a_fork(self):
    [address] = processes.addresses(1)
    with mock.patch.object(meetings, 'addresses', lambda: {0: address}):
      meeting = meetings.meet(0)
    with meeting:
      child = os.fork()
      if not child:
        signal.alarm(20)
        try:
          meeting.form()
        except RuntimeError:
          os._exit(7)
        os._exit(1)
      _, status = os.waitpid(child, 0)
      self.assertEqual(os.waitstatus_to_exitcode(status), 7)
      with meeting.form() as group:
        self.assertEqual(group.world_size, 1)


class _SelfConnecting(socket.socket):
  """Binds to the port that it connects to, as may happen to any socket."""

  def connect(self, address):
    self.bind(address)
    super().connect(address)


class ConnectToItselfTest(absltest.TestCase):
  def test_self_connection_is_refused_and_frees_the_port(self):
    port = ports_lib.pick_ports(1)[0]
    target = socket.AF_INET, ('127.0.0.1', port)
    with (
      mock.patch.object(socket, 'socket', _SelfConnecting),
      self.assertRaises(ConnectionRefusedError),
    ):
      asyncio.run(sockets.connect(target))
    sockets.listen('127.0.0.1', port).close()


class OwnAddressTest(absltest.TestCase):
  def test_second_rendezvous_of_this_process_is_refused(self):
    port = ports_lib.pick_ports(1)[0]
    addresses = {0: f'127.0.0.1:{port}'}
    began = time.monotonic()
    with process_group.Rendezvous(addresses, 0):
      self.assertFalse(sockets.listens('127.0.0.2', port))
      with self.assertRaisesRegex(
        errors.RendezvousError, r'This process listens there.*Fix: close\(\)'
      ):
        process_group.Rendezvous(addresses, 0)
      # No time is spent waiting for another process to end.
      self.assertLess(time.monotonic() - began, server._BUSY_SECONDS)
    self.assertFalse(sockets.listens('127.0.0.1', port))
    process_group.Rendezvous(addresses, 0).close()


class FileLimitTest(absltest.TestCase):
  def test_error_names_the_limit_of_open_files(self):
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with self.assertRaisesRegex(
      errors.ResourceLimitError, f'of {limit} .*are in use.*ulimit -n'
    ):
      sockets.keep(mock.Mock(side_effect=OSError(errno.EMFILE, 'too many')))


if __name__ == '__main__':
  absltest.main()
