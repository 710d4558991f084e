import dataclasses

import pytest
from absl.testing import absltest, parameterized

from tf_strategies import errors
from tf_strategies.process_group.network import authentication, protocol

_SECRET = b'the secret of the job'
_REQUEST = authentication.ConnectionRequest(
  authentication.Purpose.DATA, 2, 5, 8
)


def _handshake(secret, request=_REQUEST):
  return authentication.Handshake(secret, request)


class HandshakeTest(parameterized.TestCase):
  @parameterized.parameters(_SECRET, None)
  def test_both_sides_prove_it(self, secret):
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
    {'purpose': authentication.Purpose.POLL},
    {'client': 3},
    {'server': 4},
    {'world': 9},
    {'nonce': bytes(32)},
  )
  def test_everything_said_is_part_of_the_proof(self, **changes):
    other = dataclasses.replace(_REQUEST, **changes)
    answer, _ = _handshake(_SECRET, other).answer()
    with self.assertRaises(errors.AuthenticationError):
      _handshake(_SECRET).prove(answer, 'task 5')

  def test_proofs_cannot_be_played_back(self):
    first, expected = _handshake(_SECRET).answer()
    proof = _handshake(_SECRET).prove(first, 'task 5')
    self.assertEqual(proof, expected)
    # To the same server again, which has a new nonce.
    _, now_expected = _handshake(_SECRET).answer()
    self.assertNotEqual(proof, now_expected)
    # The client's words as a server's, and the other way round.
    with self.assertRaises(errors.AuthenticationError):
      mirrored = first[: -authentication.PROOF_BYTES] + proof
      _handshake(_SECRET).prove(mirrored, 'task 5')
    self.assertNotEqual(first[-authentication.PROOF_BYTES :], expected)

  def test_another_version_names_both(self):
    answer = bytearray(_handshake(_SECRET).answer()[0])
    answer[5] = 77
    with self.assertRaisesRegex(
      errors.RendezvousError,
      f'version {protocol.PROTOCOL_VERSION} .*version 77',
    ):
      _handshake(_SECRET).prove(bytes(answer), 'task 5')


if __name__ == '__main__':
  absltest.main()
