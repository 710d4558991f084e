"""Links that come from another group, or too late."""

import socket
from concurrent import futures
from unittest import mock

from absl.testing import absltest, parameterized

from tf_strategies import errors
from tf_strategies.process_group import group, options, state
from tf_strategies.process_group.network import protocol
from tf_strategies.process_group.tcp import mesh, transport


class MeshTest(parameterized.TestCase):
  @parameterized.parameters(
    {'generation': 6}, {'incarnation': 'before'}, {'rank': 9}
  )
  def test_link_of_another_group_is_refused(self, **change):
    message = {'rank': 1, 'generation': 7, 'incarnation': 'life 1', **change}
    lives = {rank: f'life {rank}' for rank in range(2)}
    links = mesh.Mesh(7, 0, lives, mock.Mock(), mock.Mock(), mock.Mock())
    with self.assertRaises(protocol.ProtocolError):
      links.accept(mock.Mock(), message)


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
