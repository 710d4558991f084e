"""Addresses of names: a look-up that hangs delays nobody who asks for another.

The operating system's look-up cannot be interrupted, and asyncio runs it in a
few threads that all share: a handful of names that no server answers for would
hold up every live peer. So each name has a thread of its own while it is looked
up, and whoever asks for the same name meanwhile waits for that one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ipaddress
import os
import socket
import threading

# What a look-up gets until its host counts as unknown.
LOOK_UP_SECONDS = 5.0

Places = list[tuple[int, tuple]]

_lock = threading.Lock()
_running: dict[tuple[str, int], concurrent.futures.Future] = {}


async def resolve(host: str, port: int) -> Places:
  """Families and addresses of a name; OSError that names the host if none."""
  literal = _literal(host, port)
  if literal:
    return literal
  future = asyncio.wrap_future(_look_up(host, port))
  try:
    await asyncio.wait([future], timeout=LOOK_UP_SECONDS)
    if not future.done():
      raise _late(host)
    return future.result()
  finally:
    future.cancel()  # This wait alone: others may go on.


def resolve_now(host: str, port: int) -> Places:
  """As `resolve`, for a thread without an event loop."""
  literal = _literal(host, port)
  if literal:
    return literal
  try:
    return _look_up(host, port).result(LOOK_UP_SECONDS)
  except concurrent.futures.TimeoutError:
    raise _late(host) from None


def _literal(host: str, port: int) -> Places:
  try:
    version = ipaddress.ip_address(host).version
  except ValueError:
    return []
  if '%' in host:
    return []  # The number of the interface has to be found.
  family = socket.AF_INET if version == 4 else socket.AF_INET6
  return [(family, (host, port))]


def _late(host: str) -> OSError:
  return socket.gaierror(
    socket.EAI_AGAIN,
    f'the name {host!r} was not resolved within {LOOK_UP_SECONDS:g} s',
  )


def _look_up(host: str, port: int) -> concurrent.futures.Future:
  with _lock:
    future = _running.get((host, port))
    if future is None:
      future = concurrent.futures.Future()
      future.set_running_or_notify_cancel()  # Nobody can cancel it for others.
      thread = threading.Thread(
        target=_ask, args=(host, port, future), name=f'look up {host}'
      )
      thread.daemon = True
      try:
        thread.start()
      except RuntimeError as e:
        raise OSError(f'{host!r} cannot be looked up: {e}') from e
      _running[host, port] = future
  return future


def _ask(host: str, port: int, future: concurrent.futures.Future) -> None:
  try:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    outcome, error = [(family, where) for family, *_, where in found], None
  # UnicodeError: what cannot be a name, such as 'a..b'.
  except (OSError, UnicodeError) as e:
    why = getattr(e, 'strerror', None) or e
    outcome, error = (
      [],
      socket.gaierror(
        getattr(e, 'errno', None) or socket.EAI_NONAME,
        f'the name {host!r} has no address ({why})',
      ),
    )
  with _lock:
    _running.pop((host, port), None)
  if error is None:
    future.set_result(outcome)
  else:
    future.set_exception(error)


def _forget() -> None:
  # The threads stay in the parent, and one of them may have had the lock.
  global _lock
  _lock = threading.Lock()
  _running.clear()


if hasattr(os, 'register_at_fork'):
  os.register_at_fork(after_in_child=_forget)
