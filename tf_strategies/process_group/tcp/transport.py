"""Runs plans: one non-blocking loop over the data links of a group.

Everything happens in the calling thread. Nothing waits while something else
can be done: pieces are sent as soon as what they need is there, additions run
between two receives, and the operating system's buffers carry on meanwhile.
"""

from __future__ import annotations

import collections
import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from tf_strategies.process_group import buffers
from tf_strategies.process_group import execution as execution_lib
from tf_strategies.process_group.network import protocol as wire

# How long `poll` sleeps at most: the loop looks at the clock and at the state
# of the group in between, should a wake-up get lost.
_POLL_SECONDS = 1.0
# Of a large piece at least this much is waited for.
_LEAST_READ_BYTES = 1 << 19
_READ = select.POLLIN
_WRITE = select.POLLOUT


class Link:
  """One data connection, and how far it is in the running collective."""

  def __init__(self, rank: int, sock: socket.socket):
    self.rank = rank
    self.sock = sock
    self.fd = sock.fileno()
    self.mask = 0
    self.wakes_at = 1
    # With TLS nobody knows how many bytes a piece is on the wire.
    self.is_plain = isinstance(sock, socket.socket)
    self.closed = False
    # The header of the peer's next collective, as far as it has come. A peer
    # that is ahead has sent it before this rank asks for it.
    self.header = bytearray(wire.DATA_HEADER_BYTES)
    self.header_got = 0
    self.scratch: np.ndarray | None = None
    self.reset()

  def reset(self) -> None:
    """Forgets the last collective."""
    self.queued = False
    # Whether the peer sends something in this collective, and whether its
    # header is still to come.
    self.planned = False
    self.expects = False
    self.receives: Sequence[int] = ()
    self.receive_index = 0
    self.incoming: memoryview | None = None
    # A piece that had to go to scratch: it is complete, but it may not be
    # applied before others.
    self.in_scratch = False
    self.full = False
    self.sends: Sequence[int] = ()
    self.send_index = 0
    self.header_out: memoryview | None = None
    self.outgoing: memoryview | None = None
    self.blocked = False

  @property
  def header_is_there(self) -> bool:
    """Whether a whole header waits to be looked at."""
    return self.header_got == wire.DATA_HEADER_BYTES

  @property
  def receiving(self) -> bool:
    """Whether the peer still owes something."""
    return self.expects or self.receive_index < len(self.receives)

  @property
  def sending(self) -> bool:
    """Whether the peer still gets something."""
    return self.header_out is not None or self.send_index < len(self.sends)

  def scratch_of(self, size: int) -> np.ndarray:
    """Memory for one piece, kept from collective to collective."""
    if self.scratch is None or self.scratch.size < size:
      self.scratch = buffers.aligned_empty(size, np.uint8)
    return self.scratch[:size]


