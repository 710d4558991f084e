"""How workers find each other, are turned away, and form groups again."""

import contextlib
import os
import socket
import threading
import time
from concurrent import futures
from unittest import mock

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from tests import processes, tiers
from tests.process_group import meetings
from tf_strategies import errors, process_group
from tf_strategies.process_group import plan
from tf_strategies.process_group.network import (
  authentication,
  connection,
  protocol,
  server,
)
from tf_strategies.process_group.rendezvous import rendezvous

_ELASTIC = {'min_workers': 2, 'window_seconds': 0.5}


def _formed(group):
  """Returns the view of a group, and a sum that shows that the group works."""
  total = group.all_reduce(np.int64([10**group.rank]))[0]
  tasks = [(m.rank, m.task, m.progress) for m in group.members]
  return group.generation, group.rank, tasks, int(total)


def _attempt(rank, per_rank):
  """Forms a group with options of each rank's own; or what prevents it."""
  options = per_rank.get(rank, {})
  started = time.monotonic()
  try:
    with (
      meetings.meet(rank, **options) as meeting,
      meeting.form(progress=100 * rank) as group,
    ):
      result = _formed(group)
      group.barrier()
      return result
  except errors.Error as e:
    return type(e).__name__, str(e), time.monotonic() - started


class FormTest(parameterized.TestCase):
  @tiers.parameters(tiers.soak(1), tiers.smoke(2), tiers.soak(5))
  def test_ranks_follow_tasks(self, count):
    results = processes.run_workers(_attempt, count, args=({},))
    tasks = [(r, r, 100 * r) for r in range(count)]
    for rank, result in enumerate(results):
      self.assertEqual(result, (1, rank, tasks, int('1' * count)))

  def test_missing_worker_is_named_on_every_other(self):
    options = {'rendezvous_timeout_seconds': 2.0}
    with processes.Workers(
      _attempt,
      2,
      args=({0: options, 1: options},),
      ports=processes.addresses(3),
    ) as workers:
      absent = workers.addresses[2]
      outcomes = workers.wait()
    for outcome in outcomes:
      self.assertEqual(outcome.error_text, '')
      kind, message, seconds = outcome.value
      self.assertEqual(kind, 'RendezvousError')
      self.assertIn(f'task 2 at {absent} (nobody listens there)', message)
      self.assertBetween(seconds, 1.9, 30)


class RefusalTest(parameterized.TestCase):
  @pytest.mark.smoke
  def test_other_secret_is_told_to_its_owner_and_stops_nobody(self):
    wrong = {'secret': b'another secret than the others have'}
    per_rank = {0: _ELASTIC, 1: _ELASTIC, 2: {**_ELASTIC, **wrong}}
    results = processes.run_workers(_attempt, 3, args=(per_rank,))
    for rank in (0, 1):
      self.assertEqual(results[rank][2], [(0, 0, 0), (1, 1, 100)])
    kind, message, seconds = results[2]
    self.assertEqual(kind, 'AuthenticationError')
    self.assertIn('TFS_SECRET', message)
    self.assertLess(seconds, 30)

  def test_task_that_sends_nonsense_is_named(self):
    addresses = dict(enumerate(processes.addresses(2)))
    options = process_group.GroupOptions(rendezvous_timeout_seconds=6.0)

    async def answer(link, request, message):
      link.send(protocol.Kind.HELLO, {})

    poll = authentication.Purpose.POLL
    handlers = {poll: (protocol.Kind.HELLO, answer)}
    other = server.Server(addresses[1], 1, options.credentials(), handlers)
    with (
      contextlib.closing(other),
      process_group.Rendezvous(addresses, 0, options) as meeting,
      self.assertRaisesRegex(
        errors.RendezvousError, 'task 1 at .*something else is there'
      ),
    ):
      meeting.form()


class ConstructorTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('bad_port', {0: '127.0.0.1:99999'}, 0, {}, errors.ClusterConfigError),
    ('no_task', {0: '127.0.0.1:0'}, 1, {}, errors.ClusterConfigError),
    (
      'same_address',
      {0: '127.0.0.1:5', 1: '127.0.0.1:5'},
      0,
      {},
      errors.ClusterConfigError,
    ),
    (
      'no_secret',
      {0: '127.0.0.1:0', 1: 'worker-1.example:2222'},
      0,
      {},
      errors.UnsupportedOptionError,
    ),
    (
      'too_many',
      {0: '127.0.0.1:0'},
      0,
      {'min_workers': 2},
      errors.UnsupportedOptionError,
    ),
    (
      'not_of_this_host',
      {0: '192.0.2.1:2222'},
      0,
      {'allow_unauthenticated': True},
      errors.RendezvousError,
    ),
  )
  def test_unusable(self, addresses, task, options, error):
    with self.assertRaises(error):
      process_group.Rendezvous(
        addresses, task, process_group.GroupOptions(**options)
      )

  def test_nothing_is_left_after_close(self):
    before = set(threading.enumerate())
    meeting = process_group.Rendezvous({0: '127.0.0.1:0'}, 0)
    group = meeting.form()
    meeting.close()
    self.assertEqual(set(threading.enumerate()), before)
    with self.assertRaisesRegex(errors.WorkerUnavailableError, 'has closed'):
      group.barrier()
    group.close()
    meeting.close()

  def test_second_process_of_a_task_is_told_so(self):
    [address] = processes.addresses(1)
    with (
      # Not of a group here: as another process has it.
      socket.create_server(('127.0.0.1', int(address.rpartition(':')[2]))),
      self.assertRaisesRegex(errors.RendezvousError, 'same task'),
    ):
      process_group.Rendezvous({3: address}, 3)
    # Closed, it gives the address back.
    process_group.Rendezvous({3: address}, 3).close()


def _let_in(rank, directory):
  """Runs until the worker that was started again has joined."""
  joined = []
  with meetings.meet(rank, **_ELASTIC) as meeting:
    group = meeting.form()
    seen = [group.world_size]
    meetings.touch(directory, f'{rank}.{group.generation}')
    while True:
      try:
        # Rank 0 decides for all: they see a joiner at different moments.
        now = np.array([len(group.pending_joiners())])
        if group.broadcast(now, 0)[0]:
          joined.append(group.pending_joiners())
        else:
          time.sleep(0.01)
          if len(seen) > 1 and group.world_size == 3:
            group.barrier()
            return seen, group.generation, joined
          continue
      except errors.WorkerUnavailableError:
        pass
      group = meeting.form()
      seen.append(group.world_size)
      meetings.touch(directory, f'{rank}.{group.generation}')


def _join(rank, directory):
  """The worker that is started again: its first group must be of three."""
  path = os.path.join(directory, 'restarted')
  if not os.path.exists(path):
    meetings.touch(directory, 'restarted')
    return _let_in(rank, directory)
  with meetings.meet(rank, **_ELASTIC) as meeting:
    group = meeting.form()
    if group.world_size != 3:
      raise AssertionError(f'{group.members}')
    group.broadcast(np.array([0]), 0)
    group.barrier()
    return [group.world_size], group.generation, []


def _worker(rank, directory, victim):
  function = _join if rank == victim else _let_in
  return function(rank, directory)


class AgainTest(parameterized.TestCase):
  @tiers.parameters(tiers.soak(0), tiers.smoke(2))
  def test_restarted_worker_joins_the_survivors(self, victim):
    directory = self.create_tempdir().full_path
    with processes.Workers(_worker, 3, args=(directory, victim)) as workers:
      for rank in range(3):
        meetings.wait_for(directory, f'{rank}.1')
      workers.kill(victim)
      survivors = [r for r in range(3) if r != victim]
      # The rest goes on without it, and lets it in when it is back.
      for rank in survivors:
        meetings.wait_for(directory, f'{rank}.2')
      workers.start(victim)
      outcomes = workers.wait()
    for outcome in outcomes:
      self.assertEqual(outcome.error_text, '')
    generations = {outcome.value[1] for outcome in outcomes}
    self.assertLen(generations, 1)
    for rank in survivors:
      seen = outcomes[rank].value[0]
      self.assertEqual(seen[:2], [3, 2])
      self.assertEqual(seen[-1], 3)
    # Rank 0 has heard of it; others may not have yet.
    self.assertIn((victim,), outcomes[survivors[0]].value[2])


