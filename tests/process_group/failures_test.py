"""Errors on the other ranks when one worker dies, stops, leaves or differs."""

import contextlib
import os
import random
import signal
import time
from unittest import mock

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from tests import processes, tiers
from tests.process_group import conformance, meetings
from tf_strategies import errors
from tf_strategies.process_group.tcp import host_memory

# Generous for shared machines, but shorter than the timeouts of heartbeats and
# collectives.
_AT_ONCE_SECONDS = 8.0


def _train(rank, directory, size, options):
  """Repeats all-reduces until one fails. Returns the error, which must persist."""
  with meetings.meet(rank, **options) as meeting, meeting.form() as group:
    array = np.full(size, 1.0 + group.rank, np.float32)
    steps = 0
    while True:
      try:
        out = group.all_reduce(array, name='gradient')
      except errors.Error as e:
        details = {k: getattr(e, k, None) for k in _ATTRIBUTES}
        result = type(e).__name__, str(e), details, steps, time.time()
        break
      assert (out == sum(range(1, group.world_size + 1))).all(), 'partial data'
      steps += 1
      if steps == 3:
        meetings.touch(directory, f'{rank}.runs')
    started = time.monotonic()
    for again in (
      lambda: group.barrier(),
      lambda: group.exchange('later', None),
      lambda: group.all_gather(array),
    ):
      try:
        again()
      except type(group.failure) as e:
        assert str(e) == result[1], str(e)
      else:
        raise AssertionError('a failed group still works')
    assert time.monotonic() - started < _AT_ONCE_SECONDS
    return result


_ATTRIBUTES = ('rank', 'address', 'tensor', 'step', 'ranks')


class LostWorkerTest(parameterized.TestCase):
  def _lose(self, victim, number, size, options):
    directory = self.create_tempdir().full_path
    with processes.Workers(
      _train, 3, args=(directory, size, options)
    ) as workers:
      meetings.wait_for(directory, *(f'{rank}.runs' for rank in range(3)))
      workers.signal(victim, number)
      at = time.time()
      survivors = [r for r in range(3) if r != victim]
      outcomes = workers.wait(survivors)
      address = workers.addresses[victim]
      if number == signal.SIGSTOP:
        workers.signal(victim, signal.SIGCONT)
        (stopped,) = workers.wait([victim])
        # Rank 0 notifies the other ranks, but no rank can notify rank 0.
        self.assertRegex(
          stopped.value[1], f'^(This process itself stood still|Rank {victim}) '
        )
    for outcome in outcomes:
      self.assertEqual(outcome.error_text, '')
    return at, address, [outcome.value for outcome in outcomes]

  @tiers.product(
    victim=(0, tiers.soak(1), tiers.smoke(2)),
    size=(tiers.soak(10), tiers.smoke(1_000_000)),
  )
  def test_every_survivor_names_the_killed_worker(self, victim, size):
    at, address, results = self._lose(victim, signal.SIGKILL, size, {})
    for kind, message, details, steps, ended in results:
      self.assertEqual(kind, 'WorkerUnavailableError')
      self.assertEqual(details['rank'], victim)
      self.assertEqual(details['address'], address)
      self.assertEqual(details['tensor'], 'gradient')
      # Rank 0 counts the steps. It may be one collective ahead or behind.
      self.assertBetween(details['step'], steps, steps + 2)
      self.assertIn(f'Rank {victim} (task {victim} at {address})', message)
      self.assertIn("'gradient'", message)
      self.assertLess(ended - at, _AT_ONCE_SECONDS)

  @tiers.parameters(0, tiers.soak(2))
  def test_stopped_worker_is_named_after_the_heartbeat_timeout(self, victim):
    at, address, results = self._lose(
      victim, signal.SIGSTOP, 1000, {'heartbeat_timeout_seconds': 2.0}
    )
    for kind, message, details, _, ended in results:
      self.assertEqual(kind, 'WorkerUnavailableError')
      self.assertEqual((details['rank'], details['address']), (victim, address))
      self.assertIn('silent', message)
      self.assertGreater(ended - at, 1.5)
      self.assertLess(ended - at, 30)