class Transport:
  """The data links of one group.

  Args:
    buffer_bytes: of each socket in each direction; 0 for the system's choice.
    check: called between waits; raises if the group has failed.
  """

  def __init__(self, buffer_bytes: int, check: Callable[[], None]):
    self._buffer_bytes = buffer_bytes
    self._check = check
    self._poll = select.poll()
    self._links: dict[int, Link] = {}
    self._by_fd: dict[int, Link] = {}
    # Those that no collective has seen yet.
    self._arrived: list[Link] = []
    self._has_ended = False
    self._lock = threading.Lock()
    self.bytes_sent = 0

  def add(self, rank: int, sock: socket.socket) -> None:
    """Takes a socket, owned from here on; from any thread."""
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:
      sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if self._buffer_bytes:
      for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, self._buffer_bytes)
    with self._lock:
      if self._has_ended:
        sock.close()
      else:
        self._arrived.append(Link(rank, sock))

  def missing(self, peers: Iterable[int]) -> set[int]:
    """The ranks of these to which there is no link."""
    self._take_arrived()
    return set(peers) - self._links.keys()

  def run(
    self,
    execution: execution_lib.Execution,
    header: wire.DataHeader,
    deadline: float = float('inf'),
  ) -> None:
    """Runs a plan.

    Args:
      execution: what this rank does.
      header: what every peer must send too.
      deadline: of `time.monotonic()`.

    Raises:
      LinkClosedError: a peer is gone, whose bytes are still needed.
      MismatchError: a peer is at another collective.
      DeadlineError: it is late.
      Error: whatever `check` raises.
    """
    self._take_arrived()
    for link in self._links.values():
      link.reset()
    run = _Run(self._links, execution, header)
    while True:
      run.work()
      # While links have nothing to do, a piece is computed between two looks.
      has_computed = execution.compute_next(run.wake)
      if not run.remaining:
        break
      self._wait(run, deadline, has_computed)
    self.bytes_sent += execution.plan.bytes_sent

  def shut_down(self) -> None:
    """Ends all links in both directions; wakes a running collective."""
    with self._lock:
      self._has_ended = True
      for link in [*self._links.values(), *self._arrived]:
        with contextlib.suppress(OSError):  # It is closed already.
          link.sock.shutdown(socket.SHUT_RDWR)

  def close(self) -> None:
    """Closes the sockets; only where nothing runs, after `shut_down`."""
    for link in [*self._links.values(), *self._arrived]:
      link.sock.close()

  def _take_arrived(self) -> list[Link]:
    """Makes links of a peer's making known to the collectives."""
    if not self._arrived:
      return []
    with self._lock:
      arrived, self._arrived = self._arrived, []
      for link in arrived:
        self._links[link.rank] = self._by_fd[link.fd] = link
    return arrived

  def _wait(self, run: _Run, deadline: float, only_look: bool) -> None:
    for link in self._links.values():
      mask = run.mask(link)
      if mask & _READ and link.is_plain:
        self._wake_at(link)
      self._watch(link, mask)
    left = deadline - time.monotonic()
    if left <= 0:
      raise execution_lib.DeadlineError(run.waiting())
    events = self._poll.poll(
      0 if only_look else 1000 * min(left, _POLL_SECONDS)
    )
    if not events and not only_look:
      self._check()
      # A peer that is at another collective may have made one.
      for link in self._take_arrived():
        run.enqueue(link)
    for fd, _ in events:
      link = self._by_fd[fd]
      link.blocked = False
      run.enqueue(link)

  def _wake_at(self, link: Link) -> None:
    """Sleeps until a good part of a large piece has come.

    Each wake-up costs more than the bytes that a single packet brings.
    """
    waits_for = 1 if link.incoming is None else len(link.incoming)
    waits_for = min(waits_for, _LEAST_READ_BYTES)
    if waits_for != link.wakes_at:
      link.wakes_at = waits_for
      link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, waits_for)

  def _watch(self, link: Link, mask: int) -> None:
    if mask == link.mask:
      return
    if not link.mask:
      self._poll.register(link.fd, mask)
    elif mask:
      self._poll.modify(link.fd, mask)
    else:
      self._poll.unregister(link.fd)
    link.mask = mask


