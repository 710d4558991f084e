"""Which way arrays take between processes of one host, and what proves a read."""

import ctypes
import gc
import mmap
import os
import platform
import socket
import struct
import sys
import threading
import time
import unittest

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from tests import processes
from tests.process_group import meetings
from tf_strategies import collectives
from tf_strategies.process_group import buffers, execution
from tf_strategies.process_group import options as options_lib
from tf_strategies.process_group import plan as plan_lib
from tf_strategies.process_group.network import protocol as wire
from tf_strategies.process_group.tcp import host_memory, transport

_SIZE = 1_000_000
_FLOAT32 = plan_lib.Format(4)
# The number of `process_vm_readv`.
_SYSTEM_CALLS = {'x86_64': 310, 'aarch64': 270}
_OTHER_USERS = 54321


def _forbid_reads():
  """A filter of system calls, as containers have: reading memory is EPERM."""
  load, equal, done = 0x20, 0x15, 0x06
  allow, refuse = 0x7FFF0000, 0x00050001
  program = b''.join(
    struct.pack('HBBI', *line)
    for line in (
      (load, 0, 0, 0),
      (equal, 0, 1, _SYSTEM_CALLS[platform.machine()]),
      (done, 0, 0, refuse),
      (done, 0, 0, allow),
    )
  )
  code = ctypes.create_string_buffer(program, len(program))
  # `struct sock_fprog`.
  head = struct.pack('HxxxxxxP', len(program) // 8, ctypes.addressof(code))
  libc = ctypes.CDLL(None, use_errno=True)
  for words in ((38, 1, 0, 0, 0), (22, 2, ctypes.c_char_p(head), 0, 0)):
    if libc.prctl(*words):
      raise OSError(ctypes.get_errno(), 'prctl')


def _travel(rank, forbids, options):
  """All-reduces; the ways, what was read from memory, and the shared files."""
  read = []

  class Counted(host_memory.PeerMemory):
    def read(self, address, target):
      super().read(address, target)
      read.append(target.nbytes)

  host_memory.PeerMemory = Counted
  if forbids == 'filter':
    _forbid_reads()
  elif forbids == 'users':
    os.setresuid(_OTHER_USERS + rank, _OTHER_USERS + rank, 0)
    # As a process is that was started by that user: what belongs to it is its own.
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
  try:
    before = sorted(os.listdir('/dev/shm'))
    with meetings.meet(rank, **options) as meeting, meeting.form() as group:
      for step in range(5):
        array = np.arange(_SIZE, dtype=np.float32) % 1001 * (rank + 1) + step
        out = group.all_reduce(array, algorithm='ring')
        expected = np.arange(_SIZE, dtype=np.float32) % 1001 * 6 + 3 * step
        np.testing.assert_array_equal(out, expected)
      paths = group.paths()
      sent = group.bytes_sent
      group.barrier()
    left = sorted(set(os.listdir('/dev/shm')) - set(before))
  finally:
    if forbids == 'users':
      os.setresuid(0, 0, 0)
  return paths, sum(n for n in read if n > 8), sent, left


@pytest.mark.multi_process
@unittest.skipIf(
  sys.platform != 'linux' or platform.machine() not in _SYSTEM_CALLS,
  'reading memory is of Linux',
)
class PathsTest(parameterized.TestCase):
  def _travel(self, forbids, **options):
    results = processes.run_workers(_travel, 3, args=(forbids, options))
    ways = set()
    for rank, (paths, _, _, left) in enumerate(results):
      # A ring: each rank gets pieces of the one before it.
      ways.add(paths[(rank - 1) % 3])
      self.assertEqual(left, [])
    return ways, [read for _, read, _, _ in results], results[0][2]

  def test_memory(self):
    ways, read, sent = self._travel('nothing')
    self.assertEqual(ways, {'memory'})
    # All but what came before the peers had told each other.
    for count in read:
      self.assertBetween(count, 0.7 * sent, sent)

  def test_slots_where_reading_is_forbidden(self):
    ways, read, _ = self._travel('filter')
    self.assertEqual(ways, {'slots, not memory: Operation not permitted'})
    self.assertEqual(read, [0, 0, 0])

  @unittest.skipIf(os.geteuid(), 'only root can act as other users')
  @pytest.mark.full
  def test_socket_where_users_differ(self):
    ways, read, _ = self._travel('users')
    no_memory = 'socket, not memory: Operation not permitted'
    self.assertEqual(ways, {f'{no_memory}, nor slots: Permission denied'})
    self.assertEqual(read, [0, 0, 0])

  @pytest.mark.full
  def test_socket_if_asked_for(self):
    ways, read, _ = self._travel('nothing', same_host='socket')
    self.assertEqual(ways, {'socket'})
    self.assertEqual(read, [0, 0, 0])


def _mapped(rank):
  """How many slots are mapped while a group works, and after it."""

  def count():
    with open('/proc/self/maps') as file:
      return file.read().count('memfd:tf_strategies')

  gc.disable()
  with meetings.meet(rank, same_host='slots') as meeting:
    with meeting.form() as group:
      for _ in range(6):
        group.all_reduce(np.ones(100_000, np.float32))
        group.barrier()
      during = count()
    return during, count()


@pytest.mark.multi_process
@unittest.skipIf(sys.platform != 'linux', 'slots are of Linux')
class SlotsOfClosedGroupsTest(absltest.TestCase):
  def test_are_given_back(self):
    results = processes.run_workers(_mapped, 2)
    self.assertEqual(results, [(2, 0)] * 2)


@unittest.skipIf(sys.platform != 'linux', 'reading memory is of Linux')
class ProofTest(parameterized.TestCase):
  def test_reads_after_it_was_given_up_do_not_count(self):
    own = host_memory.OwnMemory()
    peer = host_memory.PeerMemory(own.place)
    array, target = np.arange(100_000.0), np.zeros(100_000)
    peer.read(array.ctypes.data, target)
    np.testing.assert_array_equal(target, array)
    own.revoke()
    with self.assertRaisesRegex(host_memory.UnreadableError, 'given up'):
      peer.read(array.ctypes.data, target)

  def test_nothing_is_where_it_is_said_to_be(self):
    own = host_memory.OwnMemory()
    peer = host_memory.PeerMemory(own.place)
    with self.assertRaisesRegex(host_memory.UnreadableError, 'Bad address'):
      peer.read(8192, np.zeros(10))
    for wrong in (
      own.place._replace(number=1),
      own.place._replace(host=bytes(16)),
      own.place._replace(pid=2**22 + 1),
    ):
      with self.assertRaises(host_memory.UnreadableError):
        host_memory.PeerMemory(wrong)

  def test_memory_that_only_its_process_may_read(self):
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    array = np.frombuffer(memory, np.uint8)
    self.assertTrue(host_memory.can_be_read(array))
    end = ctypes.c_void_p(array.ctypes.data + 3 * mmap.PAGESIZE)
    self.assertEqual(ctypes.CDLL(None).mprotect(end, mmap.PAGESIZE, 0), 0)
    self.assertFalse(host_memory.can_be_read(array))
    self.assertTrue(host_memory.can_be_read(array[: 3 * mmap.PAGESIZE]))
    peer = host_memory.PeerMemory(host_memory.OwnMemory().place)
    with self.assertRaisesRegex(host_memory.UnreadableError, 'gives 12288 by'):
      peer.read(array.ctypes.data, np.zeros(array.size, np.uint8))

  def test_slots_of_another_process_of_that_id(self):
    place = host_memory.OwnMemory().place
    slots, others = host_memory.Slots(), host_memory.Slots()
    for ends in (slots, others):
      self.addCleanup(ends.close)
    piece, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    peer = host_memory.PeerSlots(place, slots.pack())
    peer.read(slots.put(piece), target)
    np.testing.assert_array_equal(target, piece)
    for number in (-9, 8):
      with self.assertRaisesRegex(host_memory.UnreadableError, 'named slot'):
        peer.read(number, target)
    # The same number of a file, in a host that takes itself for this one.
    data = others.pack()[:8] + slots.pack()[8:]
    with self.assertRaisesRegex(host_memory.UnreadableError, 'not there'):
      host_memory.PeerSlots(place, data)

  def _late(self, revokes):
    """One rank gives up and reuses its memory: what the other gets then."""
    ends = []
    for rank, sock in enumerate(socket.socketpair()):
      ends.append(transport.Transport(options_lib.GroupOptions(), lambda: None))
      ends[rank].add(1 - rank, sock)
      self.addCleanup(ends[rank].close)
      self.addCleanup(ends[rank].shut_down)
    if not revokes:
      ends[0]._memory.revoke = lambda: None
    arrays = [np.full(_SIZE, 1.0 + r, np.float32) for r in range(2)]
    outs = [np.zeros(_SIZE, np.float32) for _ in range(2)]
    schedule = collectives.ALGORITHMS['ring'](2)

    def run(rank, sequence, seconds):
      plan = plan_lib.from_schedule(schedule, rank, _SIZE, _FLOAT32)
      work = execution.Execution(
        plan, arrays[rank], outs[rank], buffers.Pool(), _FLOAT32
      )
      header = wire.DataHeader('all_reduce', 1, sequence, '', '', '', 4, 0, 0)
      ends[rank].run(work, header, time.monotonic() + seconds)

    thread = threading.Thread(target=run, args=(1, 1, 30), daemon=True)
    thread.start()
    run(0, 1, 30)
    thread.join(30)
    self.assertFalse(thread.is_alive())
    for out in outs:
      np.testing.assert_array_equal(out, 3)
    self.assertEqual(ends[1].paths(), {0: 'memory'})
    # Rank 0 says where its pieces are, gives up and uses the memory again.
    with self.assertRaises(execution.DeadlineError):
      run(0, 2, 0.5)
    arrays[0][:] = -7
    outs[1][:] = 0
    error = None
    try:
      run(1, 2, 2)
    except Exception as e:
      error = e
    return error, outs[1]

  def test_peer_of_one_that_gave_up_fails(self):
    error, out = self._late(revokes=True)
    self.assertIsInstance(error, execution.LinkClosedError)
    self.assertIn('its memory cannot be read', str(error))
    self.assertNotIn(-5, out)

  def test_without_the_proof_it_would_take_what_is_there(self):
    error, out = self._late(revokes=False)
    self.assertIsInstance(error, execution.DeadlineError)
    self.assertIn(2 - 7, out)


if __name__ == '__main__':
  absltest.main()
