"""Whose process is at the other end of a connection within this host."""

from __future__ import annotations

import errno
import os
import pathlib
import socket
import struct

from tf_strategies import errors

# Linux: a row for each socket, with both of its ends, its state and its user.
_TABLES = {
  socket.AF_INET: pathlib.Path('/proc/net/tcp'),
  socket.AF_INET6: pathlib.Path('/proc/net/tcp6'),
}
_ESTABLISHED = '01'
_USER_COLUMN = 7
# While other sockets come and go, a reader of the table may miss a row.
_ATTEMPTS = 3
# linux/inet_diag.h: one socket by its ends. The table has a row for each of them, which
# a host with many workers has no time to read at every connection.
_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_HEADER = struct.Struct('=IHHII')
_REQUEST = struct.Struct('=BBBBI')
_ANSWER = struct.Struct('=BBBB48sIIII')  # The state, and the user, among it.
_ANY = 0xFFFFFFFF  # Any state, any cookie.


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
    f'the peer at {sock.getpeername()[:2]} is a process of {whose}. Expected '
    f'user {os.geteuid()}, whom this process runs as: without a secret no '
    'other is trusted. Fix: give all workers the same TFS_SECRET, or pass '
    'allow_unauthenticated=True where every user of this host is trusted.'
  )


def _user_of_peer(sock: socket.socket) -> int | None:
  try:
    return _ask_kernel(sock)
  except OSError:
    return _read_table(sock)  # Its module for this is not there.


def _ask_kernel(sock: socket.socket) -> int | None:
  peer, own = sock.getpeername(), sock.getsockname()
  packed = [_packed(where[0]).ljust(16, b'\0') for where in (peer, own)]
  ends = struct.pack('!HH', peer[1], own[1]) + b''.join(packed)
  ends += struct.pack('=III', 0, _ANY, _ANY)
  request = _REQUEST.pack(sock.family, socket.IPPROTO_TCP, 0, 0, _ANY) + ends
  header = _HEADER.pack(
    _HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0
  )
  with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
    kernel.settimeout(1.0)
    kernel.sendto(header + request, (0, 0))
    answer = kernel.recv(4096)
  _, kind, *_ = _HEADER.unpack_from(answer)
  if kind != _SOCK_DIAG_BY_FAMILY:
    [error] = struct.unpack_from('=i', answer, _HEADER.size)
    if -error == errno.ENOENT:
      # No such socket; or no module, which the table tells.
      return _read_table(sock)
    raise OSError(-error, os.strerror(-error))
  _, found, _, _, _, _, _, _, user = _ANSWER.unpack_from(answer, _HEADER.size)
  return user if found == int(_ESTABLISHED) else None


def _read_table(sock: socket.socket) -> int | None:
  ends = f' {_end(sock.getpeername())} {_end(sock.getsockname())} '
  for _ in range(_ATTEMPTS):
    table = _TABLES[sock.family].read_text()
    place = table.find(ends + _ESTABLISHED)
    if place >= 0:
      start = table.rfind('\n', 0, place) + 1
      return int(table[start:].split(None, _USER_COLUMN + 1)[_USER_COLUMN])
  return None


def _end(where: tuple) -> str:
  """An address as the table writes it: words of this machine's byte order."""
  packed, port = _packed(where[0]), where[1]
  words = struct.unpack(f'={len(packed) // 4}I', packed)
  return ''.join(f'{word:08X}' for word in words) + f':{port:04X}'


def _packed(host: str) -> bytes:
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  return socket.inet_pton(family, host.partition('%')[0])
