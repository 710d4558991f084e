"""Finds the other processes of a job and forms groups of them."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Mapping

from tf_strategies import errors
from tf_strategies.process_group import group as group_lib
from tf_strategies.process_group import options as options_lib
from tf_strategies.process_group import tcp


class Rendezvous:
  """Owns this process's address of the cluster for the life of the process.

  Args:
    addresses: 'host:port' of each task.
    task: this process's.
    options: how long to wait, for how many.
  """

  def __init__(
    self,
    addresses: Mapping[int, str],
    task: int,
    options: options_lib.GroupOptions | None = None,
  ):
    self._addresses = dict(sorted(addresses.items()))
    self._task = task
    self._options = options or options_lib.GroupOptions()
    self._generation = 0
    self._listener = socket.create_server(
      _host_port(self._addresses[task]), backlog=128
    )

  def form(self, progress: int = 0) -> tcp.TcpProcessGroup:
    """Blocks until all workers are there.

    Args:
      progress: how far this worker has come; the others see it.

    Returns:
      A group, whose generation is higher than any before.

    Raises:
      RendezvousError: workers are missing at the deadline.
    """
    deadline = time.monotonic() + self._options.rendezvous_timeout_seconds
    self._generation += 1
    me = {'task': self._task, 'progress': progress, 'gen': self._generation}
    known = {self._task: me}
    sockets = {}
    lower = [t for t in self._addresses if t < self._task]
    higher = {t for t in self._addresses if t > self._task}
    for task in lower:
      sockets[task], known[task] = self._dial(task, me, deadline)
    while higher - set(sockets):
      self._listener.settimeout(max(deadline - time.monotonic(), 0.001))
      try:
        sock, _ = self._listener.accept()
        sock.settimeout(5)
        hello = _receive(sock)
        _send(sock, me)
      except TimeoutError as e:
        raise self._missing(set(self._addresses) - set(known)) from e
      except OSError:
        continue
      sockets[hello['task']], known[hello['task']] = sock, hello
    self._generation = max(k['gen'] for k in known.values())
    members = tuple(
      group_lib.Member(rank, t, self._addresses[t], known[t]['progress'])
      for rank, t in enumerate(sorted(known))
    )
    ranks = {m.task: m.rank for m in members}
    return tcp.TcpProcessGroup(
      members,
      ranks[self._task],
      self._generation,
      {ranks[t]: s for t, s in sockets.items()},
      self._options,
    )

  def close(self) -> None:
    """Gives the address back."""
    self._listener.close()

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    self.close()

  def _dial(self, task, me, deadline):
    while time.monotonic() < deadline:
      try:
        sock = socket.create_connection(
          _host_port(self._addresses[task]), timeout=5
        )
        _send(sock, me)
        return sock, _receive(sock)
      except OSError:
        time.sleep(0.05)
    raise self._missing({task})

  def _missing(self, tasks):
    named = ', '.join(f'task {t} at {self._addresses[t]}' for t in tasks)
    return errors.RendezvousError(
      f'After {self._options.rendezvous_timeout_seconds} s these workers are '
      f'missing: {named}. Start them, or check their addresses.'
    )


def _host_port(address: str) -> tuple[str, int]:
  host, _, port = address.rpartition(':')
  return host.strip('[]'), int(port)


def _send(sock, message):
  data = json.dumps(message).encode()
  sock.sendall(struct.pack('!I', len(data)) + data)


def _receive(sock):
  (size,) = struct.unpack('!I', _exactly(sock, 4))
  return json.loads(_exactly(sock, min(size, 1 << 16)))


def _exactly(sock, size):
  data = b''
  while len(data) < size:
    more = sock.recv(size - len(data))
    if not more:
      raise ConnectionError('closed')
    data += more
  return data
