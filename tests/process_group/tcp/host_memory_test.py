"""Paths of arrays between the processes of one host."""

import ctypes
import gc
import os
import struct
import sys
import unittest
import unittest.mock

import numpy as np
from absl.testing import absltest, parameterized

from tests import processes, tiers
from tests.process_group import meetings
from tf_strategies.process_group.tcp import host_memory

_SIZE = 1_000_000
_OTHER_USERS = 54321


def _all_reduce(rank, forbids):
  """Runs all-reduces; returns paths, bytes read and sent, and leftover shared files."""
  read = []

  class Counted(host_memory.PeerSlots):
    def read(self, number, target):
      super().read(number, target)
      read.append(target.nbytes)

  host_memory.PeerSlots = Counted
  if forbids == 'users':
    os.setresuid(_OTHER_USERS + rank, _OTHER_USERS + rank, 0)
    # Makes the process dumpable, as if that user had started it.
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
  elif forbids == 'files':
    host_memory.MemorySlots = unittest.mock.Mock(
      side_effect=OSError('no more files')
    )
  try:
    before = sorted(os.listdir('/dev/shm'))
    with meetings.meet(rank) as meeting, meeting.form() as group:
      for step in range(5):
        array = np.arange(_SIZE, dtype=np.float32) % 1001 * (rank + 1) + step
        out = group.all_reduce(array, algorithm='ring')
        expected = np.arange(_SIZE, dtype=np.float32) % 1001 * 6 + 3 * step
        np.testing.assert_array_equal(out, expected)
      paths = group.paths()
      sent = group.bytes_sent
      group.barrier()
    left = sorted(set(os.listdir('/dev/shm')) - set(before))
    # Other tests may start MPI at the same time.
    left = [name for name in left if not name.startswith('mpich')]
  finally:
    if forbids == 'users':
      os.setresuid(0, 0, 0)
  return paths, sum(read), sent, left


@unittest.skipIf(sys.platform != 'linux', 'shared memory needs Linux')
class PathsTest(parameterized.TestCase):
  @tiers.parameters(
    tiers.smoke('nothing', 'memory'),
    ('files', 'socket'),
    tiers.soak('users', 'socket, not memory: Permission denied'),
  )
  def test_arrays_use_shared_memory_if_permitted(self, forbids, path):
    if forbids == 'users' and os.geteuid():
      self.skipTest('only root can act as other users')
    results = processes.run_workers(_all_reduce, 3, args=(forbids,))
    for rank, (paths, read, sent, left) in enumerate(results):
      # In a ring each rank receives from the previous rank.
      self.assertEqual(paths[(rank - 1) % 3], path)
      self.assertEqual(left, [])
      # All pieces, except those sent before both peers announced shared memory.
      least, most = (0.7 * sent, sent) if path == 'memory' else (0, 0)
      self.assertBetween(read, least, most)


def _mapped(rank):
  """Returns the number of mapped slots while a group is open, and after it."""

  def count():
    with open('/proc/self/maps') as file:
      return file.read().count('memfd:tf_strategies')

  gc.disable()
  with meetings.meet(rank) as meeting:
    with meeting.form() as group:
      for _ in range(6):
        group.all_reduce(np.ones(100_000, np.float32))
        group.barrier()
      during = count()
    return during, count()


@unittest.skipIf(sys.platform != 'linux', 'slots need Linux')
class SlotsOfClosedGroupsTest(absltest.TestCase):
  def test_memory_is_unmapped(self):
    self.assertEqual(processes.run_workers(_mapped, 2), [(2, 0)] * 2)


@unittest.skipIf(sys.platform != 'linux', 'slots need Linux')
class SlotsTest(absltest.TestCase):
  def test_slots_of_another_process_or_host_are_refused(self):
    slots, others = host_memory.MemorySlots(), host_memory.MemorySlots()
    for ends in (slots, others):
      self.addCleanup(ends.close)
    piece, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    peer = host_memory.PeerSlots(slots.pack())
    peer.read(slots.put(piece), target)
    np.testing.assert_array_equal(target, piece)
    for number in (-9, 8):
      with self.assertRaisesRegex(ValueError, 'named slot'):
        peer.read(number, target)
    # The number of another file, of no file, and of a process that is not here.
    for numbers in (
      others.pack()[:16],
      struct.pack('<QQ', os.getpid(), 1 << 20),
      struct.pack('<QQ', 1 << 40, 0),
    ):
      with self.assertRaisesRegex(OSError, 'another host'):
        host_memory.PeerSlots(numbers + slots.pack()[16:])


if __name__ == '__main__':
  absltest.main()
