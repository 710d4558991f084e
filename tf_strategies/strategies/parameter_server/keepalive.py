"""Tasks that have stopped answering, and giving up what TensorFlow waits for there.

TensorFlow waits for a remote task without a deadline: one that is stopped, or cut off
without a reset, holds whatever thread has asked it for something. This process cannot
take such a call back, but it can end its own TCP connections to that task: the calls
then fail, as they do when a task dies.
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
from collections.abc import Collection, Hashable, Iterable, Mapping

from absl import logging

# A numeric host, and a port.
Peer = tuple[str, int]

_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 2.0
# For so long a task must answer again until it counts as if it had never been cut
# off. What failed by the cut has been asked about long before.
_FORGIVEN_SECONDS = 30.0
# What a client says first, with an empty SETTINGS frame; a server answers with its
# own (RFC 9113, section 3.4).
_HTTP2_HELLO = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + b'\0\0\0\4\0\0\0\0\0'


class Answer(enum.Enum):
  """What the address of a task says."""

  HELLO = 'hello'
  # Nobody listens there, or not a gRPC server.
  REFUSED = 'refused'
  # A connection without a word, or not even that.
  NOTHING = 'nothing'


def ask(address: str, seconds: float = _ANSWER_SECONDS) -> Answer:
  """Whether a gRPC server answers at an address; runs nothing there.

  Args:
    address: 'host:port'.
    seconds: to wait for each of the connection and the answer.
  """
  host, port = _split(address)
  try:
    with socket.create_connection((host, port), seconds) as connection:
      connection.settimeout(seconds)
      connection.sendall(_HTTP2_HELLO)
      return Answer.HELLO if connection.recv(1) else Answer.REFUSED
  except TimeoutError:
    return Answer.NOTHING
  except OSError:
    return Answer.REFUSED


def ask_all(
  addresses: Mapping[Hashable, str], seconds: float = _ANSWER_SECONDS
) -> dict[Hashable, Answer]:
  """As `ask`, all at the same time; takes little more than 2 * `seconds`."""
  found = dict.fromkeys(addresses, Answer.NOTHING)

  def ask_one(task):
    found[task] = ask(addresses[task], seconds)

  threads = [
    threading.Thread(target=ask_one, args=(task,), daemon=True)
    for task in addresses
  ]
  for thread in threads:
    thread.start()
  ends_at = time.monotonic() + 2 * seconds
  for thread in threads:
    # A name server may keep it longer.
    thread.join(max(0.0, ends_at - time.monotonic()))
  return dict(found)


def peers_of(address: str) -> frozenset[Peer]:
  """The hosts and ports that an address stands for now; none if unknown."""
  host, port = _split(address)
  try:
    known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
  except OSError:
    return frozenset()
  return frozenset((_plain(where[0]), where[1]) for *_, where in known)


def cut(peers: Collection[Peer]) -> int:
  """Ends this process's TCP connections to some peers.

  What reads or writes them fails at once; their owner closes them.

  Args:
    peers: as `peers_of` returns them.

  Returns:
    How many there were.
  """
  return sum(_shut_down(number, peers) for number in _descriptors())


def _split(address: str) -> tuple[str, int]:
  host, _, port = address.rpartition(':')
  return host.strip('[]'), int(port)


def _plain(host: str) -> str:
  """Without the prefix of an IPv4 address that is written as IPv6."""
  return host.removeprefix('::ffff:')


def _descriptors() -> Iterable[int]:
  """The sockets of this process."""
  try:
    numbers = [int(name) for name in os.listdir('/dev/fd')]
  except OSError:
    numbers = range(os.sysconf('SC_OPEN_MAX'))
  for number in numbers:
    with contextlib.suppress(OSError):
      if stat.S_ISSOCK(os.fstat(number).st_mode):
        yield number


def _shut_down(number: int, peers: Collection[Peer]) -> bool:
  """Shuts a socket down if it leads to one of the peers."""
  try:
    # A copy: the descriptor itself is its owner's to close.
    with socket.socket(fileno=os.dup(number)) as connection:
      if connection.type != socket.SOCK_STREAM:
        return False
      peer = connection.getpeername()
      if isinstance(peer, str | bytes):  # A Unix socket.
        return False
      if (_plain(peer[0]), peer[1]) not in peers:
        return False
      connection.shutdown(socket.SHUT_RDWR)
      return True
  except OSError:
    return False


class Keepalive:
  """Cuts tasks off that have not answered for some time.

  What is asked is not the name of a task but the host that it was found at when
  it was connected to: the name may have gone to another host, with a new task,
  while calls wait for the old one.

  A task that was cut off stays so until `reset`: calls to it were lost. If there
  were none, nobody takes it back: then it is no longer cut off when it has answered
  again for half a minute.

  Args:
    addresses: 'host:port' by task.
    timeout: seconds without an answer after which a task is cut off.
  """

  def __init__(self, addresses: Mapping[Hashable, str], timeout: float):
    self._addresses = dict(addresses)
    self._timeout = timeout
    self._peers: dict[Hashable, frozenset[Peer]] = {}
    self._answered_at: dict[Hashable, float] = {}
    # When each was cut off, the last time.
    self._cut_off: dict[Hashable, float] = {}
    self._lock = threading.Lock()
    self._is_closed = threading.Event()
    self.reset()
    self._thread = threading.Thread(
      target=self._watch, name='tfs-keepalive', daemon=True
    )
    self._thread.start()

  def is_disconnected(self, task: Hashable) -> bool:
    """Whether calls to a task have been given up since it was connected to."""
    return task in self._cut_off

  def reset(self) -> None:
    """Called when all tasks have been connected to again."""
    peers = {t: peers_of(a) for t, a in self._addresses.items()}
    with self._lock:
      self._peers = peers
      self._answered_at = dict.fromkeys(self._addresses, time.monotonic())
      self._cut_off = {}

  def close(self) -> None:
    """Ends the watch, within a few seconds."""
    self._is_closed.set()

  def _watch(self) -> None:
    # A short timeout needs a short poll.
    seconds = min(_POLL_SECONDS, self._timeout / 4)
    while not self._is_closed.wait(seconds):
      asked_at, answered = time.monotonic(), self._answered_at
      answering = self._who_answers(seconds)
      with self._lock:
        if answered is self._answered_at:  # Else taken back meanwhile.
          self._judge(answering, asked_at)

  def _judge(self, answering: set[Hashable], asked_at: float) -> None:
    """Cuts off who has been silent for too long, and forgives who is not."""
    for task, answered_at in self._answered_at.items():
      if task in answering:
        self._answered_at[task] = asked_at
        self._forgive(task)
      elif asked_at - answered_at > self._timeout:
        self._cut(task)

  def _who_answers(self, seconds: float) -> set[Hashable]:
    """The tasks that answer at one of their peers."""
    places = {
      (task, peer): f'{peer[0]}:{peer[1]}'
      for task, peers in self._peers.items()
      for peer in peers
    }
    answers = ask_all(places, seconds).items()
    return {task for (task, _), a in answers if a is Answer.HELLO}

  def _cut(self, task: Hashable) -> None:
    """Also when it was cut off before: gRPC connects again by itself."""
    if task not in self._cut_off:
      logging.warning(
        '%s at %s has not answered for %.1f s: calls to it are given up',
        ' '.join(map(str, task)) if isinstance(task, tuple) else task,
        self._addresses[task],
        time.monotonic() - self._answered_at[task],
      )
    self._cut_off[task] = time.monotonic()
    cut(self._peers[task])

  def _forgive(self, task: Hashable) -> None:
    """Takes a task back that answers, if it has done so for long enough."""
    cut_off_at = self._cut_off.get(task, math.inf)
    if time.monotonic() - cut_off_at > _FORGIVEN_SECONDS:
      del self._cut_off[task]
