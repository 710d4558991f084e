"""Finds the user of the process at the other end of a connection on this host."""

import os
import pathlib
import socket
import struct

from tf_strategies import errors

# Linux has a row for each socket, with both ends, its state and its user.
_TABLES = {
  socket.AF_INET: pathlib.Path('/proc/net/tcp'),
  socket.AF_INET6: pathlib.Path('/proc/net/tcp6'),
}
_ESTABLISHED = '01'
_USER_COLUMN = 7
# While other sockets come and go, a reader of the table may miss a row.
_ATTEMPTS = 3


def is_known() -> bool:
  """Returns whether this operating system tells the users of connections."""
  return _TABLES[socket.AF_INET].exists()


def check(sock: socket.socket) -> None:
  """Raises AuthenticationError if the peer is not a process of this user."""
  user = _user_of_peer(sock)
  if user == os.geteuid():
    return
  whose = 'an unknown user' if user is None else f'user {user}'
  raise errors.AuthenticationError(
    f'Expected a peer of user {os.geteuid()}, as this process is, got '
    f'{sock.getpeername()[:2]} of {whose}. Fix: give all workers the same '
    'TFS_SECRET, or pass allow_unauthenticated=True where every user of this '
    'host is trusted.'
  )


def _user_of_peer(sock: socket.socket) -> int | None:
  ends = f' {_end(sock.getpeername())} {_end(sock.getsockname())} '
  for _ in range(_ATTEMPTS):
    table = _TABLES[sock.family].read_text()
    place = table.find(ends + _ESTABLISHED)
    if place >= 0:
      start = table.rfind('\n', 0, place) + 1
      return int(table[start:].split(None, _USER_COLUMN + 1)[_USER_COLUMN])
  return None


def _end(where: tuple) -> str:
  """Returns an address as the table writes it, in this machine's byte order."""
  host, port = where[:2]
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  packed = socket.inet_pton(family, host.partition('%')[0])
  words = struct.unpack(f'={len(packed) // 4}I', packed)
  return ''.join(f'{word:08X}' for word in words) + f':{port:04X}'
