import dataclasses
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
  authentication,
  local_users,
  protocol,
)
from tf_strategies.process_group.rendezvous import rendezvous

_SECRET = b'the secret of the job'
_REQUEST = authentication.ConnectionRequest(2, 5)


def _handshake(secret, request=_REQUEST):
  return authentication.Handshake(secret, request)


class HandshakeTest(parameterized.TestCase):
  @parameterized.parameters(_SECRET, None)
  def test_both_sides_accept_the_same_secret(self, secret):
    answer, expected = _handshake(secret).answer()
    self.assertLen(answer, authentication.ANSWER_BYTES)
    proof = _handshake(secret).prove(answer, 'task 5')
    self.assertEqual(proof, expected)
    self.assertNotIn(_SECRET, answer + proof)

  @parameterized.parameters(b'another secret, same job', None)
  def test_server_with_another_secret_is_refused(self, secret):
    answer, _ = _handshake(secret).answer()
    with self.assertRaisesRegex(errors.AuthenticationError, 'task 5'):
      _handshake(_SECRET).prove(answer, 'task 5')

  @pytest.mark.smoke
  def test_client_with_another_secret_is_refused(self):
    _, expected = _handshake(_SECRET).answer()
    wrong = _handshake(b'another secret, same job')
    answer, _ = wrong.answer()
    self.assertNotEqual(wrong.prove(answer, 'task 5'), expected)

  @parameterized.parameters(
    {'client': 3},
    {'server': 4},
    {'nonce': bytes(32)},
  )
  def test_proof_covers_every_field_of_the_request(self, **changes):
    other = dataclasses.replace(_REQUEST, **changes)
    answer, _ = _handshake(_SECRET, other).answer()
    with self.assertRaises(errors.AuthenticationError):
      _handshake(_SECRET).prove(answer, 'task 5')

  def test_replayed_and_mirrored_proofs_are_refused(self):
    first, expected = _handshake(_SECRET).answer()
    proof = _handshake(_SECRET).prove(first, 'task 5')
    self.assertEqual(proof, expected)
    # Replayed to the same server, which has a new nonce.
    _, now_expected = _handshake(_SECRET).answer()
    self.assertNotEqual(proof, now_expected)
    # The client's proof used as the server's, and the server's as the client's.
    with self.assertRaises(errors.AuthenticationError):
      mirrored = first[: -authentication.PROOF_BYTES] + proof
      _handshake(_SECRET).prove(mirrored, 'task 5')
    self.assertNotEqual(first[-authentication.PROOF_BYTES :], expected)

  def test_version_mismatch_names_both_versions(self):
    answer = bytearray(_handshake(_SECRET).answer()[0])
    answer[5] = 77
    with self.assertRaisesRegex(
      errors.RendezvousError,
      f'version {protocol.PROTOCOL_VERSION} .*version 77',
    ):
      _handshake(_SECRET).prove(bytes(answer), 'task 5')


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
