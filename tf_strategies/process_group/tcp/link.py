"""One data connection: words, headers and pieces in both directions.

Each thing that travels begins with a word of 8 bytes, which announces a
header or the bytes of a piece. A number beyond all kinds is the slot of shared memory
in which a piece lies; the receiver reads and acknowledges it (`host_memory`). The peer
finds out whether it can read the memory, and says so. Until then, and for small and
large pieces, bytes travel.
"""

import collections
import contextlib
import fcntl
import socket
import struct
import termios
from typing import NamedTuple

import numpy as np

from tf_strategies.process_group import execution as execution_lib
from tf_strategies.process_group.tcp import host_memory

# The meanings of words, and how many bytes follow.
ACKNOWLEDGE = 0  # The oldest unread piece was read.
HEADER = 1
BYTES = 2  # A piece; both ends know its length.
_SLOTS = 3
_READS = 4  # The sender of this reads the other's slots.
_SLOT = 16  # And beyond: the number of a slot.
_HEADER = struct.Struct('<QQ')
_FOLLOWING = {
  HEADER: _HEADER.size,
  _SLOTS: host_memory.SLOTS_BYTES,
}

_WORD = struct.Struct('<Q')
# Bytes that one call receives where the kind of the next bytes is not known.
_AHEAD_BYTES = 4096
# Copying fewer bytes through a socket costs less than two more messages.
_LEAST_IN_MEMORY = 1 << 17


class Header(NamedTuple):
  """Comes before the bytes of one collective on each link that it uses.

  Attributes:
    sequence: the number of the collective.
    digest: of everything that the ranks must agree on.
  """

  sequence: int
  digest: int

  def pack(self) -> bytes:
    """Returns the header as bytes."""
    return _HEADER.pack(*self)


