"""Links from another group, and links that arrive late."""

import asyncio
import socket
from concurrent import futures
from unittest import mock

from absl.testing import absltest, parameterized

from tf_strategies import errors
from tf_strategies.process_group import execution, group, options, state
from tf_strategies.process_group.network import protocol
from tf_strategies.process_group.rendezvous import formation
from tf_strategies.process_group.tcp import transport

_MEMBERS = [
  state.Member(rank, rank, f'host-{rank}:1', 0, f'life {rank}')
  for rank in range(2)
]
_MESSAGE = 7, _MEMBERS[1]


def _proposal(dial=None):
  return formation.Proposal(7, _MEMBERS, mock.Mock(task=0), dial)


class LinksTest(parameterized.TestCase):
  def test_failed_connection_is_retried_once_and_then_reported(self):
    dial = mock.AsyncMock(side_effect=TimeoutError('it does not answer'))
    links = _proposal(dial)
    with self.assertRaises(execution.LinkClosedError) as raised:
      asyncio.run(links.connect([1]))
    self.assertEqual(raised.exception.rank, 1)
    self.assertEqual(dial.await_count, 2)
    cut = links._table.note_cut.call_args.args
    self.assertEqual(cut[:3], (1, 'life 1', 'it does not answer'))

  @parameterized.parameters((6, 'life 1'), (7, 'before'))
  def test_link_of_another_group_is_refused(self, generation, life):
    links, peer = _proposal(), _MEMBERS[1]._replace(incarnation=life)
    with self.assertRaises(protocol.ProtocolError):
      links.accept(mock.Mock(), (generation, peer))

  def test_second_link_of_a_pair_is_refused(self):
    first, second = mock.Mock(), mock.Mock()
    links = _proposal()
    links.transport = mock.Mock()
    for link in (first, second):
      links.accept(link, _MESSAGE)
    links.transport.add.assert_called_once_with(1, first.sock)
    self.assertEqual(second.send.call_args.args[0], protocol.Kind.REJECT)
    second.close.assert_called_once_with()


class GroupTest(absltest.TestCase):
  def test_late_link_is_closed_if_the_group_has_failed(self):
    shared = state.GroupState(_MEMBERS, 0, 1)
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
