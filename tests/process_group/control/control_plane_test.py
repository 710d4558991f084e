"""Which rank everybody names when several are gone, one after the other.

The clock and the sockets are simulated, the control plane is the package's own: see
`simulated_network`.
"""

import asyncio
import random
import socket
import types

from absl.testing import absltest, parameterized

from tests.process_group import simulated_network
from tf_strategies import process_group
from tf_strategies.process_group import state
from tf_strategies.process_group.control import control_plane
from tf_strategies.process_group.network import connection, protocol

_SEED = 20261124
# More than a message takes; far less than a heartbeat.
_APART_SECONDS = 0.02


async def _leave_once_failed(process):
  """Leaves once a collective has failed, as a program that ends does."""
  while process.group._state.failure is None:
    await asyncio.sleep(0.001)
  named = process.group._state.failure.rank
  await process.leave()
  return named


async def _be_gone(count, victims, how):
  """Ranks are gone in this order; whom each of the other ranks names, and why."""
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
      # The others among them are in a collective that needs the first, and leave as
      # soon as they hear that it has left. Nobody else has come there yet.
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


class SeveralTest(parameterized.TestCase):
  @parameterized.product(how=('leave', 'kill'), count=(6, 40))
  def test_all_name_the_first(self, how, count):
    rng = random.Random(f'{_SEED} {how} {count}')
    victims = rng.sample(range(1, count), 4)
    named, told = simulated_network.run(_be_gone, count, victims, how)
    self.assertEqual(set(named), {victims[0]}, victims)
    why = 'left the group' if how == 'leave' else 'died'
    for message in told:
      self.assertStartsWith(message, f'Rank {victims[0]} (task {victims[0]} at')
      self.assertIn(why, message)

  @parameterized.parameters(
    # Of rank 0 alone only those hear that wait for it.
    ([4, 0], {4}),
    ([0, 4], {0, None}),
  )
  def test_rank_0_is_named_if_it_is_the_first(self, victims, expected):
    named, told = simulated_network.run(_be_gone, 6, victims, 'leave')
    self.assertEqual(set(named), expected)
    for message in told:
      self.assertIn('left the group', message)


class NonsenseTest(parameterized.TestCase):
  """What a member sends that does not fit: the group goes on, or names it."""

  async def send(self, rank, frame):
    """Returns the failure of the group of `rank` after its peer has sent a frame."""
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
    plane.start()
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
  def test_sender_is_named(self, rank, kind, message):
    frame = protocol.pack(kind, message)
    failure = asyncio.run(asyncio.wait_for(self.send(rank, frame), 60))
    self.assertEqual(failure.rank, 1 - rank)


if __name__ == '__main__':
  absltest.main()
