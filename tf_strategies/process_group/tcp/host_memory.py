"""How processes of one host read each other's memory instead of sockets.

A receiver copies a piece straight from the sender's memory
(`process_vm_readv`), which Linux allows between processes of one user. Where it
does not (Yama's `ptrace_scope`, a container's filter), the sender copies pieces
into slots of memory that both have mapped. The socket tells where a piece is, and
that it was read.

Whoever gives up a collective spoils the number that proves what its peers read,
before its memory is used for something else: a piece that was read counts only if
the number was still there afterwards.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import secrets
import struct
from typing import NamedTuple

import numpy as np

# Of the memory that a link's slots take, and of one: what travels as one piece.
_NUM_SLOTS = 8
SLOT_BYTES = 1 << 20

_PLACE = struct.Struct('<16sQQQ')
PLACE_BYTES = _PLACE.size
_SLOTS = struct.Struct('<QQQ')
SLOTS_BYTES = _SLOTS.size


class _Stretch(ctypes.Structure):
  """`struct iovec`."""

  _fields_ = [('start', ctypes.c_void_p), ('length', ctypes.c_size_t)]


class UnreadableError(Exception):
  """A peer's memory cannot be read, and why; internal to `process_group`."""


class Place(NamedTuple):
  """Where a process is, and how to prove that one reads its memory.

  Attributes:
    host: 16 bytes that processes have alike which see each other's ids and are
      in one network.
    pid: of the process.
    address: in its memory, of the number.
    number: 64 bits that nobody can guess.
  """

  host: bytes
  pid: int
  address: int
  number: int

  def pack(self) -> bytes:
    """The place as `PLACE_BYTES` bytes."""
    return _PLACE.pack(*self)

  @classmethod
  def unpack(cls, data: bytes) -> Place:
    """The place that `pack` wrote."""
    return cls(*_PLACE.unpack(data))


class OwnMemory:
  """This process's memory, as peers of its host may read it."""

  def __init__(self):
    self._number = np.array([secrets.randbits(64) | 1], np.uint64)
    self.place = Place(
      host(), os.getpid(), self._number.ctypes.data, int(self._number[0])
    )

  def revoke(self) -> None:
    """What peers read from now on does not count."""
    self._number[0] = 0


class PeerMemory:
  """Reads the memory of another process of this host.

  Args:
    place: of that process.

  Raises:
    UnreadableError: it is on another host, or the system forbids it.
  """

  def __init__(self, place: Place):
    if place.host != host():
      raise UnreadableError('another host')
    self._place = place
    self._proof = ctypes.c_uint64()
    self._own = (_Stretch * 2)()
    self._own[1] = _Stretch(ctypes.addressof(self._proof), 8)
    self._peers = (_Stretch * 2)()
    self._peers[1] = _Stretch(place.address, 8)
    self.read(place.address, np.empty(8, np.uint8))

  def read(self, address: int, target: np.ndarray) -> None:
    """Copies the bytes at an address; UnreadableError if that is not certain."""
    size = target.nbytes
    self._own[0] = _Stretch(target.ctypes.data, size)
    self._peers[0] = _Stretch(address, size)
    self._proof.value = 0
    # The second stretch, the number, is read after the first.
    count = _READ(self._place.pid, self._own, 2, self._peers, 2, 0)
    if count < 0:
      raise UnreadableError(os.strerror(ctypes.get_errno()))
    if count < size:
      raise UnreadableError(f'its system gives {count} bytes of {size}')
    if count != size + 8 or self._proof.value != self._place.number:
      raise UnreadableError('it has given up this collective')


def can_be_read(piece: np.ndarray) -> bool:
  """Whether peers could read a piece of this process: not of a device's memory.

  What a driver has mapped, memory for copies to a GPU, say, only its process reads.
  """
  first, last = piece.ctypes.data, piece.ctypes.data + piece.nbytes - 1
  peers = (_Stretch * 2)(_Stretch(first, 1), _Stretch(last, 1))
  own = (ctypes.c_uint16)()
  target = (_Stretch * 1)(_Stretch(ctypes.addressof(own), 2))
  return _READ(os.getpid(), target, 1, peers, 2, 0) == 2


class Slots:
  """Memory of which a peer has a mapping, for pieces that it is to read.

  Raises:
    OSError: there is none left.
  """

  def __init__(self):
    size = _NUM_SLOTS * SLOT_BYTES + 8
    self._file = os.memfd_create('tf_strategies', os.MFD_CLOEXEC)
    try:
      os.ftruncate(self._file, size)
      self._map = mmap.mmap(self._file, size)
    except OSError:
      os.close(self._file)
      raise
    self._memory = np.frombuffer(self._map, np.uint8)
    # Hosts that were copied while they ran take each other for one: a file of
    # that name may be another.
    self._number = secrets.token_bytes(8)
    self._map[-8:] = self._number
    self._next = 0

  def pack(self) -> bytes:
    """What the peer needs, as `SLOTS_BYTES` bytes."""
    number = int.from_bytes(self._number, 'little')
    return _SLOTS.pack(self._file, len(self._memory), number)

  def put(self, piece: np.ndarray) -> int:
    """Copies a piece into the next slot and returns its number."""
    number = self._next % _NUM_SLOTS
    self._next += 1
    start = number * SLOT_BYTES
    self._memory[start : start + piece.nbytes] = piece
    return number

  def close(self) -> None:
    """Gives the file back; mappings live on as long as somebody uses them."""
    os.close(self._file)


class PeerSlots:
  """The slots of another process of this host.

  Raises:
    UnreadableError: its files cannot be opened.
  """

  def __init__(self, place: Place, data: bytes):
    file, size, number = _SLOTS.unpack(data)
    try:
      with open(f'/proc/{place.pid}/fd/{file}', 'rb') as opened:
        mapped = mmap.mmap(opened.fileno(), size, prot=mmap.PROT_READ)
    except (OSError, ValueError) as e:
      raise UnreadableError(getattr(e, 'strerror', str(e))) from e
    if mapped[-8:] != number.to_bytes(8, 'little'):
      raise UnreadableError('its files are not there')
    self._memory = np.frombuffer(mapped, np.uint8)

  def read(self, number: int, target: np.ndarray) -> None:
    """Copies the piece in a slot; UnreadableError if there is no such slot."""
    start = number * SLOT_BYTES
    if not 0 <= number < _NUM_SLOTS or target.nbytes > SLOT_BYTES:
      raise UnreadableError(f'it named slot {number}')
    np.copyto(target, self._memory[start : start + target.nbytes])


def has_slot(unread: int) -> bool:
  """Whether a slot is free while so many are not yet read."""
  return unread < _NUM_SLOTS


def host() -> bytes:
  """Which processes see each other's ids, and each other without a network."""
  parts = []
  try:
    with open('/proc/sys/kernel/random/boot_id', 'rb') as file:
      parts.append(file.read())
    for kind in ('pid', 'net'):
      parts.append(os.readlink(f'/proc/self/ns/{kind}').encode())
  except OSError:  # Not Linux.
    parts.append(secrets.token_bytes(16))
  return hashlib.blake2b(b'\n'.join(parts), digest_size=16).digest()


def _load():
  """`process_vm_readv`; a function that fails where there is none."""
  read = getattr(ctypes.CDLL(None, use_errno=True), 'process_vm_readv', None)
  if read is None:
    return lambda *_: -1
  stretches = ctypes.POINTER(_Stretch)
  count = ctypes.c_ulong
  read.restype = ctypes.c_ssize_t
  read.argtypes = [ctypes.c_int, stretches, count, stretches, count, count]
  return read


_READ = _load()
