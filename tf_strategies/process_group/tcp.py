"""A process group over TCP."""

from __future__ import annotations

import collections
import socket
import threading

import numpy as np

from tf_strategies import errors
from tf_strategies.collectives import compression, schedule
from tf_strategies.process_group import buffers, group
from tf_strategies.process_group import options as options_lib

_OPS = {'sum': np.add, 'min': np.minimum, 'max': np.maximum}


class TcpProcessGroup(group.ProcessGroup):
  """See the base class; made by `Rendezvous.form`."""

  name = 'tcp'
  elastic = True

  def __init__(self, members, rank, generation, sockets, options):
    self._members = members
    self._rank = rank
    self._generation = generation
    self._sockets: dict[int, socket.socket] = sockets
    self._options: options_lib.GroupOptions = options
    self._bytes_sent = 0
    self._failure = None
    self._lock = threading.RLock()
    self._agreements = collections.Counter()
    for sock in sockets.values():
      sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
      sock.settimeout(options.collective_timeout_seconds)

  @property
  def rank(self) -> int:
    """See base class."""
    return self._rank

  @property
  def members(self) -> tuple[group.Member, ...]:
    """See base class."""
    return self._members

  @property
  def generation(self) -> int:
    """See base class."""
    return self._generation

  @property
  def bytes_sent(self) -> int:
    """See base class."""
    return self._bytes_sent

  @property
  def failure(self) -> errors.Error | None:
    """See base class."""
    return self._failure

  def all_reduce(self, array, *, op='sum', out=None, name='', wire='none'):
    """See base class."""
    if out is None:
      out = buffers.aligned_empty(array.shape, array.dtype)
    if wire != 'none':
      return self._encoded_sum(array, out, name, wire)
    np.copyto(out, array)
    n, rank = self.world_size, self._rank
    ends = np.cumsum((0, *schedule.chunk_sizes(array.size, n)))
    chunks = [out[ends[i] : ends[i + 1]] for i in range(n)]
    with self._lock:
      for step in range(n - 1):
        send = chunks[(rank - step) % n]
        target = chunks[(rank - step - 1) % n]
        received = np.empty_like(target)
        self._swap((rank + 1) % n, send, (rank - 1) % n, received)
        _OPS[op](target, received, out=target)
      for step in range(n - 1):
        send = chunks[(rank + 1 - step) % n]
        self._swap(
          (rank + 1) % n, send, (rank - 1) % n, chunks[(rank - step) % n]
        )
    return out

  def _encoded_sum(self, array, out, name, wire):
    codec = compression.by_name(wire)
    total = np.zeros(array.shape, np.float32)
    for encoded in self.all_gather(array, name=name):
      view = encoded.view(np.float16) if wire == 'float16' else encoded
      total += codec.decompress(view, np.dtype(np.float32))
    np.copyto(out, codec.compress(total)[0].view(np.uint16))
    return out

  def all_gather(self, array, *, name=''):
    """See base class."""
    with self._lock:
      sizes = [self._broadcast(np.int64([len(array)]), r) for r in self._ranks]
      arrays = [
        array
        if r == self._rank
        else np.empty((int(sizes[r][0]), *array.shape[1:]), array.dtype)
        for r in self._ranks
      ]
      return [self._broadcast(a, r) for r, a in enumerate(arrays)]

  @property
  def _ranks(self):
    return range(self.world_size)

  def broadcast(self, array, root, *, name=''):
    """See base class."""
    with self._lock:
      return self._broadcast(array, root)

  def _broadcast(self, array, root):
    out = buffers.aligned_empty(array.shape, array.dtype)
    try:
      if self._rank == root:
        np.copyto(out, array)
        for sock in self._sockets.values():
          sock.sendall(out.reshape(-1).view(np.uint8))
      else:
        self._receive(self._sockets[root], out)
    except OSError as e:
      raise self._lost(root, e) from e
    return out

  def barrier(self, *, name=''):
    """See base class."""
    self.all_reduce(np.zeros(self.world_size, np.int32), name=name)

  def exchange(self, tag, payload, timeout_seconds=None):
    """See base class."""
    gathered = self.all_gather(np.frombuffer(payload, np.uint8))
    return [a.tobytes() for a in gathered]

  def _next_agreement(self, what):
    self._agreements[what] += 1
    return self._agreements[what]

  def pending_joiners(self):
    """See base class."""
    return ()

  def abort(self, reason):
    """See base class."""
    self.close()

  def close(self):
    """See base class."""
    for sock in self._sockets.values():
      sock.close()

  def _swap(self, to, array, source, target):
    """Sends and receives at once: two large sends would block each other."""
    problem = []

    def send():
      try:
        self._sockets[to].sendall(array.view(np.uint8))
      except OSError as e:
        problem.append(e)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
      self._receive(self._sockets[source], target)
    except OSError as e:
      raise self._lost(source, e) from e
    finally:
      sender.join()
    if problem:
      raise self._lost(to, problem[0]) from problem[0]
    self._bytes_sent += array.nbytes

  def _receive(self, sock, array):
    view = memoryview(array.reshape(-1).view(np.uint8))
    while view:
      count = sock.recv_into(view)
      if not count:
        raise ConnectionError('closed the connection')
      view = view[count:]

  def _lost(self, rank, problem):
    for sock in self._sockets.values():
      sock.shutdown(socket.SHUT_RDWR)
    error = errors.WorkerUnavailableError(
      f'{self.members[rank]} is gone: {problem}.'
    )
    error.rank, error.address = rank, self.members[rank].address
    self._failure = error
    return error