def _leave(rank, leaver, how):
  with meetings.meet(rank) as meeting, meeting.form() as group:
    first = group.all_reduce(np.float32([rank]), name='first')
    if rank == leaver:
      # After this barrier every rank has the first sum.
      group.barrier(name='first done')
      if how == 'close':
        group.close()
        return first.tolist(), 'left', '', None
      group.abort('the disk is full')
    try:
      if rank != leaver:
        group.barrier(name='first done')
      group.all_reduce(np.float32([rank]), name='second')
    except errors.Error as e:
      return first.tolist(), type(e).__name__, str(e), e.rank
    return None


def _interrupted(rank):
  """Interrupts rank 1 with Ctrl-C while it waits for rank 0."""
  with meetings.meet(rank) as meeting, meeting.form() as group:
    group.barrier()
    if rank == 0:
      while group.failure is None:
        time.sleep(0.01)
    if rank == 1:
      signal.signal(signal.SIGALRM, signal.default_int_handler)
      signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
      group.all_reduce(np.ones(3))
    except KeyboardInterrupt:
      return str(group.failure)
    except errors.WorkerUnavailableError as e:
      return str(e)
    return None


def _broadcast(rank, path, warm_up, late):
  """Broadcasts from rank 0, which leaves before the other rank receives."""
  if path == 'socket':
    host_memory.MemorySlots = mock.Mock(side_effect=OSError)
  with meetings.meet(rank) as meeting, meeting.form() as group:
    for _ in range(warm_up):
      group.all_reduce(np.ones(300_000, np.float32))
    if rank:
      time.sleep(late)
    values = np.arange(375_000.0) * (1 - group.rank)
    return group.broadcast(values, 0)


class LeavingTest(parameterized.TestCase):
  @tiers.product(leaver=(0, tiers.soak(1)), how=('close', 'abort'))
  def test_leaving_and_aborting_are_not_reported_as_dying(self, leaver, how):
    results = processes.run_workers(_leave, 3, args=(leaver, how))
    for rank, (first, kind, message, culprit) in enumerate(results):
      self.assertEqual(first, [3.0])
      if rank == leaver and how == 'close':
        continue
      self.assertEqual(kind, 'WorkerUnavailableError')
      self.assertEqual(culprit, leaver)
      expected = 'left the group' if how == 'close' else 'the disk is full'
      self.assertIn(expected, message)

  @pytest.mark.smoke
  def test_interrupt_in_a_collective_fails_all_ranks(self):
    for result in processes.run_workers(_interrupted, 3):
      self.assertIsNotNone(result)
      self.assertStartsWith(result, 'Rank 1 (task 1 at ')
      self.assertIn('KeyboardInterrupt during a collective', result)

  @tiers.parameters(
    ('socket', 0, 0.5), ('memory', 5, 0.5), tiers.soak('memory', 0, 3.0)
  )
  def test_broadcast_completes_if_the_root_leaves_at_once(
    self, path, warm_up, late
  ):
    results = processes.run_workers(_broadcast, 2, args=(path, warm_up, late))
    for out in results:
      np.testing.assert_array_equal(out, np.arange(375_000.0))


def _differ(rank, calls):
  """Makes the call of this rank. Returns its error."""
  with meetings.meet(rank) as meeting, meeting.form() as group:
    group.barrier(name='together')
    method, args, options = calls[rank]
    try:
      getattr(group, method)(*args, **options)
      # A root only sends, so its call may already have succeeded.
      group.barrier()
    except errors.Error as e:
      return type(e).__name__, str(e), e.ranks, e.step
    return None


_FLOATS = np.zeros(100, np.float32)
_SAME = ('all_reduce', (_FLOATS,), {'name': 'x'})


class MismatchTest(parameterized.TestCase):
  @tiers.named_parameters(
    tiers.smoke(
      'size', ('all_reduce', (np.zeros(101, np.float32),), {'name': 'x'})
    ),
    tiers.soak(
      'algorithm', ('all_reduce', (np.zeros(10**5, 'f4'),), {'name': 'x'})
    ),
    ('barrier', ('barrier', (), {'name': 'x'})),
    tiers.soak('broadcast', ('broadcast', (_FLOATS, 0), {'name': 'x'})),
  )
  def test_every_rank_reports_both_calls(self, other):
    results = processes.run_workers(_differ, 3, args=([_SAME, _SAME, other],))
    for result in results:
      self.assertIsNotNone(result)
      kind, message, ranks, step = result
      self.assertEqual(kind, 'CollectiveMismatchError')
      self.assertEqual(message, results[0][1])
      self.assertEqual(ranks, (2,))
      self.assertEqual(step, 2)
      # Rank 0 is compared, or rank 1 if rank 0 was late.
      self.assertRegex(message, r'rank [01] \(task [01] at .*rank 2 \(task 2')
      self.assertIn("all_reduce 'x' of float32[100]", message)


