"""Free ports of this host."""

import collections
import pathlib
import random
import socket
import sys

from tf_strategies import errors

# Linux takes the ports of connections from a range of its own. A port from
# there, free now, may belong to somebody's connection once a task listens.
_OF_CONNECTIONS = pathlib.Path('/proc/sys/net/ipv4/ip_local_port_range')
_FIRST, _LAST = 20_000, 32_000
_TRIES_PER_PORT = 50

# Until a task listens at a port nothing tells other processes that it was given. A
# name that only one can have does, while this process holds it; so many are held.
_HELD = 128

_held: collections.deque[socket.socket] = collections.deque()


def pick_ports(count: int) -> list[int]:
  """Ports at which nothing listens now, all different. O(count) attempts.

  On Linux no other call gives one of the last 128 that were given, in no process of
  this host. Other programs may take them before they are used: what listens must
  take an occupied port for an error that says so.

  Raises:
    UnsupportedOptionError: no host has so many.
    RendezvousError: too few of 20,000 to 32,000 are free.

  Example:

    >>> len(set(pick_ports(3)))
    3
  """
  ports: list[int] = []
  candidates = _candidates()
  if count > _LAST - _FIRST:
    raise errors.UnsupportedOptionError(
      f'{count} tasks on one host',
      f'at most {_LAST - _FIRST}, each of which has a port',
      'start fewer, or others on more hosts',
    )
  # Whoever has seeded `random` gets other ports all the same, and keeps its state.
  for port in random.SystemRandom().sample(
    candidates, min(len(candidates), _TRIES_PER_PORT * count)
  ):
    if len(ports) == count:
      break
    if _is_free(port) and _hold(port):
      ports.append(port)
  if len(ports) < count:
    raise errors.RendezvousError(
      f'Found {len(ports)} free ports from {_FIRST} to {_LAST} instead of '
      f'{count}. End what listens there.'
    )
  while len(_held) > max(_HELD, count):
    _held.popleft().close()
  return ports


def _candidates() -> list[int]:
  ports = range(_FIRST, _LAST)
  try:
    first, last = map(int, _OF_CONNECTIONS.read_text('ascii').split())
  except (OSError, ValueError):
    return list(ports)
  # Where connections have them all there is nothing better.
  return [p for p in ports if not first <= p <= last] or list(ports)


def _is_free(port: int) -> bool:
  with socket.socket() as s:
    try:
      s.bind(('', port))
    except OSError:
      return False
  return True


def _hold(port: int) -> bool:
  """Returns whether no process of this host holds it; this one does from now on."""
  if sys.platform != 'linux':
    return True
  s = socket.socket(socket.AF_UNIX)
  try:
    # An abstract name: it is gone with the process.
    s.bind(f'\0tf_strategies/port/{port}')
  except OSError:
    s.close()
    return False
  _held.append(s)
  return True
