"""A loopback address without a secret: processes of this user alone get in."""

import os
import signal
import socket
import sys
import unittest
from concurrent import futures
from unittest import mock

from absl.testing import absltest, parameterized

from tests import processes
from tf_strategies import errors
from tf_strategies.process_group import options
from tf_strategies.process_group.network import local_users
from tf_strategies.process_group.rendezvous import rendezvous

_OTHER_USER = 65534


@unittest.skipUnless(sys.platform == 'linux', 'Linux tells users')
class LocalUsersTest(parameterized.TestCase):
  @parameterized.parameters(
    (socket.AF_INET, '127.0.0.1'), (socket.AF_INET6, '::1')
  )
  def test_own_processes_get_in(self, family, host):
    try:
      listener = socket.create_server((host, 0), family=family)
    except OSError:
      self.skipTest(f'{host} is not there')
    with listener, socket.socket(family) as caller:
      caller.connect(listener.getsockname())
      accepted, _ = listener.accept()
      with accepted:
        for end in (accepted, caller):
          self.assertIsNone(local_users.check(end))

  @unittest.skipIf(os.geteuid(), 'only root can act as another user')
  def test_other_user_is_refused_by_name(self):
    with socket.create_server(('127.0.0.1', 0)) as listener:
      listener.settimeout(20)
      child = os.fork()
      if not child:
        try:
          signal.alarm(60)
          os.setuid(_OTHER_USER)
          with socket.socket() as caller:
            caller.connect(listener.getsockname())
            caller.recv(1)
        finally:
          os._exit(0)
      self.addCleanup(os.waitpid, child, 0)
      self.addCleanup(os.kill, child, signal.SIGKILL)
      accepted, _ = listener.accept()
      with (
        accepted,
        self.assertRaisesRegex(
          errors.AuthenticationError,
          f'Expected a peer of user 0.*of user {_OTHER_USER}.*TFS_SECRET',
        ),
      ):
        local_users.check(accepted)

  def test_peer_that_hung_up_is_nobody(self):
    with socket.create_server(('127.0.0.1', 0)) as listener:
      caller = socket.create_connection(listener.getsockname())
      accepted, _ = listener.accept()
      caller.close()
      with (
        accepted,
        self.assertRaisesRegex(errors.AuthenticationError, 'unknown user'),
      ):
        local_users.check(accepted)

  def test_group_without_a_secret_refuses_another_user(self):
    addresses = dict(enumerate(processes.addresses(2)))
    outcomes = []

    def work(task):
      settings = options.GroupOptions(rendezvous_timeout_seconds=20)
      with rendezvous.Rendezvous(addresses, task, settings) as meeting:
        try:
          meeting.form()
        except errors.AuthenticationError as e:
          outcomes.append(str(e))

    with (
      mock.patch.object(local_users, '_user_of_peer', return_value=12345),
      futures.ThreadPoolExecutor(2) as threads,
    ):
      threads.map(work, addresses)
    self.assertIn('user 12345', outcomes[0])


if __name__ == '__main__':
  absltest.main()
