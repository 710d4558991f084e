import asyncio
import contextlib
import functools
import itertools
import os
import signal
import socket
import sys
import unittest
from concurrent import futures
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from tests import processes
from tf_strategies import errors
from tf_strategies.process_group import options
from tf_strategies.process_group.network import (
  connection,
  local_users,
)
from tf_strategies.process_group.rendezvous import rendezvous

_OPTIONS = options.GroupOptions(secret=b'the secret of the job')
_OTHER = options.GroupOptions(secret=b'another secret, same job')
_NO_SECRET = options.GroupOptions(allow_unauthenticated=True)
_call = functools.partial(connection.call, address='host:1', client=2, server=5)
_accept = functools.partial(connection.accept, task=5)


async def _meet(*sides):
  """Runs both ends of a connection; returns what each returns or raises."""

  async def run(end, side, settings):
    end.setblocking(False)
    with contextlib.closing(connection.Connection(end)) as link:
      return await side(link, options=settings)

  runs = map(run, socket.socketpair(), *zip(*sides, strict=True))
  return await asyncio.gather(*runs, return_exceptions=True)


class HandshakeTest(parameterized.TestCase):
  @parameterized.product(
    mine=(_OPTIONS, _OTHER, _NO_SECRET), other=(_OPTIONS, _NO_SECRET)
  )
  def test_secrets_must_be_equal(self, mine, other):
    client, server = asyncio.run(_meet((_call, mine), (_accept, other)))
    if mine is other:
      self.assertEqual((client, server), (None, 2))
    else:
      self.assertIn('task 5 at host:1 does not know', str(client))

  @pytest.mark.smoke
  def test_replayed_proof_is_refused(self):
    async def replay(link, options):
      call = connection.CALL.pack(b'TFSH', 0, 2, 5, bytes(32))
      link.write(call + connection._proof(options, b'client', call, bytes(32)))
      return await link.read(connection.ANSWER.size + 1)

    client, server = asyncio.run(_meet((replay, _OPTIONS), (_accept, _OPTIONS)))
    self.assertEqual(client[-1], 0)
    self.assertIsInstance(server, errors.AuthenticationError)

  def test_proof_covers_secret_role_call_and_nonce(self):
    said = itertools.product((_OPTIONS, _OTHER), *[(b'a', b'b')] * 3)
    self.assertLen(set(itertools.starmap(connection._proof, said)), 16)

  def test_version_mismatch_names_both_versions(self):
    async def answer(link, options):
      link.write(b'TFSH\0\x4d'.ljust(connection.ANSWER.size))

    client, _ = asyncio.run(_meet((_call, _OPTIONS), (answer, None)))
    self.assertRegex(str(client), r'version \d+ .*version 77')


_OTHER_USER = 65534


@unittest.skipUnless(
  sys.platform == 'linux', 'only Linux names the user of a peer'
)
class LocalUsersTest(parameterized.TestCase):
  @parameterized.parameters(
    (socket.AF_INET, '127.0.0.1'), (socket.AF_INET6, '::1')
  )
  def test_processes_of_the_same_user_are_accepted(self, family, host):
    try:
      listener = socket.create_server((host, 0), family=family)
    except OSError:
      self.skipTest(f'{host} is not available')
    with listener, socket.socket(family) as caller:
      caller.connect(listener.getsockname())
      accepted, _ = listener.accept()
      with accepted:
        for end in (accepted, caller):
          self.assertIsNone(local_users.check(end))

  @unittest.skipIf(os.geteuid(), 'only root can act as another user')
  def test_other_user_is_refused_and_named(self):
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

  def test_disconnected_peer_is_an_unknown_user(self):
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
