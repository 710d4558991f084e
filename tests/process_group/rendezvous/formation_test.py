"""A proposal alone: its messages over socket pairs, without an address."""

import asyncio
import socket

from absl.testing import absltest, parameterized

from tf_strategies.process_group import plan
from tf_strategies.process_group.network import (
  authentication,
  connection,
  protocol,
)
from tf_strategies.process_group.rendezvous import formation, membership

_Kind = protocol.Kind


class _Job:
  """Tasks that dial each other through socket pairs.

  Args:
    count: how many.
    objections: by task, why it declines.
    leaves: a task that hangs up when it is told to mesh.
    unreachable: a task to which others have no data links.
  """

  def __init__(self, count, objections=(), leaves=None, unreachable=None):
    self.seats = [
      membership.Seat(t, f'host-{t}:1', f'life {t}', 10 * t)
      for t in range(count)
    ]
    self.proposals = {}
    self.outcomes = []
    self._objections = dict(objections)
    self._leaves = leaves
    self._unreachable = unreachable

  async def dial(self, task, purpose):
    if purpose is authentication.Purpose.DATA and task == self._unreachable:
      raise TimeoutError('it does not answer')
    ends = socket.socketpair()
    for end in ends:
      end.setblocking(False)
    client, server = map(connection.Connection, ends)
    serve = {
      authentication.Purpose.CONTROL: self._follow,
      authentication.Purpose.DATA: self._accept_data,
    }[purpose]
    self.outcomes.append(asyncio.ensure_future(serve(task, server)))
    return client

  async def lead(self):
    leader = formation.Proposal(3, self.seats, 0, self.dial)
    self.proposals[0] = leader
    try:
      await leader.lead()
    finally:
      self.outcomes = await asyncio.gather(
        *self.outcomes, return_exceptions=True
      )

  async def _follow(self, task, link):
    _, message = await link.expect(_Kind.PROPOSE)
    if task in self._objections:
      link.send(_Kind.REJECT, self._objections[task])
      link.close()
      return
    if task == self._leaves:
      link.send(_Kind.ACCEPT)
      await link.expect(_Kind.MESH)
      link.close()
      return
    seats = [membership.Seat(**seat) for seat in message['seats']]
    proposal = formation.Proposal(message['generation'], seats, task, self.dial)
    self.proposals[task] = proposal
    await proposal.follow(link)

  async def _accept_data(self, task, link):
    _, message = await link.expect(_Kind.JOIN)
    self.proposals[task].mesh.accept(link, message)


class ProposalTest(parameterized.TestCase):
  @parameterized.parameters(1, 2, 5, 11)
  def test_all_links_are_there(self, count):
    job = _Job(count)
    asyncio.run(job.lead())
    self.assertLen(job.proposals, count)
    for task, proposal in job.proposals.items():
      others = {rank for rank in range(count) if rank != task}
      if count > plan.FEW_RANKS:
        others = {(task - 1) % count, (task + 1) % count}
      self.assertEqual(proposal.generation, 3)
      self.assertEqual(set(proposal.mesh.sockets), others)
      self.assertEqual(
        [m.progress for m in proposal.members()], [10 * t for t in range(count)]
      )
      proposal.close()

  def test_one_that_declines_is_named_and_nothing_is_left(self):
    job = _Job(3, objections={2: 'it is running'})
    with self.assertRaisesRegex(
      formation.ProposalFailedError, 'task 2 declined: it is running'
    ):
      asyncio.run(job.lead())
    self.assert_closed(job)

  def test_one_that_leaves_ends_it_for_all(self):
    job = _Job(3, leaves=1)
    with self.assertRaises(formation.ProposalFailedError):
      asyncio.run(job.lead())
    self.assert_closed(job)
    self.assertTrue(
      any(isinstance(o, formation.ProposalFailedError) for o in job.outcomes)
    )

  def test_pair_that_cannot_connect_is_told_to_the_leader(self):
    job = _Job(3, unreachable=1)
    with self.assertRaises(formation.ProposalFailedError) as raised:
      asyncio.run(job.lead())
    caller, called, why, _ = raised.exception.cut
    self.assertIn(caller, (0, 2))
    self.assertEqual((called, why), (1, 'it does not answer'))
    self.assert_closed(job)

  def assert_closed(self, job):
    for proposal in job.proposals.values():
      for link in proposal.connections.values():
        self.assertEqual(link.detach().fileno(), -1)
      for sock in proposal.mesh.sockets.values():
        self.assertEqual(sock.fileno(), -1)


if __name__ == '__main__':
  absltest.main()
