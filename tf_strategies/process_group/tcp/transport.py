"""Runs plans: one non-blocking loop over the data links of a group.

Everything happens in the calling thread. The loop waits only if there is nothing to do:
it sends pieces as soon as their inputs are ready and adds between two receives, while
the operating system's buffers move bytes.
"""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping

from tf_strategies.process_group import execution as execution_lib
from tf_strategies.process_group.tcp import link as link_lib

# How long `poll` sleeps at most: the loop looks at the clock and at the state
# of the group in between, should a wake-up get lost.
_POLL_SECONDS = 1.0
# Bytes that are still on their way after this time arrive without this process.
_FINISH_SECONDS = 1.0
_FINISH_LOOK_SECONDS = 0.002
_READ = select.POLLIN
_WRITE = select.POLLOUT


class Transport:
  """The data links of one group.

  Args:
    check: called between waits; raises if the group has failed.
  """

  def __init__(self, check: Callable[[], None]):
    self._check = check
    # Replaced as a whole when there is another link: other threads may iterate.
    self._links: Mapping[int, link_lib.DataLink] = {}
    self._has_ended = False
    self._lock = threading.Lock()

  def add(self, rank: int, sock: socket.socket) -> None:
    """Takes a socket, owned from here on; from any thread."""
    sock.setblocking(False)
    with self._lock:
      if self._has_ended:
        sock.close()
      else:
        self._links = {**self._links, rank: link_lib.DataLink(rank, sock)}

  def missing(self, peers: Iterable[int]) -> set[int]:
    """Returns those ranks to which there is no link."""
    return set(peers) - self._links.keys()

  def paths(self) -> dict[int, str]:
    """Returns the way in which each peer's pieces arrive, and the reason against memory."""
    return {rank: link.path for rank, link in sorted(self._links.items())}

  def run(
    self,
    execution: execution_lib.Execution,
    header: link_lib.Header,
    deadline: float = float('inf'),
    departed: Container[int] = (),
  ) -> None:
    """Runs a plan.

    Args:
      execution: the run of this rank.
      header: header that every peer must send too.
      deadline: time of the monotonic clock, in seconds.
      departed: ranks that have left after they had finished this collective.

    Raises:
      LinkClosedError: a peer is gone, whose bytes are still needed.
      MismatchError: a peer is at another collective.
      DeadlineError: it is late.
      Error: whatever `check` raises.
    """
    for link in self._links.values():
      link.reset()
      link.has_left = link.rank in departed
    run = _TcpRun(self._links, execution, header)
    run.work()
    while run.is_open:
      self._wait(run, deadline)
      run.work()

  def finish(self) -> None:
    """Waits for a limited time until sent bytes have reached the peers.

    Closing a socket with unread bytes (such as a peer's note about its memory) drops
    the bytes that have not arrived at the peer.
    """
    end = time.monotonic() + _FINISH_SECONDS
    links = [*self._links.values()]
    while links and time.monotonic() < end:
      links = [link for link in links if link.drain()]
      if links:
        time.sleep(_FINISH_LOOK_SECONDS)

  def shut_down(self) -> None:
    """Ends all links in both directions; wakes a running collective."""
    with self._lock:
      self._has_ended = True
      for link in self._links.values():
        with contextlib.suppress(OSError):  # It is closed already.
          link.sock.shutdown(socket.SHUT_RDWR)

  def close(self) -> None:
    """Closes the sockets; only where nothing runs, after `shut_down`."""
    for link in self._links.values():
      link.close()

  def _wait(self, run: '_TcpRun', deadline: float) -> None:
    poll, watched = select.poll(), {}
    # Also those that were made meanwhile, by peers that are at another collective.
    for link in self._links.values():
      mask = run.mask(link)
      if mask:
        poll.register(link.sock, mask)
        watched[link.sock.fileno()] = link
    left = deadline - time.monotonic()
    if left <= 0:
      raise execution_lib.DeadlineError(run.waiting())
    events = poll.poll(1000 * min(left, _POLL_SECONDS))
    if not events:
      self._check()
    for fd, _ in events:
      link = watched[fd]
      link.blocked = False
      run.enqueue(link)


