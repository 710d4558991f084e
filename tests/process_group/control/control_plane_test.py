"""All ranks report the same failed rank, also if several fail one after another.

The clock and the sockets are simulated. The control plane is the real one: see
`simulated_network`.
"""

import asyncio
import concurrent.futures
import random
import socket
import types

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from tests import processes, tiers
from tests.process_group import meetings, simulated_network
from tf_strategies import errors, process_group
from tf_strategies.cluster import workers
from tf_strategies.process_group import state
from tf_strategies.process_group.control import control_plane
from tf_strategies.process_group.network import connection, protocol

_SEED = 20261124
# Longer than a message takes, and far shorter than a heartbeat.
_APART_SECONDS = 0.02


async def _leave_once_failed(process):
  """Leaves once a collective has failed, like a program that ends."""
  while process.group._state.failure is None:
    await asyncio.sleep(0.001)
  named = process.group._state.failure.rank
  await process.leave()
  return named


async def _remove(count, victims, how):
  """Removes ranks in order. Returns the ranks that the others report, and messages."""
  options = process_group.GroupOptions(
    secret=b'of a simulated job', rendezvous_timeout_seconds=60.0
  )
  with simulated_network.Network(count, _SEED) as network:
    processes = [
      simulated_network.Process(network, task, options)
      for task in network.addresses
    ]
    await asyncio.gather(*(p.spawn(p.form) for p in processes))
    by_rank = {p.group.rank: p for p in processes}
    if how == 'kill':
      for rank in victims:
        by_rank[rank].kill()
        await asyncio.sleep(_APART_SECONDS)
      named = []
    else:
      # The other victims are in a collective that needs the first one, and leave as
      # soon as it has left. The remaining ranks have not entered the collective.
      first, *others = victims
      for rank in others:
        by_rank[rank].group._state.begin('all_reduce', 'gradient')
      leaving = [
        asyncio.ensure_future(_leave_once_failed(by_rank[rank]))
        for rank in others
      ]
      await by_rank[first].leave()
      named = await asyncio.wait_for(asyncio.gather(*leaving), 60)
    await asyncio.sleep(1.0)
    failures = [
      process.group._state.failure
      for rank, process in by_rank.items()
      if rank not in victims
    ]
    return named + [f and f.rank for f in failures], [
      f.message for f in failures if f
    ]


class SeveralFailuresTest(parameterized.TestCase):
  @parameterized.product(how=('leave', 'kill'), count=(6, 40))
  def test_all_ranks_report_the_first_failure(self, how, count):
    rng = random.Random(f'{_SEED} {how} {count}')
    victims = rng.sample(range(1, count), 4)
    named, messages = simulated_network.run(_remove, count, victims, how)
    self.assertEqual(set(named), {victims[0]}, victims)
    why = 'left the group' if how == 'leave' else 'died'
    for message in messages:
      self.assertStartsWith(message, f'Rank {victims[0]} (task {victims[0]} at')
      self.assertIn(why, message)

  @parameterized.parameters(
    # Only ranks that wait for rank 0 learn that it has left.
    ([4, 0], {4}),
    ([0, 4], {0, None}),
  )
  def test_rank_0_is_reported_if_it_leaves_first(self, victims, expected):
    named, messages = simulated_network.run(_remove, 6, victims, 'leave')
    self.assertEqual(set(named), expected)
    for message in messages:
      self.assertIn('left the group', message)


