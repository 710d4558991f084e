"""TLS 1.3 between workers: each shows a certificate of the job's own authority.

`TlsSocket` behaves as a non-blocking socket, so callers treat both alike. Bytes that
OpenSSL has buffered are no problem for a caller that polls: it reads until nothing is
left before it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import socket
import ssl
from collections.abc import Sequence
from typing import Any

from tf_strategies import errors, option_checks
from tf_strategies.process_group.network import sockets

# First byte of TLS from either side; no message of ours begins with it.
HELLO = b'\x16'
ALERT = b'\x15'
_WAITS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


@option_checks.has_options
@dataclasses.dataclass(frozen=True)
class TlsFiles:
  """The files of one worker, all in PEM.

  Attributes:
    certificate: certificate of this worker or of all workers, followed by
      intermediate certificates.
    key: private key of that certificate, without a password.
    authority: certificates that sign the certificates of this job and no others.
      Every holder of a signed certificate counts as a worker, whatever its name.
  """

  certificate: str
  key: str
  authority: str

  def __post_init__(self):
    for field in dataclasses.fields(self):
      path = getattr(self, field.name)
      option_checks.check_path(field.name, path, 'pass the path of a PEM file')


@functools.lru_cache(maxsize=8)
def context_of(files: TlsFiles, is_server: bool) -> ssl.SSLContext:
  """Returns the TLS context for one side of all connections. Reads the files once.

  Raises:
    UnsupportedOptionError: a file is missing or has the wrong contents.
  """
  context = ssl.SSLContext(
    ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
  )
  context.minimum_version = ssl.TLSVersion.TLSv1_3
  context.check_hostname = False  # The authority is the job's own.
  context.verify_mode = ssl.CERT_REQUIRED
  try:
    # An empty password: else OpenSSL would ask for one at the terminal.
    context.load_cert_chain(files.certificate, files.key, password=lambda: b'')
    context.load_verify_locations(files.authority)
  except (OSError, ValueError) as e:
    raise errors.UnsupportedOptionError(
      f'{files} ({e})',
      'three PEM files: a certificate, its key without a password, and the '
      'certificate of the authority that signed it',
      'set TFS_TLS_CERT, TFS_TLS_KEY and TFS_TLS_CA to such files',
    ) from e
  if is_server:
    context.num_tickets = 0  # Nobody resumes a session.
  return context


class TlsSocket:
  """A non-blocking, encrypted socket; takes over a connected one."""

  def __init__(self, sock: socket.socket, files: TlsFiles, is_server: bool):
    context = context_of(files, is_server)
    self._sock = sockets.keep(
      lambda: context.wrap_socket(
        sock, server_side=is_server, do_handshake_on_connect=False
      )
    )

  def __getattr__(self, name: str) -> Any:
    # All that TLS does not change, such as `fileno` and `setsockopt`.
    return getattr(self._sock, name)

  async def handshake(self) -> None:
    """Agrees on keys and checks the peer's certificate.

    Raises:
      AuthenticationError: the peer speaks no TLS, or has another authority.
      OSError: it closed the connection.
    """
    loop = asyncio.get_running_loop()
    while True:
      try:
        self._sock.do_handshake()
        return
      except ssl.SSLWantReadError:
        await sockets.ready(self, loop.add_reader, loop.remove_reader)
      except ssl.SSLWantWriteError:
        await sockets.ready(self, loop.add_writer, loop.remove_writer)
      except ssl.SSLEOFError as e:
        raise ConnectionResetError('the peer closed the connection') from e
      except ssl.SSLError as e:
        if self._sock.server_side:
          # OpenSSL says nothing to a client that speaks no TLS.
          with contextlib.suppress(OSError):
            socket.socket.send(self._sock, ALERT)
        raise refusal(e) from e

  def recv_into(self, view: memoryview) -> int:
    """Receives bytes into `view`; raises BlockingIOError if none are available."""
    try:
      return self._sock.recv_into(view)
    except _WAITS as e:
      raise BlockingIOError from e

  def send(self, data: bytes | bytearray | memoryview) -> int:
    """Sends bytes; raises BlockingIOError if the socket takes none now."""
    try:
      return self._sock.send(data)
    except _WAITS as e:
      raise BlockingIOError from e

  def sendmsg(self, parts: Sequence[memoryview]) -> int:
    """Sends the first of the parts. A socket may send fewer than all parts, too."""
    return self.send(parts[0])

  def shutdown(self, how: int) -> None:
    """Shuts the connection down. Another thread may be sending."""
    # The method of SSLSocket would go on without encryption.
    socket.socket.shutdown(self._sock, how)


def refusal(error: ssl.SSLError) -> errors.AuthenticationError:
  """Returns the reason of a TLS error, in words."""
  return errors.AuthenticationError(
    f'no TLS with the peer ({error.reason or error}): it speaks none, or one '
    'side does not accept the certificate of the other. Fix: give all '
    'workers certificates of one authority in TFS_TLS_CERT, TFS_TLS_KEY and '
    'TFS_TLS_CA, or none of them any.'
  )
