"""Addresses of names: a look-up that hangs delays nobody who asks for another.

The operating system's look-up cannot be interrupted, and asyncio runs it in a
few threads that all share: a handful of names that no server answers for would
hold up every live peer. So each name has a thread of its own while it is looked
up, and whoever asks for the same name meanwhile waits for that one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import socket
import threading

# What a look-up gets until its host counts as unknown.
LOOK_UP_SECONDS = 5.0

Places = list[tuple[int, tuple]]

_running: dict[tuple[int, str, int], concurrent.futures.Future] = {}


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
  """Resolves a name as `resolve` does, in a thread without an event loop."""
  literal = _literal(host, port)
  if literal:
    return literal
  try:
    return _look_up(host, port).result(LOOK_UP_SECONDS)
  except concurrent.futures.TimeoutError:
    raise _late(host) from None


def _literal(host: str, port: int) -> Places:
  """Returns the places of a numeric address, which asks nobody."""
  with contextlib.suppress(OSError, UnicodeError):
    return _places(host, port, flags=socket.AI_NUMERICHOST)
  return []


def _places(host: str, port: int, **how: int) -> Places:
  found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, **how)
  return [(family, where) for family, *_, where in found]


def _late(host: str) -> OSError:
  return socket.gaierror(
    socket.EAI_AGAIN,
    f'the name {host!r} was not resolved within {LOOK_UP_SECONDS:g} s',
  )


def _look_up(host: str, port: int) -> concurrent.futures.Future:
  # A fork has none of its parent's threads.
  key = os.getpid(), host, port
  future = _running.get(key)
  if future is None:
    future = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # Nobody can cancel it for others.
    thread = threading.Thread(
      target=_ask, args=(key, future), name=f'look up {host}', daemon=True
    )
    _running[key] = future
    try:
      thread.start()
    except RuntimeError as e:
      del _running[key]
      raise OSError(f'{host!r} cannot be looked up: {e}') from e
  return future


def _ask(key: tuple[int, str, int], future: concurrent.futures.Future) -> None:
  _, host, port = key
  places, error = [], None
  try:
    places = _places(host, port)
  # UnicodeError: the text cannot be a name, such as 'a..b'.
  except (OSError, UnicodeError) as e:
    why = getattr(e, 'strerror', None) or e
    error = socket.gaierror(
      getattr(e, 'errno', None) or socket.EAI_NONAME,
      f'the name {host!r} has no address ({why})',
    )
  del _running[key]
  if error is None:
    future.set_result(places)
  else:
    future.set_exception(error)