def _late(rank, late):
  options = {'collective_timeout_seconds': 2.0}
  with meetings.meet(rank, **options) as meeting, meeting.form() as group:
    group.barrier(name='start')
    if rank == late:
      while group.failure is None:
        time.sleep(0.05)
    try:
      group.all_reduce(np.zeros(5), name='weights')
    except errors.CollectiveTimeoutError as e:
      return str(e), e.rank, e.tensor, e.step
    return None


class TimeoutTest(parameterized.TestCase):
  @tiers.parameters(0, tiers.soak(2))
  def test_missing_rank_is_named(self, late):
    for result in processes.run_workers(_late, 3, args=(late,)):
      self.assertIsNotNone(result)
      message, rank, tensor, step = result
      self.assertEqual((rank, tensor, step), (late, 'weights', 2))
      self.assertIn(f'rank {late} (task {late} at ', message)
      self.assertIn("was last in barrier 'start' (sequence 1)", message)
      self.assertIn('within 2 s', message)


def _work_on(rank, directory, count):
  """Runs all collectives in successive groups, until all ranks see the end.

  Returns the numbers of rounds and groups.
  """
  end = os.path.join(directory, 'end')
  rounds = groups = 0
  with meetings.meet(
    rank, min_workers='majority', heartbeat_timeout_seconds=3.0
  ) as meeting:
    while True:
      group = meeting.form(rounds)
      groups += 1
      try:
        while True:
          is_end = group.broadcast(np.array(os.path.exists(end)), 0)
          if is_end and group.world_size == count:
            group.barrier()
            return rounds, groups
          _check_collectives(group)
          if group.pending_joiners():
            raise errors.WorkerUnavailableError('a worker waits')
          rounds += 1
          meetings.touch(directory, f'{rank}.runs')
      except errors.WorkerUnavailableError:
        continue


def _check_collectives(group):
  """Checks each collective with values that differ by rank and position."""
  size, own = group.world_size, group.rank
  total = size * (size - 1) // 2
  for length in (7, 40_001):
    array = np.arange(length, dtype=np.float64) + own
    out = group.all_reduce(array, name=f'{length}')
    assert (out == size * np.arange(length) + total).all()
  half = group.all_reduce(np.full(5, own, np.float16), name='half')
  assert (half == total).all()
  conformance.check_moves(group)
  group.barrier()


class ManyRanksTest(parameterized.TestCase):
  @parameterized.parameters(*range(5))
  @pytest.mark.soak
  def test_collectives_work_while_ranks_die_and_restart(self, seed):
    chance = random.Random(seed)
    count = 12
    directory = self.create_tempdir().full_path
    with processes.Workers(
      _work_on, count, args=(directory, count), deadline=240
    ) as workers:
      for _ in range(8):
        time.sleep(chance.uniform(0, 4))
        victims = chance.sample(range(count), chance.choice([1, 1, 2, 4]))
        stopped = chance.random() < 0.3
        for victim in victims:
          number = signal.SIGSTOP if stopped else signal.SIGKILL
          if workers.is_alive(victim):
            workers.signal(victim, number)
        time.sleep(chance.uniform(0, 5))
        for victim in victims:
          if not stopped:
            workers.kill(victim)
            workers.start(victim)
          elif workers.is_alive(victim):
            workers.signal(victim, signal.SIGCONT)
      # Every restarted worker takes part before the run ends.
      for rank in range(count):
        with contextlib.suppress(FileNotFoundError):
          os.remove(os.path.join(directory, f'{rank}.runs'))
        meetings.wait_for(directory, f'{rank}.runs')
      meetings.touch(directory, 'end')
      outcomes = workers.wait()
    for outcome in outcomes:
      self.assertEqual(outcome.error_text, '')
      rounds, _ = outcome.value
      self.assertGreater(rounds, 0)
    print(f'seed {seed}: rounds and groups', [o.value for o in outcomes])


if __name__ == '__main__':
  absltest.main()
