"""Free ports of this host."""

import collections
import random
import socket
import sys

from tf_strategies import errors

# Linux takes the ports of connections from 32,768 on. A port from there, free now, may
# belong to somebody's connection once a task listens.
_PORTS = range(20_000, 32_000)

# Until a task listens at a port nothing tells other processes that it was given. A
# name that only one can have does, while this process holds it; so many are held.
_HELD = 128

_held: collections.deque[socket.socket] = collections.deque()


def pick_ports(count: int) -> list[int]:
  """Returns ports at which nothing listens now, all different.

  On Linux a port is given once: no other call on this host gets it while this
  process lives and is not 128 ports further on. Other programs may take a port before
  it is used, so whoever listens there must report an occupied port.

  Raises:
    UnsupportedOptionError: `count` is more than one host has.
    RendezvousError: too few ports from 20,000 to 32,000 are free.

  Example:

    >>> len(set(pick_ports(3)))
    3
  """
  ports: list[int] = []
  if count > len(_PORTS):
    raise errors.UnsupportedOptionError(
      f'{count}',
      f'at most {len(_PORTS)} tasks on one host',
      'start fewer, or others on more hosts: each needs a port',
    )
  # Whoever has seeded `random` gets other ports all the same, and keeps its state.
  for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
    if len(ports) == count:
      break
    if _is_free(port) and _hold(port):
      ports.append(port)
  if len(ports) < count:
    raise errors.RendezvousError(
      f'Expected {count} free ports from {_PORTS[0]} to {_PORTS[-1]}, got '
      f'{len(ports)}. Fix: end what listens there.'
    )
  while len(_held) > max(_HELD, count):
    _held.popleft().close()
  return ports


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