class _TcpRun:
  """The state of one collective. In all methods `link` is a `DataLink`."""

  def __init__(
    self,
    links: Mapping[int, link_lib.DataLink],
    execution: execution_lib.Execution,
    header: link_lib.Header,
  ):
    self._links = links
    self._execution = execution
    execution.wake = self._wake
    self._header = header
    # The links to look at, in order.
    self._active: dict[link_lib.DataLink, None] = {}
    plan = execution.plan
    packed = header.pack()
    for rank, numbers in plan.sends.items():
      links[rank].sends.extend(numbers)
      links[rank].put(link_lib.HEADER, packed)
    for rank, numbers in plan.receives.items():
      links[rank].receives.extend(numbers)
      links[rank].expects = True
    for link in links.values():
      self.enqueue(link)

  @property
  def is_open(self) -> bool:
    """Returns whether a header or a piece is to come, or something is to be sent."""
    return bool(self._execution.remaining) or any(
      link.expects or link.has_output for link in self._links.values()
    )

  def enqueue(self, link: link_lib.DataLink) -> None:
    """Has a link looked at."""
    self._active[link] = None

  def work(self) -> None:
    """Does the work that needs no waiting."""
    while self._active and self.is_open:
      link = next(iter(self._active))
      del self._active[link]
      sent = self._send(link)
      received = self._receive(link)
      # What came may need an answer.
      can_send = link.has_output and not (link.blocked or link.closed)
      if sent or received or can_send:
        self.enqueue(link)

  def mask(self, link: link_lib.DataLink) -> int:
    """Returns the events that a link waits for."""
    if link.closed:
      return 0
    # On a link without pieces a header tells that the peer is at another collective.
    is_planned = link.rank in self._execution.plan.receives
    wants = link.receiving or bool(link.unread) or not is_planned
    reads = wants and not self._stops(link)
    return (_READ if reads else 0) | (_WRITE if link.blocked else 0)

  def waiting(self) -> list[int]:
    """Returns the ranks whose bytes, or whose readiness, are missing."""
    links = self._links.values()
    return [link.rank for link in links if link.receiving or link.owes]

  def _receive(self, link):
    """Receives once. Returns whether that made progress."""
    if link.header is not None:
      return self._look_at_header(link)
    if link.incoming is not None:
      return self._receive_bytes(link)
    if self._stops(link):
      return False
    word = link.next()
    if word is None:
      if link.closed:
        self._lose(link)
      return False
    if word == link_lib.HEADER:
      return self._look_at_header(link)
    if word == link_lib.ACKNOWLEDGE:
      if not link.unread:
        raise execution_lib.MismatchError(link.rank)
      link.unread -= 1
      return True
    if link.expects or not link.receives:
      raise execution_lib.MismatchError(link.rank)
    target = self._execution.target(link.receives[0])
    if word == link_lib.BYTES:
      link.incoming = memoryview(target)
      return True
    link.fetch(word, target)
    self._received(link)
    return True

  def _stops(self, link):
    """Returns whether nothing more is to be received now.

    Bytes behind a piece that waits for its turn stay in the socket, unless the peer
    owes words about the pieces that it reads.
    """
    if link.header is not None:
      return True
    return link.received in self._execution.early and not link.unread

  def _look_at_header(self, link):
    """Compares a header that has come, if it is of this collective."""
    # It may have come while this rank was at an earlier collective.
    if link.expects and link.header == self._header:
      link.expects, link.header = False, None
      return True
    if link.expects or link.header.sequence <= self._header.sequence:
      raise execution_lib.MismatchError(link.rank)
    return False

  def _receive_bytes(self, link):
    """Receives some of a piece."""
    count = link.read_bytes(link.incoming)
    if count == len(link.incoming):
      link.incoming = None
      self._received(link)
    elif count:
      link.incoming = link.incoming[count:]
    elif link.closed:
      raise execution_lib.LinkClosedError(link.rank)
    return count > 0

  def _received(self, link):
    """Hands on a received piece."""
    link.received = link.receives.popleft()
    self._execution.receive(link.received)

  def _wake(self, number):
    """Has the link of a piece looked at, which may move from now on."""
    self.enqueue(self._links[self._execution.plan.pieces[number].peer])

  def _send(self, link):
    """Sends once. Returns whether that made progress."""
    if link.blocked or link.closed:
      return False
    offered = self._offer(link)
    if not link.has_output:
      return offered
    try:
      sent = link.flush()
    except execution_lib.LinkClosedError:
      # Its earlier bytes may still be on their way.
      self._lose(link, awaited=False)
      return False
    if sent is not None:
      self._execution.done(sent)
    return not link.blocked

  def _lose(self, link, awaited=True):
    """Goes on without a peer that is gone, if it owes and gets no piece."""
    if link.owes or (awaited and link.receiving):
      raise execution_lib.LinkClosedError(link.rank)
    link.drop()

  def _offer(self, link):
    """Starts the next pieces whose inputs are ready."""
    offered = False
    while link.sends:
      number = link.sends[0]
      size = self._execution.plan.pieces[number].size
      if self._execution.needs[number] or not link.can_offer(size):
        break
      offered = True
      if link.offer(self._execution.memory(number)):
        self._execution.done(number)
    return offered