class DataLink:
  """One data connection, and its progress in the running collective.

  Args:
    rank: rank of the peer.
    sock: connected, non-blocking socket. The link owns it.

  Attributes:
    closed: whether the peer has ended the connection.
    has_left: whether the peer reads nothing more. If this rank sent anything, the
      peer's system would drop the bytes that it has sent and that have not arrived.
    header: header of the peer's next collective; None before it has arrived. A peer
      that is ahead sends it early.
    unread: number of slots that the peer has not read yet.
    path: description of the way in which the peer's pieces arrive.
  """

  def __init__(self, rank: int, sock: socket.socket):
    self.rank = rank
    self.sock = sock
    self.closed = False
    self.has_left = False
    self.header: Header | None = None
    self.unread = 0
    self.path = 'socket'
    # What this process reads, and what the peer reads once it has said so.
    self._reader: host_memory.PeerSlots | None = None
    self._slots: host_memory.MemorySlots | None = None
    self._is_read = False
    # Bytes that were received ahead, and memory for more.
    self._ahead = bytearray()
    self._scratch = memoryview(bytearray(_AHEAD_BYTES))
    # Bytes to send, and whether each part is the end of a piece.
    self._output: collections.deque[tuple[memoryview, bool]] = (
      collections.deque()
    )
    self.reset()
    # Without memory, or on another system, bytes travel.
    with contextlib.suppress(OSError, AttributeError):
      self._slots = host_memory.MemorySlots()
      self.put(_SLOTS, self._slots.pack())
      self.flush()

  def reset(self) -> None:
    """Forgets the last collective."""
    self.expects = False  # Whether the peer's header is still to come.
    # The pieces that are still to come, and the newest that has come.
    self.receives: collections.deque[int] = collections.deque()
    self.received: int | None = None
    # The part of the next piece that is still to come.
    self.incoming: memoryview | None = None
    # The same for pieces that go out, and the one whose bytes are in the output.
    self.sends: collections.deque[int] = collections.deque()
    self.sending: int | None = None
    self.blocked = False

  @property
  def receiving(self) -> bool:
    """Returns whether the peer still owes something."""
    return self.expects or bool(self.receives)

  @property
  def owes(self) -> bool:
    """Returns whether the peer still gets a piece."""
    return self.sending is not None or bool(self.sends)

  @property
  def has_output(self) -> bool:
    """Returns whether something waits to be sent."""
    return bool(self._output)

  def drain(self) -> bool:
    """Ends the output, and reads available bytes.

    Returns:
      Whether sent bytes have not reached the peer yet.
    """
    try:
      self.sock.shutdown(socket.SHUT_WR)
      with contextlib.suppress(BlockingIOError):
        while self.sock.recv(_AHEAD_BYTES):
          pass
      return any(fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)))
    except OSError:
      return False

  def close(self) -> None:
    """Closes the socket, and gives the slots back."""
    self.sock.close()
    if self._slots is not None:
      self._slots.close()
      self._slots = None
    # A mapping has a descriptor, which is freed now and not by the garbage collector.
    self._reader = None

  # Receiving.

  def next(self) -> int | None:
    """Returns the next word: HEADER once the header is complete, None if no word is.

    A word without a name is the number of a slot with a piece.
    """
    while self._fill(_WORD.size):
      [word] = _WORD.unpack_from(self._ahead)
      size = _WORD.size + _FOLLOWING.get(word, 0)
      if not self._fill(size):
        break
      data = bytes(self._ahead[_WORD.size : size])
      del self._ahead[:size]
      if word == HEADER:
        self.header = Header(*_HEADER.unpack(data))
      if word == _READS:
        self._is_read = True
      elif word == _SLOTS:
        self._hear_of_slots(data)
      else:
        return word
    return None

  def read_bytes(self, view: memoryview) -> int:
    """Receives available bytes. Returns their number, 0 if there are none now."""
    ahead = min(len(self._ahead), len(view))
    if ahead:
      view[:ahead] = self._ahead[:ahead]
      del self._ahead[:ahead]
      return ahead
    return self._receive(view)

  def fetch(self, word: int, target: np.ndarray) -> None:
    """Copies a piece from a slot, and says that it was read."""
    self._reader.read(word - _SLOT, target)
    self.put(ACKNOWLEDGE)

  def _fill(self, size: int) -> bool:
    """Receives until `size` bytes are ahead. Returns whether they are."""
    while len(self._ahead) < size:
      count = self._receive(self._scratch)
      if not count:
        return False
      self._ahead += self._scratch[:count]
    return True

  def _receive(self, view: memoryview) -> int:
    try:
      count = self.sock.recv_into(view)
    except BlockingIOError:
      return 0
    except OSError:
      count = 0
    if count == 0:
      self.closed = True
    return count

  # Sending.

  def put(self, word: int, data: bytes = b'') -> None:
    """Queues a word and the bytes after it. `flush` sends them."""
    if not (self.has_left or self.closed):
      self._output.append((memoryview(_WORD.pack(word) + data), False))

  def can_offer(self, size: int) -> bool:
    """Returns whether a piece of so many bytes can go now."""
    if self.sending is not None:
      return False
    return not self._is_for_slots(size) or self.unread < host_memory.NUM_SLOTS

  def offer(self, piece: np.ndarray) -> bool:
    """Sends the next piece, or its slot; returns whether its memory is free already."""
    number = self.sends.popleft()
    if self._is_for_slots(piece.nbytes):
      self.unread += 1
      self.put(_SLOT + self._slots.put(piece))
      return True
    self.put(BYTES)
    self._output.append((memoryview(piece), True))
    self.sending = number
    return False

  def flush(self) -> int | None:
    """Sends what the socket takes. Returns the piece whose last byte is out, if any."""
    try:
      count = self.sock.sendmsg([part for part, _ in self._output])
    except BlockingIOError:
      self.blocked = True
      return None
    except OSError as e:
      raise execution_lib.LinkClosedError(self.rank) from e
    sent = None
    while self._output:
      part, is_end = self._output[0]
      if count < len(part):
        self._output[0] = part[count:], is_end
        break
      count -= len(part)
      self._output.popleft()
      if is_end:
        sent, self.sending = self.sending, None
    return sent

  def drop(self) -> None:
    """Drops queued bytes, since the peer is gone."""
    self._output.clear()

  # Finding out whether each side can read the other's memory.

  def _hear_of_slots(self, data: bytes) -> None:
    """Maps the peer's slots if possible."""
    try:
      self._reader = host_memory.PeerSlots(data)
    except (OSError, ValueError) as e:
      why = getattr(e, 'strerror', None) or e
      self.path = f'socket, not memory: {why}'
      return
    self.path = 'memory'
    self.put(_READS)

  def _is_for_slots(self, size: int) -> bool:
    return self._is_read and _LEAST_IN_MEMORY <= size <= host_memory.SLOT_BYTES