class RivalGroupsTest(absltest.TestCase):
  """Runs in one process. A cut makes the connecting call raise."""

  def test_groups_that_meet_again_become_one(self):
    addresses = dict(enumerate(processes.addresses(2)))
    options = process_group.GroupOptions(
      min_workers=1, window_seconds=0.1, rendezvous_timeout_seconds=30.0
    )
    is_cut = threading.Event()
    is_cut.set()
    dial = connection.dial

    async def dial_unless_cut(*args):
      if is_cut.is_set():
        raise OSError('the network is cut')
      return await dial(*args)

    with contextlib.ExitStack() as stack:
      stack.enter_context(
        mock.patch.object(connection, 'dial', dial_unless_cut)
      )
      stack.enter_context(mock.patch.object(rendezvous, '_WATCH_SECONDS', 0.1))
      first, second = (
        stack.enter_context(process_group.Rendezvous(addresses, task, options))
        for task in addresses
      )
      groups = [first.form(), second.form()]
      self.assertEqual([g.world_size for g in groups], [1, 1])
      is_cut.clear()
      processes.wait_until(lambda: groups[1].failure is not None)
      # The half with the lowest task does not give way.
      self.assertIsNone(groups[0].failure)
      with self.assertRaisesRegex(errors.WorkerUnavailableError, 'gives way'):
        groups[1].barrier()
      formed = []
      waiting = threading.Thread(target=lambda: formed.append(second.form(7)))
      waiting.start()
      processes.wait_until(lambda: groups[0].pending_joiners() == (1,))
      formed.append(first.form(3))
      waiting.join(30)
      self.assertEqual([g.world_size for g in formed], [2, 2])
      self.assertEqual([m.progress for m in formed[0].members], [3, 7])


class LinksOnDemandTest(absltest.TestCase):
  """Runs in one process. A cut makes the connecting call raise."""

  def test_cut_that_a_collective_finds_is_left_out_of_the_next_group(self):
    addresses = dict(enumerate(processes.addresses(4)))
    options = process_group.GroupOptions(
      min_workers=2, window_seconds=0.5, rendezvous_timeout_seconds=30.0
    )
    dial = connection.dial

    async def dial_unless_cut(address, request, *args):
      is_data = request.purpose is authentication.Purpose.DATA
      if is_data and {request.client, request.server} == {0, 2}:
        raise TimeoutError('no way between them')
      return await dial(address, request, *args)

    def end_if_left_out():
      # It would wait for the others as long as they run.
      if left_out.is_set():
        raise TimeoutError

    def work(task):
      with process_group.Rendezvous(addresses, task, options) as meeting:
        first = meeting.form()
        neighbours = len(first._transport._arrived)
        try:
          # Along a tree, whose root all wait for.
          first.all_reduce(np.ones(8))
        except errors.WorkerUnavailableError as e:
          error = str(e)
        try:
          group = meeting.form(progress=1, check=end_if_left_out)
        except TimeoutError:
          return neighbours, error, None
        group.barrier()
        left_out.set()
        return neighbours, error, [m.task for m in group.members]

    left_out = threading.Event()
    with (
      mock.patch.object(connection, 'dial', dial_unless_cut),
      mock.patch.object(plan, 'FEW_RANKS', 1),
      futures.ThreadPoolExecutor(4) as threads,
    ):
      results = list(threads.map(work, addresses))
    self.assertEqual([neighbours for neighbours, *_ in results], [2] * 4)
    for _, error, _ in results:
      self.assertIn('no way between them', error)
    groups = [tasks for *_, tasks in results]
    self.assertEqual(groups, [[0, 1, 3], [0, 1, 3], None, [0, 1, 3]])


if __name__ == '__main__':
  absltest.main()
