"""Free ports of this host."""

import pathlib
import random
import socket

from tf_strategies import errors

# Linux takes the ports of connections from a range of its own. A port from
# there, free now, may belong to somebody's connection once a task listens.
_OF_CONNECTIONS = pathlib.Path('/proc/sys/net/ipv4/ip_local_port_range')
_FIRST, _LAST = 20_000, 32_000
_TRIES_PER_PORT = 50

_given: set[int] = set()


def pick_ports(count: int) -> list[int]:
  """Ports at which nothing listens now, none given before. O(count) attempts.

  Others may take them before they are used: what listens must take an occupied
  port for an error that says so.

  Raises:
    RendezvousError: too few of 20,000 to 32,000 are free.

  Example:

    >>> len(set(pick_ports(3)))
    3
  """
  ports: list[int] = []
  candidates = [p for p in _candidates() if p not in _given] or _candidates()
  for port in random.sample(
    candidates, min(len(candidates), _TRIES_PER_PORT * count)
  ):
    if len(ports) == count:
      break
    if _is_free(port):
      ports.append(port)
  if len(ports) < count:
    raise errors.RendezvousError(
      f'Found {len(ports)} free ports from {_FIRST} to {_LAST} instead of '
      f'{count}. End what listens there.'
    )
  _given.update(ports)
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