class InvalidMessagesTest(parameterized.TestCase):
  """Unexpected or malformed messages of a member."""

  async def send(self, rank, frame):
    """Returns the failure that `rank` sees after its peer has sent a frame."""
    ends = socket.socketpair()
    for end in ends:
      end.setblocking(False)
    ours, theirs = map(connection.Connection, ends)
    members = [state.Member(r, r, f'host-{r}:1') for r in range(3)]
    shared, loop = (
      state.GroupState(members, rank, 1),
      asyncio.get_running_loop(),
    )
    host = types.SimpleNamespace(
      loop=loop, now=loop.time, spawn=loop.create_task
    )
    plane = control_plane.ControlPlane(
      host, shared, {1 - rank: ours}, process_group.GroupOptions()
    )
    theirs.write(frame)
    theirs.sock.shutdown(socket.SHUT_WR)
    while shared.failure is None and not shared.departed:
      await asyncio.sleep(0)
    await plane._close(has_ended=False)
    theirs.close()
    return shared.failure

  @parameterized.product(
    rank=(0, 1),
    kind=tuple(protocol.Kind),
    message=(None, 7, 'x', [[]], {}, {'rank': -1, 'payload': None}),
  )
  def test_failure_names_the_sender(self, rank, kind, message):
    frame = protocol.pack(kind, message)
    failure = asyncio.run(asyncio.wait_for(self.send(rank, frame), 60))
    self.assertEqual(failure.rank, 1 - rank)


def _exchange_many(rank):
  """Exchanges tags in threads, in a different order on each rank."""
  with meetings.meet(rank) as meeting, meeting.form() as group:
    tags = [f'tag {i}' for i in range(40)]
    tags = tags[rank * 7 :] + tags[: rank * 7]
    # Each thread waits for the other ranks, so all tags must be open at once.
    with concurrent.futures.ThreadPoolExecutor(len(tags)) as pool:
      futures = {
        tag: pool.submit(group.exchange, tag, f'{rank} {tag}') for tag in tags
      }
      sums = [
        group.all_reduce(np.int64([rank + i]), name=f'{i}')[0]
        for i in range(50)
      ]
    results = {tag: future.result() for tag, future in futures.items()}
    # Each backslash takes four bytes in a frame.
    large = group.exchange('large', f'{rank}' + '\\' * ((1 << 19) - 2))
    group.barrier()
    return results, sums, [(len(p), p[0]) for p in large]


def _agreements(rank):
  with meetings.meet(rank) as meeting, meeting.form() as group:

    def agree(value, what):
      workers.check_same(group.exchange(what, value), what, 'use one value')

    agree({'b': 1, 'a': [1.5, None]}, 'settings')
    try:
      agree(64 if rank else 32, 'global_batch_size')
    except errors.CollectiveMismatchError as e:
      mismatch = str(e), e.ranks
    # The group still works.
    total = group.all_reduce(np.int64([rank]))[0]
    group.barrier()
    return mismatch, total


def _alone(rank):
  options = {'collective_timeout_seconds': 1.0}
  with meetings.meet(rank, **options) as meeting, meeting.form() as group:
    try:
      if rank == 1:
        processes.wait_until(lambda: group.failure is not None)
        raise group.failure
      group.exchange('meeting', None)
    except errors.CollectiveTimeoutError as e:
      return str(e), e.rank, e.tensor


class ExchangeTest(parameterized.TestCase):
  @tiers.parameters(tiers.soak(1), 2, tiers.soak(4))
  def test_exchanges_are_matched_by_tag_in_any_order(self, world_size):
    results = processes.run_workers(_exchange_many, world_size)
    for payloads, sums, large in results:
      for tag, got in payloads.items():
        self.assertEqual(got, [f'{r} {tag}' for r in range(world_size)])
      ranks = sum(range(world_size))
      self.assertEqual(sums, [ranks + world_size * i for i in range(50)])
      length = (1 << 19) - 1
      self.assertEqual(large, [(length, f'{r}') for r in range(world_size)])

  @pytest.mark.smoke
  def test_disagreement_names_the_option_the_ranks_and_values(self):
    for (message, ranks), total in processes.run_workers(_agreements, 3):
      self.assertEqual(ranks, (1, 2))
      self.assertIn('global_batch_size', message)
      self.assertIn('rank 0 has 32', message)
      self.assertIn('rank 2 has 64', message)
      self.assertEqual(total, 3)

  def test_missing_rank_is_named_on_every_rank(self):
    for message, rank, tag in processes.run_workers(_alone, 3):
      self.assertEqual((rank, tag), (1, 'meeting'))
      self.assertIn("exchange 'meeting' did not finish within 1 s", message)
      self.assertIn('rank 1 (task 1 at ', message)


if __name__ == '__main__':
  absltest.main()
