"""Looks up the addresses of names. A look-up that hangs delays no other name.

The operating system's look-up cannot be interrupted, and asyncio runs all of them in a
few threads: a handful of names without an answer would hold up every live peer. So each
look-up has its own thread, and callers that ask for the same name meanwhile wait for it.
"""

import asyncio
import concurrent.futures
import os
import socket
import threading

# Time of a look-up after which its host counts as unknown.
LOOK_UP_SECONDS = 5.0

Places = list[tuple[int, tuple]]

_running: dict[tuple[int, str, int], concurrent.futures.Future] = {}


async def resolve(host: str, port: int) -> Places:
  """Returns families and addresses of a name. Raises an OSError that names the host."""
  future = asyncio.wrap_future(_look_up(host, port))
  try:
    await asyncio.wait([future], timeout=LOOK_UP_SECONDS)
    if not future.done():
      raise _late(host)
    return future.result()
  finally:
    future.cancel()  # Ends this wait only: others may go on.


def resolve_now(host: str, port: int) -> Places:
  """Resolves a name as `resolve` does, in a thread without an event loop."""
  try:
    return _look_up(host, port).result(LOOK_UP_SECONDS)
  except concurrent.futures.TimeoutError:
    raise _late(host) from None


def _late(host: str) -> OSError:
  return socket.gaierror(
    socket.EAI_AGAIN,
    f'the name {host!r} was not resolved within {LOOK_UP_SECONDS:g} s',
  )


def _look_up(host: str, port: int) -> concurrent.futures.Future:
  # A fork has none of its parent's threads.
  key = os.getpid(), host, port
  future = _running.get(key)
  if future is not None:
    return future
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
  try:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    future.set_result([(family, where) for family, *_, where in found])
  # UnicodeError: the text cannot be a name, such as 'a..b'.
  except (OSError, UnicodeError) as e:
    why = getattr(e, 'strerror', None) or e
    number = getattr(e, 'errno', None) or socket.EAI_NONAME
    what = f'the name {host!r} has no address ({why})'
    future.set_exception(socket.gaierror(number, what))
  finally:
    del _running[key]
