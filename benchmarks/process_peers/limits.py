"""What no all-reduce can be faster than, and what its links cost."""

from __future__ import annotations

import socket
import time

import numpy as np

from benchmarks.process_peers import base

_RETRY_SECONDS = 0.05
_PIECE_BYTES = 1 << 20


class _Pair(base.Peer):
  """One plain TCP connection between the first two ranks; others look on."""

  def __init__(self, seat: base.Seat):
    super().__init__(seat)
    self._socket = None
    if seat.rank == 0:
      self._socket = _accept(seat)
    elif seat.rank == 1:
      self._socket = _dial(seat)
    if self._socket is not None:
      self._socket.settimeout(seat.timeout_seconds)
      self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    self._data = np.zeros(0, np.uint8)

  def travelling_bytes(self) -> int:
    """What goes from rank 0 to rank 1."""
    return self.num_bytes

  def prepare(self) -> None:
    """See base class."""
    self._data = np.zeros(self.travelling_bytes(), np.uint8)
    if self.seat.rank == 0:
      self._data[:] = self.expected()

  def expected(self) -> np.ndarray:
    """See base class."""
    return (np.arange(self.travelling_bytes()) % 251 + 1).astype(np.uint8)

  def barrier(self) -> None:
    """See base class; for those two."""
    if self.seat.rank == 0:
      self._socket.sendall(b'?')
      self._receive(memoryview(bytearray(1)))
    elif self.seat.rank == 1:
      self._receive(memoryview(bytearray(1)))
      self._socket.sendall(b'!')

  def result(self, returned: object) -> np.ndarray:
    """See base class."""
    return self._data if self.seat.rank < 2 else self.expected()

  def release(self) -> None:
    """See base class."""
    self._data = np.zeros(0, np.uint8)

  def _receive(self, view: memoryview) -> None:
    received = 0
    while received < len(view):
      count = self._socket.recv_into(
        view[received:], min(len(view) - received, _PIECE_BYTES)
      )
      if not count:
        raise ConnectionError('the other rank closed the connection')
      received += count


class OneWay(_Pair):
  """As many bytes as leave each rank in a ring, through one connection."""

  def travelling_bytes(self) -> int:
    """2 (N - 1) / N of the array."""
    size = self.seat.world_size
    return 2 * (size - 1) * self.num_bytes // size

  def call(self) -> None:
    """Sends everything one way, and a byte back."""
    if self.seat.rank == 0:
      self._socket.sendall(self._data)
      self._receive(memoryview(bytearray(1)))
    elif self.seat.rank == 1:
      self._receive(memoryview(self._data))
      self._socket.sendall(b'!')


class PingPong(_Pair):
  """The array to rank 1 and back: twice the time of a message."""

  def call(self) -> None:
    """Sends everything to rank 1 and back."""
    if self.seat.rank == 0:
      self._socket.sendall(self._data)
      self._receive(memoryview(self._data))
    elif self.seat.rank == 1:
      self._receive(memoryview(self._data))
      self._socket.sendall(self._data)


class NoOp(base.Peer):
  """A host call from TensorFlow's graph that returns its input."""

  def prepare(self) -> None:
    """See base class."""
    import tensorflow as tf

    source = tf.Variable(self.expected())

    @tf.function
    def step():
      return tf.numpy_function(lambda x: x, [source.read_value()], tf.float32)

    self._step = step

  def expected(self) -> np.ndarray:
    """See base class."""
    return base.input_value(self.seat.rank, self.num_elements)

  def barrier(self) -> None:
    """See base class; nobody waits for anybody here."""

  def call(self) -> object:
    """See base class."""
    return self._step()

  def result(self, returned: object) -> np.ndarray:
    """See base class."""
    return returned.numpy()

  def release(self) -> None:
    """See base class."""
    self._step = None


def _accept(seat: base.Seat) -> socket.socket:
  host, _, port = seat.addresses[0].rpartition(':')
  with socket.create_server((host, int(port))) as server:
    server.settimeout(seat.timeout_seconds)
    return server.accept()[0]


def _dial(seat: base.Seat) -> socket.socket:
  host, _, port = seat.addresses[0].rpartition(':')
  ends_at = time.monotonic() + seat.timeout_seconds
  while True:
    try:
      return socket.create_connection((host, int(port)), 5.0)
    except OSError:
      if time.monotonic() > ends_at:
        raise
      time.sleep(_RETRY_SECONDS)
