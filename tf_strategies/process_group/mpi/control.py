"""Connects the ranks that MPI started with rank 0, for the control plane.

Over MPI the ranks learn where rank 0 listens, and a secret that is made for this
group alone; the rest is as in a group over TCP: heartbeats, exchanges,
goodbyes, one report when something fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tf_strategies import errors
from tf_strategies.process_group import options as options_lib
from tf_strategies.process_group import state
from tf_strategies.process_group.control import control_plane
from tf_strategies.process_group.mpi import links
from tf_strategies.process_group.network import authentication, protocol, server
from tf_strategies.process_group.network import connection as connection_lib

_LOOPBACK = '127.0.0.1'
_EVERYWHERE = '0.0.0.0'
_RETRY_SECONDS = 0.1
_CONTROL = authentication.Purpose.CONTROL
# What the others say after rank 0 has given up, or the other way round.
_SLACK_SECONDS = 10.0


def form(
  comm: links.Communicator,
  host: str,
  options: options_lib.GroupOptions,
  deadline: float,
) -> tuple[server.Server, state.GroupState, control_plane.ControlPlane]:
  """Connects all ranks; every rank calls it at the same time.

  Args:
    comm: of the ranks.
    host: the name of this one's host.
    options: of the group.
    deadline: in seconds of the monotonic clock.

  Returns:
    The thread that all of it runs in, and the group's state and control plane.

  Raises:
    RendezvousError: on every rank, if one cannot be reached.
    DeadlineError: a rank does not come.
  """
  gathering = _Gathering(comm.rank, comm.size)
  try:
    hosts = comm.gather_values(host, deadline)
    mine = {'host': host, **gathering.listen(alone=len(set(hosts)) == 1)}
    told = comm.gather_values(mine, deadline)
    _raise_first(told, [said['error'] for said in told])
    failed = gathering.connect(told[0], deadline)
    _raise_first(
      told, comm.gather_values(failed, deadline + 2 * _SLACK_SECONDS)
    )
    members = [
      state.Member(r, r, f'{said["host"]}:{said["port"]}')
      for r, said in enumerate(told)
    ]
    shared = state.GroupState(members, comm.rank, generation=1)
    plane = gathering.start(shared, options)
  except BaseException:
    gathering.close()
    raise
  return gathering.host, shared, plane


class _Gathering:
  """Where rank 0 waits for the others, and the others call it."""

  def __init__(self, rank: int, size: int):
    self._rank = rank
    self._size = size
    self.host: server.Server | None = None
    self._connections: dict[int, connection_lib.Connection] = {}

  def listen(self, alone: bool) -> dict[str, Any]:
    """Opens an address.

    Args:
      alone: whether all ranks are on this host.

    Returns:
      What the other ranks must know of it.
    """
    secret = secrets.token_bytes(32)
    # Only rank 0 is called.
    where = _LOOPBACK if alone or self._rank else _EVERYWHERE
    port, error = 0, ''
    try:
      self.host = server.Server(
        f'{where}:0',
        self._rank,
        authentication.Credentials(secret),
        {_CONTROL: self._accept},
      )
      port = self.host.port
    except errors.Error as e:
      error = str(e)
    return {
      'port': port,
      'places': [_LOOPBACK] if alone else _places(),
      'secret': '' if self._rank else secret.hex(),
      'error': error,
    }

  def connect(self, center: Mapping[str, Any], deadline: float) -> str:
    """Connects this rank; what went wrong, or ''."""
    if self._rank:
      return self.host.call(self._call(center, deadline))
    return self.host.call(self._wait(deadline + _SLACK_SECONDS / 2))

  def start(
    self, shared: state.GroupState, options: options_lib.GroupOptions
  ) -> control_plane.ControlPlane:
    """Makes the control plane of what is connected."""

    async def begin() -> control_plane.ControlPlane:
      plane = control_plane.ControlPlane(
        self.host, shared, self._connections, options
      )
      plane.start()
      return plane

    return self.host.call(begin())

  def close(self) -> None:
    """Gives everything back, as no group came of it."""
    for connection in self._connections.values():
      connection.shut_down()
    if self.host is not None:
      self.host.close()
    for connection in self._connections.values():
      connection.close()

  async def _accept(self, connection, request) -> None:
    if request.client in self._connections:
      connection.close()
    else:
      self._connections[request.client] = connection

  async def _wait(self, deadline: float) -> str:
    while len(self._connections) < self._size - 1:
      if time.monotonic() > deadline:
        missing = sorted({*range(1, self._size)} - {*self._connections})
        return f'ranks {missing} did not call'
      await asyncio.sleep(0.01)
    return ''

  async def _call(self, center: Mapping[str, Any], deadline: float) -> str:
    credentials = authentication.Credentials(bytes.fromhex(center['secret']))
    said = 'no time was left'
    while time.monotonic() < deadline:
      for place in center['places']:
        address = f'{place}:{center["port"]}'
        request = authentication.Request(_CONTROL, self._rank, 0, self._size)
        try:
          self._connections[0] = await connection_lib.dial(
            address, request, credentials
          )
          return ''
        except (OSError, protocol.ProtocolError, errors.Error) as e:
          said = f'rank 0 cannot be reached at {address} ({e})'
      await asyncio.sleep(_RETRY_SECONDS)
    return said


def _places() -> list[str]:
  """Names and addresses under which other hosts may find this one."""
  name = socket.gethostname()
  places = [name]
  with contextlib.suppress(OSError):
    found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    places += [where[0] for *_, where in found]
  with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as s:
    # Sends nothing: it tells which address leads out of this host.
    s.connect(('192.0.2.1', 9))
    places.append(s.getsockname()[0])
  return list(dict.fromkeys(p for p in places if not p.startswith('127.')))


def _raise_first(told: Sequence[Mapping], failures: Sequence[str]) -> None:
  for rank, failure in enumerate(failures):
    if failure:
      raise errors.RendezvousError(
        f'Rank {rank} on {told[rank]["host"]} has no '
        f'connection to the others: {failure}. MPI started all ranks, but '
        'the control plane needs TCP between them and rank 0.'
      )