class _Run:
  """The state of one collective."""

  def __init__(
    self,
    links: Mapping[int, Link],
    execution: execution_lib.Execution,
    header: wire.DataHeader,
  ):
    self._links = links
    self._execution = execution
    self._header = header
    self._active: collections.deque[Link] = collections.deque()
    plan = execution.plan
    self._headers = len(plan.sends) + len(plan.receives)
    packed = memoryview(header.pack())
    for rank, numbers in plan.sends.items():
      link = links[rank]
      link.sends, link.header_out = numbers, packed
    for rank, numbers in plan.receives.items():
      link = links[rank]
      link.receives, link.planned, link.expects = numbers, True, True
    for link in links.values():
      self.enqueue(link)

  @property
  def remaining(self) -> int:
    """Every piece, and every header in either direction."""
    return self._headers + self._execution.remaining

  def enqueue(self, link: Link) -> None:
    """Has a link looked at."""
    if not link.queued:
      link.queued = True
      self._active.append(link)

  def work(self) -> None:
    """Does what can be done without waiting."""
    active = self._active
    while active and self.remaining:
      link = active.popleft()
      link.queued = False
      sent = self._send(link)
      if self._receive(link) or sent:
        self.enqueue(link)

  def mask(self, link: Link) -> int:
    """The events that a link waits for."""
    if link.closed:
      return 0
    if link.planned:
      reads = link.receiving and not link.full
    else:
      # Its header, if it comes now, shows that the peer is elsewhere.
      reads = not link.header_is_there
    return (_READ if reads else 0) | (_WRITE if link.blocked else 0)

  def waiting(self) -> list[int]:
    """The ranks whose bytes, or whose readiness, are missing."""
    links = self._links.values()
    return [link.rank for link in links if link.receiving or link.sending]

  def _receive(self, link: Link) -> bool:
    """Receives once; whether that brought anything on."""
    if link.expects or not link.planned:
      return self._receive_header(link)
    if link.full or link.receive_index == len(link.receives):
      return False
    number = link.receives[link.receive_index]
    if link.incoming is None:
      link.incoming = memoryview(self._target(link, number))
    count = self._recv(link, link.incoming)
    if count == len(link.incoming):
      link.incoming = None
      if link.in_scratch and self._execution.needs[number]:
        link.full = True
      else:
        self._apply(link, number)
    elif count:
      link.incoming = link.incoming[count:]
    return count > 0

  def _receive_header(self, link: Link) -> bool:
    if link.closed:
      if link.expects:
        raise execution_lib.LinkClosedError(link.rank)
      return False
    # It may have come while this rank was at an earlier collective.
    is_new = not link.header_is_there
    if is_new:
      view = memoryview(link.header)[link.header_got :]
      count = self._recv(link, view)
      link.header_got += count
      if count < len(view):
        return count > 0
    try:
      received = wire.DataHeader.unpack(link.header)
    except wire.ProtocolError:
      received = None
    if link.expects:
      if received != self._header:
        raise execution_lib.MismatchError(
          link.rank, None if received is None else str(received)
        )
      link.expects = False
      link.header_got = 0
      self._headers -= 1
    elif received is None or received.sequence <= self._header.sequence:
      raise execution_lib.MismatchError(
        link.rank, None if received is None else str(received)
      )
    return link.planned or is_new

  def _recv(self, link: Link, view: memoryview) -> int:
    """Receives what is there: 0 bytes if there is nothing now."""
    try:
      count = link.sock.recv_into(view)
    except (BlockingIOError, InterruptedError):
      return 0
    except OSError:
      count = 0
    if count == 0:
      link.closed = True
      if link.receiving:
        raise execution_lib.LinkClosedError(link.rank)
    return count

  def _target(self, link: Link, number: int) -> np.ndarray:
    """Where a piece is received: in its place, if that is free already."""
    link.in_scratch = not self._execution.is_direct(number)
    if not link.in_scratch:
      return self._execution.memory(number)
    piece = self._execution.plan.pieces[number]
    return link.scratch_of(piece.stop - piece.start)

  def _apply(self, link: Link, number: int) -> None:
    """Puts a received piece where it belongs."""
    received = None
    if link.in_scratch:
      piece = self._execution.plan.pieces[number]
      received = link.scratch_of(piece.stop - piece.start)
    link.full = False
    link.receive_index += 1
    self._execution.receive(number, received, self.wake)

  def wake(self, number: int) -> None:
    """Has the link of a piece looked at, which may move from now on."""
    link = self._links[self._execution.plan.pieces[number].peer]
    if link.full and link.receives[link.receive_index] == number:
      self._apply(link, number)
    self.enqueue(link)

  def _send(self, link: Link) -> bool:
    """Sends once; whether that brought anything on."""
    if link.blocked or not link.sending:
      return False
    self._next_outgoing(link)
    parts = [part for part in (link.header_out, link.outgoing) if part]
    if not parts:
      return False
    try:
      count = link.sock.sendmsg(parts)
    except (BlockingIOError, InterruptedError):
      link.blocked = True
      return False
    except OSError as e:
      raise execution_lib.LinkClosedError(link.rank) from e
    if link.header_out is not None:
      taken = min(count, len(link.header_out))
      link.header_out = link.header_out[taken:] or None
      count -= taken
      if link.header_out is not None:
        return True
      self._headers -= 1
    if link.outgoing is not None:
      if count == len(link.outgoing):
        link.outgoing = None
        link.send_index += 1
        number = link.sends[link.send_index - 1]
        self._execution.done(number, self.wake)
      else:
        link.outgoing = link.outgoing[count:]
    return True

  def _next_outgoing(self, link: Link) -> None:
    """Takes up the next piece, if what it needs is there."""
    if link.outgoing is None and link.send_index < len(link.sends):
      number = link.sends[link.send_index]
      if not self._execution.needs[number]:
        link.outgoing = memoryview(self._execution.memory(number))
