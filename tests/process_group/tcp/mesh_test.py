"""Links that ranks make on demand, over socket pairs with delays."""

import asyncio
import socket
from concurrent import futures
from unittest import mock

from absl.testing import absltest, parameterized

from tf_strategies import errors
from tf_strategies.process_group import execution, group, options, state
from tf_strategies.process_group.network import connection, protocol
from tf_strategies.process_group.tcp import mesh, transport

_Kind = protocol.Kind


class _Ranks:
  """Meshes that reach each other; a dial and its acceptance take a while."""

  def __init__(self, count, delay=lambda caller, called: 0.0, broken=()):
    self._delay, self._broken, self._tasks = delay, set(broken), set()
    lives = {rank: f'life {rank}' for rank in range(count)}
    self.dials = []
    self.cuts = []
    self.sockets = [{} for _ in range(count)]
    self.meshes = [
      mesh.Mesh(
        7, rank, lives, self._dial_of(rank), self._on_cut, ends.__setitem__
      )
      for rank, ends in enumerate(self.sockets)
    ]

  def _on_cut(self, *cut):
    self.cuts.append(cut)

  def _dial_of(self, caller):
    async def dial(called, purpose):
      self.dials.append((caller, called))
      await asyncio.sleep(self._delay(caller, called))
      if (caller, called) in self._broken:
        raise TimeoutError('it does not answer')
      ends = socket.socketpair()
      for end in ends:
        end.setblocking(False)
      client, server = map(connection.Connection, ends)
      task = asyncio.ensure_future(self._serve(caller, called, server))
      self._tasks.add(task)
      return client

    return dial

  async def _serve(self, caller, called, link):
    await asyncio.sleep(self._delay(called, caller))
    _, message = await link.expect(_Kind.JOIN)
    self.meshes[called].accept(link, message)

  async def settle(self):
    await asyncio.gather(*self._tasks)
    for ends in self.sockets:
      for end in ends.values():
        end.close()


class MeshTest(parameterized.TestCase):
  @parameterized.product(
    first=(0, 1), apart=(0.0, 0.02, 0.04), slow=(0.0, 0.02)
  )
  def test_both_may_dial_and_share_one_link(self, first, apart, slow):
    async def meet():
      ranks = _Ranks(2, lambda caller, called: 0.01 + slow * caller)

      async def connect(rank):
        await asyncio.sleep(0 if rank == first else apart)
        await ranks.meshes[rank].connect([1 - rank])

      await asyncio.wait_for(asyncio.gather(connect(0), connect(1)), 5)
      one, other = (ends[1 - r] for r, ends in enumerate(ranks.sockets))
      one.sendall(b'?')
      result = other.recv(1) == b'?'
      await ranks.settle()
      return result

    self.assertTrue(asyncio.run(meet()))

  def test_lost_call_is_repeated_once_and_then_named(self):
    async def meet():
      ranks = _Ranks(2, broken=[(0, 1)])
      with self.assertRaises(execution.LinkClosedError) as raised:
        await ranks.meshes[0].connect([1])
      self.assertEqual(raised.exception.rank, 1)
      return ranks.cuts, ranks.dials

    cuts, dials = asyncio.run(meet())
    self.assertEqual(cuts, [(1, 'life 1', 'it does not answer')])
    self.assertEqual(dials, [(0, 1), (0, 1)])

  @parameterized.parameters(
    {'generation': 6}, {'incarnation': 'before'}, {'rank': 9}
  )
  def test_link_of_another_group_is_refused(self, **change):
    message = {'rank': 1, 'generation': 7, 'incarnation': 'life 1', **change}

    async def accept():
      _Ranks(2).meshes[0].accept(None, message)

    with self.assertRaises(protocol.ProtocolError):
      asyncio.run(accept())


class GroupTest(absltest.TestCase):
  def test_links_that_come_when_the_group_has_failed(self):
    members = [state.Member(r, r, f'host-{r}:1') for r in range(2)]
    shared = state.GroupState(members, 0, 1)
    links = transport.Transport(shared.check)
    shared.on_failure(links.shut_down)
    mine, other = socket.socketpair()

    def connect(ranks):
      self.assertEqual(ranks, {1})
      shared.fail(shared.left(1))
      links.add(1, mine)
      made = futures.Future()
      made.set_result(None)
      return made

    one = group.ProcessGroup(
      shared, links, mock.Mock(), options.GroupOptions(), connect
    )
    with self.assertRaisesRegex(errors.WorkerUnavailableError, 'left'):
      one.barrier()
    self.assertEqual(mine.fileno(), -1)
    other.close()


if __name__ == '__main__':
  absltest.main()
