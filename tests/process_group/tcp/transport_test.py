"""Any schedule through the executor, against the simulator, bit for bit."""

import contextlib
import functools
import random
import socket
import struct
import threading
import time
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from tests.collectives.simulator import simulate
from tf_strategies.collectives import schedule as schedule_lib
from tf_strategies.collectives.algorithms import ALGORITHMS
from tf_strategies.process_group import buffers, execution
from tf_strategies.process_group import plan as plan_lib
from tf_strategies.process_group.tcp import host_memory, transport
from tf_strategies.process_group.tcp import link as link_lib

_DEADLINE_SECONDS = 60
# Rank 0 receives 8 elements of rank 2, and nothing of rank 1.
_COPY_OF_2 = plan_lib.from_schedule(
  schedule_lib.Schedule(
    'copy', 3, 1, (schedule_lib.Transfer(0, 2, 0, 0, False),)
  ),
  0,
  8,
  4,
  1 << 19,
)


def _mesh(world_size, in_parts=False):
  """Returns sockets by rank and peer; with `in_parts`, reads return any parts."""
  sockets = [{} for _ in range(world_size)]
  for a in range(world_size):
    for b in range(a):
      sockets[a][b], end = socket.socketpair()
      if in_parts:
        end = _passed_on(end, seed=10 * a + b)
      sockets[b][a] = end
  return sockets


def _passed_on(near, seed):
  """An end of a connection whose other end is `near`, by way of two threads."""
  far, end = socket.socketpair()

  def pass_on(source, target, parts):
    with source, contextlib.suppress(OSError):
      while data := source.recv(parts.choice((1, 7, 8, 50, 5000, 1 << 20))):
        target.sendall(data)
      target.shutdown(socket.SHUT_WR)

  for way in ((near, far, random.Random(seed)), (far, near, random.Random(-1))):
    threading.Thread(target=pass_on, args=way, daemon=True).start()
  return end


def _header(sequence, digest=0):
  return link_lib.Header(sequence, digest)


def _execution(plan, array, out):
  return execution.Execution(plan, array, out, buffers.Pool())


def _transport(sockets, path='memory'):
  links = transport.Transport(lambda: None)
  with contextlib.ExitStack() as stack:
    if path == 'socket':
      no_slots = mock.patch.object(
        host_memory, 'MemorySlots', side_effect=OSError
      )
      stack.enter_context(no_slots)
    for rank, sock in sockets.items():
      links.add(rank, sock)
  return links


class _Rank(threading.Thread):
  """One rank in a thread: its collectives, and what ended them."""

  def __init__(self, sockets, function, path):
    super().__init__(daemon=True)
    self.links = _transport(sockets, path)
    self._function = function
    self.error = None

  def run(self):
    try:
      self._function(self.links)
    except Exception as e:
      self.error = e


def _run(world_size, functions, path='memory', in_parts=False):
  mesh = _mesh(world_size, in_parts)
  ranks = [
    _Rank(*of_rank, path) for of_rank in zip(mesh, functions, strict=True)
  ]
  for rank in ranks:
    rank.start()
  for rank in ranks:
    rank.join(_DEADLINE_SECONDS)
  stuck = [i for i, rank in enumerate(ranks) if rank.is_alive()]
  for rank in ranks:
    rank.links.shut_down()
    rank.join(5)
    rank.links.close()
  if stuck:
    raise AssertionError(f'ranks {stuck} did not finish')
  return [rank.error for rank in ranks]


