"""The sockets of this process: kept from forked children, opened, accepted.

A forked child has every descriptor of its parent. While it lives, the parent's
peers do not hear of the parent's death, and nobody can take its address; so a
child closes what `keep` knows as soon as it exists.
"""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import struct
import threading
import weakref
from collections.abc import Callable

from tf_strategies import errors
from tf_strategies.process_group.network import names

# Closing then leaves nothing behind, not even the port.
_ABORT = struct.pack('ii', 1, 0)

# Held while a socket is made, so that no fork falls between that and `keep`.
_lock = threading.Lock()
_ours: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def keep(make: Callable[[], socket.socket]) -> socket.socket:
  """Returns the socket that `make` makes. Forked children close it.

  Raises:
    ResourceLimitError: no file descriptor is left.
  """
  try:
    with _lock:
      sock = make()
      _ours.add(sock)
  except OSError as e:
    _check_for_shortage(e)
    raise
  return sock


def _new(kind: type[socket.socket], family: int) -> socket.socket:
  return keep(lambda: kind(family, socket.SOCK_STREAM))


async def connect(place: tuple[int, tuple]) -> socket.socket:
  """Returns a non-blocking socket that is connected to a family's address."""
  family, where = place
  sock = _new(socket.socket, family)
  try:
    sock.setblocking(False)
    # The port that it gets may be the one of a task that starts later.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    await asyncio.get_running_loop().sock_connect(sock, where)
    if sock.getsockname() == sock.getpeername():
      # Its port happens to be the one that it called: TCP connects it to itself.
      sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
      raise ConnectionRefusedError(errno.ECONNREFUSED, 'nobody listens there')
    return sock
  except BaseException:
    sock.close()
    raise


class _Listener(socket.socket):
  """Keeps the connections that it accepts."""

  def accept(self):
    accept = super().accept
    return keep(lambda: accept()[0]), None


async def accept(listener: socket.socket) -> socket.socket:
  """Returns the next connection of a listener, non-blocking."""
  sock, _ = await asyncio.get_running_loop().sock_accept(listener)
  return sock


def allow(descriptors: int) -> None:
  """Raises this process's limit of open files, as far as the system permits."""
  limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
  if resource.RLIM_INFINITY not in (limit, most):
    descriptors = min(descriptors, most)
  if limit != resource.RLIM_INFINITY and limit < descriptors:
    with contextlib.suppress(OSError, ValueError):
      resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, most))


def listen(host: str, port: int) -> socket.socket:
  """Returns a non-blocking listener at the first free address of a name."""
  for family, where in names.resolve_now(host, port):
    listener = _new(_Listener, family)
    try:
      # A restarted worker takes its address back at once; two at a time cannot.
      listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      listener.bind(where)
      listener.listen(1024)
      listener.setblocking(False)
      return listener
    except OSError as e:
      listener.close()
      problem = e
  raise problem


def listens(host: str, port: int) -> bool:
  """Returns whether this process itself listens at an address: a group of it is open."""
  taken = set()
  for sock in list(_ours):
    with contextlib.suppress(OSError):  # It may be closed.
      if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        taken.add(sock.getsockname()[:2])
  return any(where[:2] in taken for _, where in names.resolve_now(host, port))


def _check_for_shortage(error: OSError) -> None:
  """Raises ResourceLimitError if no file descriptor is left."""
  if error.errno == errno.ENFILE:
    raise errors.ResourceLimitError(
      'Expected a file descriptor for each peer, got none on this host. Fix: '
      'end what holds so many, or raise fs.file-max.'
    ) from error
  if error.errno != errno.EMFILE:
    return
  limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
  try:
    used = str(len(os.listdir('/proc/self/fd')))
  except OSError:
    used = 'all'  # Listing them takes one too.
  raise errors.ResourceLimitError(
    f'Expected a file descriptor for each peer, got none: {used} of {limit} '
    f'of this process (pid {os.getpid()}) are in use. Fix: raise the limit '
    f'with `ulimit -n` before it starts (up to {most} here), or close what it '
    'holds open.'
  ) from error


def _close_in_child() -> None:
  for sock in list(_ours):
    sock.close()
  _ours.clear()
  _lock.release()


os.register_at_fork(
  before=_lock.acquire,
  after_in_parent=_lock.release,
  after_in_child=_close_in_child,
)
