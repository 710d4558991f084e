"""Hands pieces to processes of the same host by memory instead of sockets.

A sender copies pieces into slots of memory that both have mapped. The socket tells
which slot a piece is in, and that it was read. The memory is a `memfd`, so nothing is
left in `/dev/shm`.
"""

import hashlib
import itertools
import mmap
import os
import secrets
import struct

import numpy as np

# Number of a link's slots, and the size of one, which is the largest piece.
NUM_SLOTS = 8
SLOT_BYTES = 1 << 20

# The host, the process and its file; the size of the memory, and its number.
_SLOTS = struct.Struct('<16sQQQ8s')
SLOTS_BYTES = _SLOTS.size


class MemorySlots:
  """Memory of which a peer has a mapping, for pieces that it is to read.

  Raises:
    OSError: no memory is left.
    AttributeError: the system is not Linux.
  """

  def __init__(self):
    size = NUM_SLOTS * SLOT_BYTES + 8
    self._file = os.memfd_create('tf_strategies', os.MFD_CLOEXEC)
    try:
      os.ftruncate(self._file, size)
      self._map = mmap.mmap(self._file, size)
    except OSError:
      os.close(self._file)
      raise
    self._memory = np.frombuffer(self._map, np.uint8)
    # Hosts that were copied while they ran look like one host: a file of that name may
    # be another file.
    self._number = secrets.token_bytes(8)
    self._map[-8:] = self._number
    self._numbers = itertools.cycle(range(NUM_SLOTS))

  def pack(self) -> bytes:
    """Returns what the peer needs, as `SLOTS_BYTES` bytes."""
    return _SLOTS.pack(
      host(), os.getpid(), self._file, len(self._memory), self._number
    )

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
    its_host, pid, file, size, number = _SLOTS.unpack(data)
    if its_host != host():
      raise OSError('another host')
    with open(f'/proc/{pid}/fd/{file}', 'rb') as opened:
      mapped = mmap.mmap(opened.fileno(), size, prot=mmap.PROT_READ)
    if mapped[-8:] != number:
      raise OSError('its files are not there')
    self._memory = np.frombuffer(mapped, np.uint8)

  def read(self, number: int, target: np.ndarray) -> None:
    """Copies the piece in a slot. Raises ValueError if there is no such slot."""
    start = number * SLOT_BYTES
    if not 0 <= number < NUM_SLOTS or target.nbytes > SLOT_BYTES:
      raise ValueError(f'it named slot {number}')
    np.copyto(target, self._memory[start : start + target.nbytes])


def host() -> bytes:
  """Returns 16 bytes that processes share which see each other without a network."""
  parts = []
  try:
    with open('/proc/sys/kernel/random/boot_id', 'rb') as file:
      parts.append(file.read())
    for kind in ('pid', 'net'):
      parts.append(os.readlink(f'/proc/self/ns/{kind}').encode())
  except OSError:  # Not Linux.
    parts.append(secrets.token_bytes(16))
  return hashlib.blake2b(b'\n'.join(parts), digest_size=16).digest()
