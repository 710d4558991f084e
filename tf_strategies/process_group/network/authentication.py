"""Mutual authentication by HMAC over the secret of the job.

The client sends its request and a nonce; the server answers with a nonce of its
own and a keyed hash over both and its role; the client answers with a hash under
its role. Neither side learns anything that it could replay: in another role, to
another task or later. This authenticates; it does not encrypt.
"""

import dataclasses
import hashlib
import hmac
import secrets
import socket
import struct

from tf_strategies import errors
from tf_strategies.process_group.network import local_users, protocol

# Time for the whole handshake.
HANDSHAKE_SECONDS = 5.0

_MAGIC = b'TFSH'
_NONCE_BYTES = 32
_MAC_BYTES = hashlib.sha256().digest_size
_REQUEST = struct.Struct(f'!4sHII{_NONCE_BYTES}s')
_ANSWER = struct.Struct(f'!4sH{_NONCE_BYTES}s{_MAC_BYTES}s')

REQUEST_BYTES = _REQUEST.size
ANSWER_BYTES = _ANSWER.size
PROOF_BYTES = _MAC_BYTES


@dataclasses.dataclass(frozen=True)
class ConnectionRequest:
  """The first message of a connection: the numbers of client and server."""

  client: int
  server: int
  nonce: bytes = dataclasses.field(
    default_factory=lambda: secrets.token_bytes(_NONCE_BYTES)
  )

  def pack(self) -> bytes:
    """Returns the request as `REQUEST_BYTES` bytes."""
    fields = vars(self).values()
    return _REQUEST.pack(_MAGIC, protocol.PROTOCOL_VERSION, *fields)

  @classmethod
  def unpack(cls, data: bytes) -> 'ConnectionRequest':
    """Returns the request in `REQUEST_BYTES` bytes. Raises ProtocolError for others."""
    magic, version, *fields = _REQUEST.unpack(data)
    if magic != _MAGIC or version != protocol.PROTOCOL_VERSION:
      raise protocol.ProtocolError(f'it began with {data[:6]!r}')
    return cls(*fields)


@dataclasses.dataclass(frozen=True)
class Credentials:
  """How this process and its peers know each other.

  Attributes:
    secret: of the job; None if it has none.
    same_user: whether peers, on this host, must be processes of this user:
      a loopback address is open to all users.
  """

  secret: bytes | None = dataclasses.field(default=None, repr=False)
  same_user: bool = False

  def check_user(self, sock: socket.socket) -> None:
    """Raises AuthenticationError if the peer's user is not trusted."""
    if self.same_user:
      local_users.check(sock)


class Handshake:
  """The hashes of one connection, for either side."""

  def __init__(self, secret: bytes | None, request: ConnectionRequest):
    self._secret = secret or b''
    self._request = request.pack()

  def answer(self) -> tuple[bytes, bytes]:
    """Returns the server's answer and the proof that it expects from the client."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    answer = _ANSWER.pack(
      _MAGIC, protocol.PROTOCOL_VERSION, nonce, self._mac(b'server', nonce)
    )
    return answer, self._mac(b'client', nonce)

  def prove(self, answer: bytes, server: str) -> bytes:
    """Checks the server's answer and returns the client's proof.

    Raises:
      ProtocolError: the bytes are no answer.
      RendezvousError: the server speaks another version of the protocol.
      AuthenticationError: it does not know the same secret.
    """
    magic, version, nonce, mac = _ANSWER.unpack(answer)
    if magic != _MAGIC:
      raise protocol.ProtocolError(f'{server} is no worker of tf_strategies')
    if version != protocol.PROTOCOL_VERSION:
      raise errors.RendezvousError(
        f'Expected version {protocol.PROTOCOL_VERSION} of the protocol, got '
        f'version {version} from {server}. Fix: install the same '
        'tf_strategies everywhere.'
      )
    if not hmac.compare_digest(mac, self._mac(b'server', nonce)):
      raise errors.AuthenticationError(
        f'{server} does not know the secret of this process: its proof is '
        'wrong. Fix: give all workers the same TFS_SECRET (or '
        'TFS_SECRET_FILE).'
      )
    return self._mac(b'client', nonce)

  def _mac(self, role: bytes, nonce: bytes) -> bytes:
    message = b'tf_strategies ' + role + self._request + nonce
    return hmac.new(self._secret, message, hashlib.sha256).digest()
