import asyncio
import contextlib
import hmac
import itertools
import os
import secrets
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
  protocol,
)
from tf_strategies.process_group.rendezvous import rendezvous

_OPTIONS = options.GroupOptions(secret=b'the secret of the job')
_OTHER = options.GroupOptions(secret=b'another secret, same job')
_TRUSTING = options.GroupOptions(allow_unauthenticated=True)


class _Connection(connection.Connection):
  """Remembers what it sends, which may change on its way."""

  def __init__(self, sock, change=lambda data: data):
    super().__init__(sock)
    self.sent, self._change = [], change

  def write(self, data):
    self.sent.append(data)
    super().write(self._change(data))


async def _as_client(link, settings=_OPTIONS):
  await connection.call(link, 'host:1', 2, 5, settings)


async def _as_server(link, settings=_OPTIONS):
  return await connection.accept(link, 5, settings)


def _meet(client, server, change=lambda data: data):
  """Returns what both sides return or raise, and what each has sent."""

  async def end(side, link):
    with contextlib.closing(link):
      return await side(link)

  async def run():
    ends = socket.socketpair()
    for sock in ends:
      sock.setblocking(False)
    links = _Connection(ends[0], change), _Connection(ends[1])
    sides = map(end, (client, server), links)
    outcomes = await asyncio.gather(*sides, return_exceptions=True)
    return *outcomes, *(link.sent for link in links)

  return asyncio.run(asyncio.wait_for(run(), 60))


class HandshakeTest(parameterized.TestCase):
  def assert_refused(self, outcome, words=''):
    self.assertIsInstance(outcome, errors.AuthenticationError)
    self.assertIn(words, str(outcome))

  @parameterized.parameters(_OPTIONS, _TRUSTING)
  def test_both_sides_accept_the_same_secret(self, settings):
    client, server, *sent = _meet(
      lambda link: _as_client(link, settings),
      lambda link: _as_server(link, settings),
    )
    self.assertEqual((client, server), (None, 2))
    self.assertNotIn(_OPTIONS.secret, b''.join(itertools.chain(*sent)))

  @parameterized.parameters(_OTHER, _TRUSTING)
  def test_server_with_another_secret_is_refused(self, settings):
    client, *_ = _meet(_as_client, lambda link: _as_server(link, settings))
    self.assert_refused(client, 'task 5 at host:1 does not know')

  @pytest.mark.smoke
  def test_client_with_another_secret_is_refused(self):
    compares = hmac.compare_digest
    with mock.patch.object(hmac, 'compare_digest') as compare:
      # The client, who comes first, believes everything.
      compare.side_effect = lambda *args: (
        compare.call_count == 1 or compares(*args)
      )
      client, server, *_ = _meet(
        lambda link: _as_client(link, _OTHER), _as_server
      )
    self.assert_refused(client, 'refused the proof of this process')
    self.assert_refused(server, 'its proof is wrong')

  @parameterized.parameters(
    9, 20
  )  # Bytes of the client's number and its nonce.
  def test_proof_covers_the_call(self, place):
    def change(data):
      changed = bytearray(data)
      changed[place] ^= 1
      return bytes(changed)

    client, *_ = _meet(_as_client, _as_server, change)
    self.assert_refused(client)

  def test_server_of_another_task_does_not_answer(self):
    client, server, _, sent = _meet(
      _as_client, lambda link: connection.accept(link, 4, _OPTIONS)
    )
    self.assertIsInstance(client, ConnectionError)
    self.assertIsInstance(server, protocol.ProtocolError)
    self.assertEqual(sent, [])

  def test_replayed_and_mirrored_proofs_are_refused(self):
    *_, sent, answers = _meet(_as_client, _as_server)

    async def repeat(link):
      for data in sent:
        link.write(data)
      await link.read(connection.ANSWER.size)

    # Replayed to the same server, which has a new nonce.
    _, server, *_ = _meet(repeat, _as_server)
    self.assert_refused(server)

    async def mirror(link):
      """Sends the client's proof as the server's."""
      await link.read(connection.CALL.size)
      link.write(answers[0][: -connection.PROOF_BYTES] + sent[1])

    with mock.patch.object(secrets, 'token_bytes', return_value=sent[0][-32:]):
      client, *_, again, _ = _meet(_as_client, mirror)
    self.assertEqual(again, sent[:1])
    self.assert_refused(client)

  @parameterized.parameters(
    (b'HTTP', protocol.ProtocolError, 'task 5 at host:1 is no worker'),
    (
      b'TFSH\0\x4d',
      errors.RendezvousError,
      f'version {protocol.PROTOCOL_VERSION} .*version 77',
    ),
  )
  def test_another_program_or_version_is_named(self, start, error, words):
    async def answer(link):
      link.write(start.ljust(connection.ANSWER.size))

    client, *_ = _meet(_as_client, answer)
    self.assertIsInstance(client, error)
    self.assertRegex(str(client), words)


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
