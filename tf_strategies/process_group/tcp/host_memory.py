"""Hands pieces to processes of the same host by memory instead of sockets.

A sender copies pieces into slots of memory that both have mapped. The socket tells
which slot a piece is in, and that it was read. The memory is a `memfd`, so nothing is
left in `/dev/shm`.
"""

import itertools
import mmap
import os
import secrets
import struct

import numpy as np

# Number of a link's slots, and the size of one, which is the largest piece.
NUM_SLOTS = 8
SLOT_BYTES = 1 << 20

_SIZE = NUM_SLOTS * SLOT_BYTES
# The process, the number of its file, and the file's own name.
_SLOTS = struct.Struct('<QQ32s')
SLOTS_BYTES = _SLOTS.size


class MemorySlots:
  """Memory of which a peer has a mapping, for pieces that it is to read.

  Raises:
    OSError: no memory is left.
    AttributeError: the system is not Linux.
  """

  def __init__(self):
    # No other file has it: neither here nor on another host, where a process and a
    # file may have the same numbers.
    self._name = secrets.token_hex(16)
    self._file = os.memfd_create(f'tf_strategies {self._name}', os.MFD_CLOEXEC)
    try:
      os.ftruncate(self._file, _SIZE)
      self._memory = np.frombuffer(mmap.mmap(self._file, _SIZE), np.uint8)
    except OSError:
      os.close(self._file)
      raise
    self._numbers = itertools.cycle(range(NUM_SLOTS))

  def pack(self) -> bytes:
    """Returns what the peer needs, as `SLOTS_BYTES` bytes."""
    return _SLOTS.pack(os.getpid(), self._file, self._name.encode())

  def put(self, piece: np.ndarray) -> int:
    """Copies a piece into the next slot and returns its number."""
    number = next(self._numbers)
    start = number * SLOT_BYTES
    self._memory[start : start + piece.nbytes] = piece
    return number

  def close(self) -> None:
    """Gives the file back; mappings live on as long as somebody uses them."""
    os.close(self._file)


class PeerSlots:
  """The slots of another process of this host.

  Args:
    data: what `MemorySlots.pack` returned there.

  Raises:
    OSError, ValueError: it is on another host, or its files cannot be opened.
  """

  def __init__(self, data: bytes):
    pid, file, name = _SLOTS.unpack(data)
    place = f'/proc/{pid}/fd/{file}'
    try:
      # Processes with networks of their own count as hosts.
      is_here = name.decode() in os.readlink(place) and os.path.samefile(
        f'/proc/{pid}/ns/net', '/proc/self/ns/net'
      )
    except FileNotFoundError:
      is_here = False
    if not is_here:
      raise OSError('another host')
    with open(place, 'rb') as opened:
      mapped = mmap.mmap(opened.fileno(), _SIZE, prot=mmap.PROT_READ)
    self._memory = np.frombuffer(mapped, np.uint8)

  def read(self, number: int, target: np.ndarray) -> None:
    """Copies the piece in a slot. Raises ValueError if there is no such slot."""
    start = number * SLOT_BYTES
    if not 0 <= number < NUM_SLOTS or target.nbytes > SLOT_BYTES:
      raise ValueError(f'it named slot {number}')
    np.copyto(target, self._memory[start : start + target.nbytes])
