"""How workers form groups, are refused, and form groups again."""

import contextlib
import copy
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
  protocol,
  server,
)
from tf_strategies.process_group.rendezvous import formation

_ELASTIC = {'min_workers': 2, 'window_seconds': 0.5}


def _formed(group):
  """Returns the members of a group, and a sum that shows that it works."""
  total = group.all_reduce(np.int64([10**group.rank]))[0]
  tasks = [(m.rank, m.task, m.progress) for m in group.members]
  return group.generation, group.rank, tasks, int(total)


def _attempt(rank, per_rank):
  """Forms a group with the options of this rank. Returns it or the error."""
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
  def test_ranks_are_in_order_of_tasks(self, count):
    results = processes.run_workers(_attempt, count, args=({},))
    tasks = [(r, r, 100 * r) for r in range(count)]
    for rank, result in enumerate(results):
      self.assertEqual(result, (1, rank, tasks, int('1' * count)))

  def test_missing_worker_is_named_on_every_rank(self):
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
  def test_worker_with_a_wrong_secret_fails_and_the_others_continue(self):
    wrong = {'secret': b'another secret than the others have'}
    per_rank = {0: _ELASTIC, 1: _ELASTIC, 2: {**_ELASTIC, **wrong}}
    results = processes.run_workers(_attempt, 3, args=(per_rank,))
    for rank in (0, 1):
      self.assertEqual(results[rank][2], [(0, 0, 0), (1, 1, 100)])
    kind, message, seconds = results[2]
    self.assertEqual(kind, 'AuthenticationError')
    self.assertIn('TFS_SECRET', message)
    self.assertLess(seconds, 30)

  def test_task_that_sends_an_invalid_message_is_named(self):
    addresses = dict(enumerate(processes.addresses(2)))
    options = process_group.GroupOptions(rendezvous_timeout_seconds=6.0)

    async def answer(link, request, message):
      link.send(protocol.Kind.HELLO, {})

    handlers = {protocol.Kind.HELLO: answer}
    other = server.Server(addresses[1], 1, options, handlers)
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
      'address_of_another_host',
      {0: '192.0.2.1:2222'},
      0,
      {'allow_unauthenticated': True},
      errors.RendezvousError,
    ),
  )
  def test_invalid_arguments_raise(self, addresses, task, options, error):
    with self.assertRaises(error):
      process_group.Rendezvous(
        addresses, task, process_group.GroupOptions(**options)
      )

  def test_close_ends_threads_and_groups(self):
    before = set(threading.enumerate())
    meeting = process_group.Rendezvous({0: '127.0.0.1:0'}, 0)
    group = meeting.form()
    meeting.close()
    self.assertEqual(set(threading.enumerate()), before)
    with self.assertRaisesRegex(errors.WorkerUnavailableError, 'has closed'):
      group.barrier()
    group.close()
    meeting.close()

  def test_second_process_of_a_task_is_refused(self):
    [address] = processes.addresses(1)
    with (
      # As if another process had the address.
      socket.create_server(('127.0.0.1', int(address.rpartition(':')[2]))),
      self.assertRaisesRegex(errors.RendezvousError, 'same task'),
    ):
      process_group.Rendezvous({3: address}, 3)
    # `close` releases the address.
    process_group.Rendezvous({3: address}, 3).close()


class LinksOnDemandTest(absltest.TestCase):
  """Runs in one process. A cut makes the connecting call raise."""

  def test_unreachable_worker_is_left_out_of_the_next_group(self):
    addresses = dict(enumerate(processes.addresses(4)))
    options = process_group.GroupOptions(
      min_workers=2, window_seconds=0.5, rendezvous_timeout_seconds=8.0
    )
    call = formation.Proposal._call

    async def fail_to_dial(task):
      raise TimeoutError('no route to the peer')

    async def call_unless_cut(links, rank):
      ends = links._members[links._rank], links._members[rank]
      if {end.task for end in ends} == {0, 2}:
        links = copy.copy(links)
        links._dial = fail_to_dial
      await call(links, rank)

    def work(task):
      with process_group.Rendezvous(addresses, task, options) as meeting:
        first = meeting.form()
        try:
          # Uses a tree, so that all ranks wait for its root.
          first.all_reduce(np.ones(8))
        except errors.WorkerUnavailableError as e:
          error = str(e)
        try:
          group = meeting.form(progress=1)
        except errors.RendezvousError:
          return error, None
        group.barrier()
        return error, [m.task for m in group.members]

    with (
      mock.patch.object(formation.Proposal, '_call', call_unless_cut),
      mock.patch.object(plan, 'FEW_RANKS', 1),
      futures.ThreadPoolExecutor(4) as threads,
    ):
      results = list(threads.map(work, addresses))
    messages, groups = zip(*results, strict=True)
    for error in messages:
      self.assertIn('no route to the peer', error)
    self.assertEqual(groups, ([0, 1, 3], [0, 1, 3], None, [0, 1, 3]))


if __name__ == '__main__':
  absltest.main()
