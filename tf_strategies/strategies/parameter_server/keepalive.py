"""Keepalive: ends calls to tasks that have stopped answering.

TensorFlow waits for a remote task without a deadline: a stopped or unreachable
task blocks every thread that has called it. This process cannot cancel such a
call, but it can shut down its own TCP connections to the task. The calls then
fail as they do when a task dies.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import socket
import stat
import threading
import time
from collections.abc import (
  Callable,
  Collection,
  Hashable,
  Iterator,
  Mapping,
)

from absl import logging

from tf_strategies.cluster import reachability

# A numeric host, and a port.
Peer = tuple[str, int]

_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 2.0
# A disconnected task must answer for so long until it counts as connected. By
# then every call that failed has asked about it.
_FORGIVEN_SECONDS = 30.0
_HELLO_BYTES = 4096
# What a client says first, with an empty SETTINGS frame; a server answers with its
# own (RFC 9113, section 3.4).
_HTTP2_HELLO = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + b'\0\0\0\4\0\0\0\0\0'


# Descriptors of questions, which `disconnect` must not close: closing one would
# look like an answer, or like the end of the task.
_asking: set[int] = set()


class Answer(enum.Enum):
  """What the address of a task says."""

  HELLO = 'hello'
  # Nobody listens there, or not a gRPC server.
  REFUSED = 'refused'
  # A connection without a word, or not even that.
  NOTHING = 'nothing'


def ask(address: str, seconds: float = _ANSWER_SECONDS) -> Answer:
  """Returns whether a gRPC server answers at an address; runs nothing there."""
  answer = Answer.REFUSED
  for *kind, _, where in _known(address):
    try:
      if _says_hello(kind, where, seconds):
        return Answer.HELLO
    except TimeoutError:
      answer = Answer.NOTHING
    except OSError:
      continue
  return answer


def _says_hello(kind, where, seconds: float) -> bool:
  with socket.socket(*kind) as connection:
    number = connection.fileno()
    _asking.add(number)  # Before it is connected to anybody.
    try:
      connection.settimeout(seconds)
      connection.connect(where)
      connection.sendall(_HTTP2_HELLO)
      return bool(connection.recv(1))
    finally:
      _asking.discard(number)


@contextlib.contextmanager
def watching(
  addresses: Mapping[Hashable, str], seconds: float = _ANSWER_SECONDS
) -> Iterator[Callable[[], set[Hashable]]]:
  """Yields what returns the tasks that have ended since; or were not there.

  It holds a connection to each, which the system closes when a process ends.
  """
  with contextlib.ExitStack() as stack:
    connections = {}
    for task, address in addresses.items():
      with contextlib.suppress(OSError):
        connection = socket.create_connection(_split(address), seconds)
        stack.enter_context(connection)
        _asking.add(connection.fileno())
        stack.callback(_asking.discard, connection.fileno())
        connection.setblocking(False)
        connections[task] = connection

    def ended():
      return {
        task
        for task in addresses
        if task not in connections or _is_ended(connections[task])
      }

    yield ended


def _is_ended(connection: socket.socket) -> bool:
  try:
    while connection.recv(_HELLO_BYTES):  # It may have said hello.
      pass
    return True
  except BlockingIOError:
    return False
  except OSError:
    return True


def ask_all(
  addresses: Mapping[Hashable, str], seconds: float = _ANSWER_SECONDS
) -> dict[Hashable, Answer]:
  """Asks all addresses at the same time; see `ask`. Takes about 2 * `seconds`."""
  return reachability.concurrently(
    lambda task: ask(addresses[task], seconds),
    addresses,
    Answer.NOTHING,
    2 * seconds,  # A name server may keep a thread longer.
  )


def peers_of(address: str) -> frozenset[Peer]:
  """The hosts and ports that an address stands for now; none if unknown."""
  return frozenset(_peer(where) for *_, where in _known(address))


def _known(address: str) -> list[tuple]:
  try:
    return socket.getaddrinfo(*_split(address), type=socket.SOCK_STREAM)
  except OSError:
    return []


def disconnect(peers: Collection[Peer]) -> None:
  """Shuts down this process's TCP connections to some peers.

  Reads and writes on them fail at once; their owner closes them.
  """
  try:
    numbers = [int(name) for name in os.listdir('/dev/fd')]
  except OSError:
    numbers = range(os.sysconf('SC_OPEN_MAX'))
  for number in numbers:
    _shut_down(number, peers)


def _split(address: str) -> tuple[str, int]:
  host, _, port = address.rpartition(':')
  return host.strip('[]'), int(port)


def _peer(address: tuple) -> Peer:
  """Without the prefix of an IPv4 address that is written as IPv6."""
  return address[0].removeprefix('::ffff:'), address[1]


def _shut_down(number: int, peers: Collection[Peer]) -> None:
  """Shuts a descriptor down if it is a connection to one of the peers."""
  with contextlib.suppress(OSError):
    if number in _asking or not stat.S_ISSOCK(os.fstat(number).st_mode):
      return
    # A copy: the descriptor itself is its owner's to close.
    with socket.socket(fileno=os.dup(number)) as connection:
      if (
        connection.type == socket.SOCK_STREAM
        and connection.family in (socket.AF_INET, socket.AF_INET6)
        and _peer(connection.getpeername()) in peers
      ):
        connection.shutdown(socket.SHUT_RDWR)


class Keepalive:
  """Disconnects tasks that have not answered for `timeout` seconds.

  It asks the host that a task had when it was connected to, not the task's
  name: the name may move to another host, with a new task, while calls still
  wait for the old one.

  A disconnected task stays so until `reset`, since calls to it were lost. If
  none were, nobody resets it: then it counts as connected again when it has
  answered for half a minute.

  Workers call servers for this process, over connections of their own: calls to
  workers wait for a server, and are ended with those to it.
  """

  def __init__(
    self,
    addresses: Mapping[tuple[str, int], str],
    timeout: float,
  ):
    self._addresses = dict(addresses)
    self._timeout = timeout
    self._lock = threading.Lock()
    self._is_closed = threading.Event()
    self.reset()
    threading.Thread(
      target=self._watch, name='tfs-keepalive', daemon=True
    ).start()

  def is_disconnected(self, task: Hashable) -> bool:
    """Returns whether calls to a task were ended since it was connected to."""
    return task in self._disconnected

  def reset(self) -> None:
    """Called when all tasks have been connected to again."""
    peers = {t: peers_of(a) for t, a in self._addresses.items()}
    with self._lock:
      self._peers = peers
      self._answered_at = dict.fromkeys(self._addresses, time.monotonic())
      # When each was disconnected, the last time.
      self._disconnected: dict[Hashable, float] = {}

  def close(self) -> None:
    """Ends the thread, within a few seconds."""
    self._is_closed.set()

  def _watch(self) -> None:
    # A short timeout needs a short poll.
    seconds = min(_POLL_SECONDS, self._timeout / 4)
    while not self._is_closed.wait(seconds):
      asked_at, answered = time.monotonic(), self._answered_at
      answering = self._answering(seconds)
      with self._lock:
        if answered is not self._answered_at:  # Reset meanwhile.
          continue
        for task, answered_at in answered.items():
          if task in answering:
            answered[task] = asked_at
            since = asked_at - self._disconnected.get(task, math.inf)
            if since > _FORGIVEN_SECONDS:
              del self._disconnected[task]
          elif asked_at - answered_at > self._timeout:
            self._disconnect(task)

  def _answering(self, seconds: float) -> set[Hashable]:
    """The tasks that answer at one of their peers."""
    places = {
      (task, peer): f'{peer[0]}:{peer[1]}'
      for task, peers in self._peers.items()
      for peer in peers
    }
    answers = ask_all(places, seconds).items()
    return {task for (task, _), a in answers if a is Answer.HELLO}

  def _disconnect(self, task: tuple[str, int]) -> None:
    """Repeatedly while it is silent: gRPC connects again by itself."""
    if task not in self._disconnected:
      logging.warning(
        '%s %d at %s has not answered for %.1f s: calls to it are given up',
        *task,
        self._addresses[task],
        time.monotonic() - self._answered_at[task],
      )
    self._disconnected[task] = time.monotonic()
    for each, peers in self._peers.items():
      if each == task or (task[0] == 'ps' and each[0] == 'worker'):
        disconnect(peers)
