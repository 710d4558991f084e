"""Links that arrive late, that are closed, and that share memory with a send."""

import socket
import struct
import threading
import time
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from tf_strategies.collectives import schedule as schedule_lib
from tf_strategies.process_group import buffers, execution
from tf_strategies.process_group import plan as plan_lib
from tf_strategies.process_group.tcp import host_memory, transport
from tf_strategies.process_group.tcp import link as link_lib

_DEADLINE_SECONDS = 60
_HEADER = link_lib.Header(1, 0)
_word = struct.Struct('<Q').pack


def _execution(plan, array, out):
  return execution.Execution(plan, array, out, buffers.Pool())


def _copy(links, deadline=1e9):
  """Receives 8 elements from rank 2 and nothing from rank 1, as rank 0."""
  transfer = schedule_lib.Transfer(0, 2, 0, 0, False)
  schedule = schedule_lib.Schedule('copy', 3, 1, (transfer,))
  plan = plan_lib.from_schedule(schedule, 0, 8, 4, 1 << 19)
  array = np.zeros(8, np.float32)
  links.run(_execution(plan, array, array.copy()), _HEADER, deadline)


class TransportTest(absltest.TestCase):
  def pair(self):
    """Returns both ends of a connection."""
    return [self.enter_context(end) for end in socket.socketpair()]

  def transport(self, sockets, check=lambda: None):
    links = transport.Transport(check)
    self.addCleanup(links.close)
    self.addCleanup(links.shut_down)
    for rank, sock in sockets.items():
      links.add(rank, sock)
    return links

  @mock.patch.object(host_memory, 'MemorySlots', side_effect=OSError)
  def test_piece_is_received_into_memory_that_a_send_still_reads(
    self, unused_slots
  ):
    # Rank 1's data overwrites memory that the send to rank 2 reads until half of the
    # data has arrived.
    size = 1 << 24
    send = plan_lib.PlannedPiece(2, plan_lib.OUT, 0, size)
    receive = plan_lib.PlannedPiece(1, plan_lib.OUT, 0, size)
    plan = plan_lib.RankPlan(
      (send, receive), (0, 1), ((1,), ()), {2: (0,)}, {1: (1,)}
    )
    (mine, before), (to, after) = self.pair(), self.pair()
    out = np.full(size, 1, np.uint8)
    run = _execution(plan, out, out)
    links = self.transport({1: mine, 2: to})
    thread = threading.Thread(
      target=links.run, args=(run, _HEADER), daemon=True
    )
    thread.start()
    before.sendall(_word(link_lib.HEADER) + _HEADER.pack())
    before.sendall(_word(link_lib.BYTES) + bytes([2]) * (size // 2))
    with after.makefile('rb') as file:
      passed = file.read(2 * 8 + len(_HEADER.pack()) + size)
    self.assertEqual(passed[-size:], bytes([1]) * size)
    while run.needs[1]:
      time.sleep(0.01)
    before.sendall(bytes([2]) * (size // 2))
    thread.join(_DEADLINE_SECONDS)
    self.assertFalse(thread.is_alive())
    np.testing.assert_array_equal(out, 2)

  def test_words_received_byte_by_byte_are_complete(self):
    mine, other = self.pair()
    mine.setblocking(False)
    link = link_lib.DataLink(1, mine)
    self.addCleanup(link.close)
    found = []
    for byte in _word(link_lib.HEADER) + _HEADER.pack() + _word(link_lib.BYTES):
      other.sendall(bytes([byte]))
      found.append(link.next())
    self.assertEqual(
      found, [*23 * [None], link_lib.HEADER, *7 * [None], link_lib.BYTES]
    )
    self.assertEqual(link.header, _HEADER)

  def test_late_link_shows_that_its_peer_runs_another_collective(self):
    (mine, other), (waited_for, _) = self.pair(), self.pair()
    other.sendall(_word(link_lib.HEADER) + link_lib.Header(1, 99).pack())
    wakes = []

    def check():
      if not wakes:
        links.add(1, mine)
      wakes.append(True)

    links = self.transport({2: waited_for}, check)
    with self.assertRaises(execution.MismatchError) as raised:
      _copy(links)
    self.assertEqual(raised.exception.rank, 1)

  def test_peer_at_a_later_collective_gets_the_answer_about_memory(self):
    (mine, other), (from_peer, peer) = self.pair(), self.pair()
    slots = host_memory.MemorySlots()
    self.addCleanup(slots.close)
    other.sendall(_word(link_lib._SLOTS) + slots.pack())
    other.sendall(_word(link_lib.HEADER) + link_lib.Header(2, 0).pack())
    peer.sendall(_word(link_lib.HEADER) + _HEADER.pack())
    peer.sendall(_word(link_lib.BYTES) + bytes(32))
    _copy(self.transport({1: mine, 2: from_peer}), time.monotonic() + 5)
    with other.makefile('rb') as file:
      file.read(len(_word(0)) + host_memory.SLOTS_BYTES)
      self.assertEqual(file.read(len(_word(0))), _word(link_lib._READS))

  def test_closed_link_raises(self):
    mine, other = self.pair()
    other.close()
    with self.assertRaises(execution.LinkClosedError) as raised:
      _copy(self.transport({2: mine}))
    self.assertEqual(raised.exception.rank, 2)

  def test_closed_link_of_an_unneeded_peer_is_ignored(self):
    (mine, other), (waited_for, _) = self.pair(), self.pair()
    gone = self.transport({0: other})
    gone.shut_down()
    gone.close()
    links = self.transport({1: mine, 2: waited_for})
    waiting = []

    def work():
      try:
        _copy(links, time.monotonic() + 0.5)
      except execution.DeadlineError as e:
        waiting.extend(e.waiting)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_DEADLINE_SECONDS)
    self.assertFalse(thread.is_alive())
    self.assertEqual(waiting, [2])


class PoolTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('itself', lambda a: a),
    ('other_dtype', lambda a: a.view(np.uint8)[3:]),
    ('memoryview', lambda a: memoryview(a)),
  )
  def test_memory_in_use_is_not_reused(self, hold):
    pool = buffers.Pool()
    array = pool.take(100, 'f4')
    pointer = array.ctypes.data
    held = hold(array)
    del array
    other = pool.take(100, 'f4')
    self.assertNotEqual(other.ctypes.data, pointer)
    del held
    self.assertEqual(pool.take(100, 'f4').ctypes.data, pointer)

  def test_pool_size_is_bounded(self):
    pool = buffers.Pool(max_bytes=10_000)
    arrays = [pool.take(4096, 'u1') for _ in range(5)]
    self.assertLen({a.ctypes.data for a in arrays}, 5)
    newest = arrays[-1].ctypes.data
    del arrays
    self.assertEqual(pool.take(4096, 'u1').ctypes.data, newest)
    self.assertLessEqual(sum(b.size for b in pool._blocks), 10_000)


if __name__ == '__main__':
  absltest.main()