class SchedulesTest(parameterized.TestCase):
  @parameterized.product(
    algorithm=tuple(ALGORITHMS),
    world_size=(1, 2, 3, 4, 5),
    dtype=('float32', 'bfloat16'),
    path=('memory', 'socket'),
  )
  # Most pieces are large enough for memory.
  @mock.patch.object(link_lib, '_LEAST_IN_MEMORY', 64)
  def test_equals_the_simulator(self, algorithm, world_size, dtype, path):
    schedule = ALGORITHMS[algorithm](world_size)
    sizes = (0, 1, world_size + 1, 1009)
    inputs = {
      size: [
        np.random.RandomState(100 * size + r)
        .standard_normal(size)
        .astype(dtype)
        for r in range(world_size)
      ]
      for size in sizes
    }
    outputs = {size: [None] * world_size for size in sizes}
    sent = [{} for _ in range(world_size)]

    def work(rank):
      def function(links):
        for sequence, size in enumerate(sizes, 1):
          array = inputs[size][rank]
          out = array.copy() if world_size == 1 else np.full_like(array, -9)
          plan = plan_lib.from_schedule(
            schedule, rank, size, array.itemsize, 100
          )
          before = links.bytes_sent
          run = _execution(plan, array, out)
          links.run(run, _header(sequence, size))
          sent[rank][size] = links.bytes_sent - before
          outputs[size][rank] = out

      return function

    functions = [work(rank) for rank in range(world_size)]
    # Between four ranks, bytes come in any parts.
    errors = _run(world_size, functions, path, in_parts=world_size == 4)
    self.assertEqual(errors, [None] * world_size)
    for size in sizes:
      expected = simulate(schedule, inputs[size])
      for rank in range(world_size):
        self.assertEqual(
          outputs[size][rank].tobytes(), expected.outputs[rank].tobytes()
        )
        self.assertEqual(
          sent[rank][size],
          sum(n for (s, _), n in expected.bytes_per_link.items() if s == rank),
        )

  def test_place_that_becomes_free_while_a_piece_comes(self):
    # Data from rank 1 goes where the send to rank 2 still reads, until half arrived.
    size = 1 << 24
    send = plan_lib.PlannedPiece(plan_lib.SEND, 2, plan_lib.OUT, 0, size)
    receive = plan_lib.PlannedPiece(plan_lib.RECEIVE, 1, plan_lib.OUT, 0, size)
    plan = plan_lib.RankPlan(
      (send, receive), (0, 1), ((1,), ()), {2: (0,)}, {1: (1,)}
    )
    (mine, before), (to, after) = socket.socketpair(), socket.socketpair()
    out = np.full(size, 1, np.uint8)
    run = _execution(plan, out, out)
    links = _transport({1: mine, 2: to}, 'socket')
    thread = threading.Thread(
      target=links.run, args=(run, _header(1)), daemon=True
    )
    thread.start()
    word = struct.Struct('<Q').pack
    before.sendall(word(link_lib.HEADER) + _header(1).pack())
    before.sendall(word(link_lib.BYTES) + bytes([2]) * (size // 2))
    with after.makefile('rb') as file:
      passed = file.read(2 * 8 + len(_header(1).pack()) + size)
    self.assertEqual(passed[-size:], bytes([1]) * size)
    while run.needs[1]:
      time.sleep(0.01)
    before.sendall(bytes([2]) * (size // 2))
    thread.join(_DEADLINE_SECONDS)
    self.assertFalse(thread.is_alive())
    np.testing.assert_array_equal(out, 2)
    links.close()
    for end in (before, after):
      end.close()


class GathersTest(parameterized.TestCase):
  @parameterized.product(
    way=('direct', 'ring', 'doubling'), world_size=(1, 2, 3, 5, 8, 9)
  )
  def test_brings_the_bytes_of_all_to_all(self, way, world_size):
    sizes = tuple(7 * r % 20 for r in range(world_size))
    parts = [np.arange(n, dtype=np.uint8) + 20 * r for r, n in enumerate(sizes)]
    ends = np.cumsum(sizes)
    outputs = [np.full(ends[-1], 255, np.uint8) for _ in sizes]

    def work(rank):
      def function(links):
        outputs[rank][ends[rank] - sizes[rank] : ends[rank]] = parts[rank]
        plan = plan_lib.gather(rank, sizes, 4, way)
        out = outputs[rank]
        links.run(_execution(plan, out, out), _header(1))

      return function

    errors = _run(world_size, [work(rank) for rank in range(world_size)])
    self.assertEqual(errors, [None] * world_size)
    for out in outputs:
      np.testing.assert_array_equal(out, np.concatenate(parts))


class SixteenBitsTest(parameterized.TestCase):
  @parameterized.parameters(
    ('float16', [2048, 2048], [1, 3], [2048, 2052]),
    ('bfloat16', [256, 256], [1, 3], [256, 260]),
    ('float16', [60000], [60000], [np.inf]),
    ('bfloat16', [60000], [60000], [119808]),
    *(
      (dtype, [np.inf, -np.inf, np.inf, np.nan, -0.0, 0.0], second, sums)
      for dtype in ('float16', 'bfloat16')
      for second, sums in (
        ([1] * 6, [np.inf, -np.inf, np.inf, np.nan, 1, 1]),
        ([-np.inf] * 6, [np.nan, -np.inf, np.nan, np.nan, *[-np.inf] * 2]),
        ([-0.0] * 6, [np.inf, -np.inf, np.inf, np.nan, -0.0, 0.0]),
      )
    ),
  )
  def test_sums(self, dtype, first, second, sums):
    plan_of = functools.partial(
      plan_lib.from_schedule, length=len(sums), itemsize=2, piece_bytes=100
    )
    arrays = [np.array(a, np.float32).astype(dtype) for a in (first, second)]
    outputs = [np.empty_like(a) for a in arrays]

    def work(rank):
      def function(links):
        plan = plan_of(ALGORITHMS['ring'](2), rank)
        with np.errstate(all='raise'):
          run = _execution(plan, arrays[rank], outputs[rank])
          links.run(run, _header(1))

      return function

    self.assertEqual(_run(2, [work(0), work(1)]), [None, None])
    for out in outputs:
      np.testing.assert_array_equal(out.astype(np.float32), sums)
      zeros = np.equal(sums, 0)
      np.testing.assert_array_equal(
        np.signbit(out.astype(np.float32))[zeros], np.signbit(sums)[zeros]
      )


class FailuresTest(parameterized.TestCase):
  def test_link_that_comes_late_shows_that_its_peer_is_elsewhere(self):
    links, (mine, other) = _transport({}), socket.socketpair()
    waited_for, silent = socket.socketpair()
    links.add(2, waited_for)
    other.sendall(struct.pack('<Q', link_lib.HEADER) + _header(1, 99).pack())
    wakes = []

    def check():
      if not wakes:
        links.add(1, mine)
      wakes.append(True)

    links._check = check
    array = np.zeros(8, np.float32)
    with self.assertRaises(execution.MismatchError) as raised:
      links.run(_execution(_COPY_OF_2, array, array.copy()), _header(1), 1e9)
    self.assertEqual(raised.exception.rank, 1)
    links.shut_down()
    links.close()
    for end in (other, silent):
      end.close()

  def test_link_that_the_peer_has_closed(self):
    mine, other = socket.socketpair()
    links = _transport({1: mine})
    other.close()
    array = np.zeros(8, np.float32)
    with self.assertRaises(execution.LinkClosedError) as raised:
      plan = plan_lib.from_schedule(ALGORITHMS['ring'](2), 0, 8, 4, 1 << 19)
      links.run(_execution(plan, array, array.copy()), _header(1))
    self.assertEqual(raised.exception.rank, 1)
    links.close()

  def test_peer_that_nobody_waits_for_closes_before_it_was_answered(self):
    (mine, other), (waited_for, silent) = (
      socket.socketpair(),
      socket.socketpair(),
    )
    gone = _transport({0: other})
    gone.shut_down()
    gone.close()
    links = _transport({1: mine, 2: waited_for})
    array = np.zeros(8, np.float32)
    run = _execution(_COPY_OF_2, array, array.copy())
    errors = []

    def work():
      try:
        links.run(run, _header(1), time.monotonic() + 0.5)
      except execution.DeadlineError as e:
        errors.append(e.waiting)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_DEADLINE_SECONDS)
    self.assertFalse(thread.is_alive())
    self.assertEqual(errors, [(2,)])
    links.shut_down()
    links.close()
    silent.close()


if __name__ == '__main__':
  absltest.main()
