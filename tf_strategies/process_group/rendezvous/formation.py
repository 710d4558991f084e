"""Connects the members of a proposed group: all first links, or none of them.

The leader proposes, the members accept, each connects its first data links and
reports, and the leader commits. If a step fails, all links are closed and the
workers poll each other again. The connections that carry the proposal become the
control plane.
"""

from collections.abc import Sequence

from tf_strategies.process_group import state
from tf_strategies.process_group.network import connection as connection_lib
from tf_strategies.process_group.network import protocol
from tf_strategies.process_group.rendezvous import membership
from tf_strategies.process_group.tcp import mesh as mesh_lib
from tf_strategies.process_group.tcp import transport

_Kind = protocol.Kind
# A step takes milliseconds, and a worker that dies closes its connections. Only a
# stopped worker takes this long.
STEP_SECONDS = 20.0


class Proposal:
  """A group in the making, seen by one member.

  Attributes:
    seated: the task of each rank, in order, and its incarnation.
    state: state of the group.
    transport: its data links.
    mesh: makes the data links.
    connections: connections of the control plane by rank.
  """

  def __init__(
    self,
    generation: int,
    seats: Sequence[membership.Seat],
    task: int,
    dial: mesh_lib.Dial,
    on_cut: mesh_lib.OnCut,
    gone: Sequence[int],
  ):
    self._gone = gone
    self._seats = seats
    self.seated = {seat.task: seat.incarnation for seat in seats}
    rank = list(self.seated).index(task)
    members = [
      state.Member(r, seat.task, seat.address, seat.progress)
      for r, seat in enumerate(seats)
    ]
    self.state = state.GroupState(members, rank, generation)
    self.transport = transport.Transport(self.state.check)
    self.connections: dict[int, connection_lib.Connection] = {}
    self._dial = dial
    self.mesh = mesh_lib.Mesh(
      generation, rank, self.seated, dial, on_cut, self.transport.add
    )

  async def lead(self) -> None:
    """Does the leader's part; raises if a member does not take part."""
    invitations = map(self._invite, range(1, len(self._seats)))
    await connection_lib.together(invitations, STEP_SECONDS)
    self._tell(_Kind.MESH)
    ready = [c.expect(_Kind.READY) for c in self.connections.values()]
    await connection_lib.together(
      [self.mesh.connect_first(), *ready], STEP_SECONDS
    )
    self._tell(_Kind.COMMIT)

  async def follow(self, leader: connection_lib.Connection) -> None:
    """Does a member's part; raises if another member gives up."""
    self.connections[0] = leader
    leader.send(_Kind.ACCEPT)
    await connection_lib.within(STEP_SECONDS, leader.expect(_Kind.MESH))
    # Both at once: the leader may die before the mesh is complete.
    await connection_lib.together(
      [self._mesh(leader), leader.expect(_Kind.COMMIT)], STEP_SECONDS
    )

  def close(self) -> None:
    """Closes all links."""
    self.transport.shut_down()
    self.transport.close()
    for connection in self.connections.values():
      connection.close()

  async def _invite(self, rank: int) -> None:
    connection = await mesh_lib.dial_again(self._dial, self._seats[rank].task)
    self.connections[rank] = connection
    message = {
      'generation': self.state.generation,
      'seats': self._seats,
      'gone': self._gone,
    }
    connection.send(_Kind.PROPOSE, message)
    kind, reason = await connection.expect(_Kind.ACCEPT, _Kind.REJECT)
    if kind is _Kind.REJECT:
      raise protocol.ProtocolError(
        f'task {self._seats[rank].task} declined: {reason}'
      )

  def _tell(self, kind: protocol.Kind) -> None:
    for connection in self.connections.values():
      connection.send(kind)

  async def _mesh(self, leader: connection_lib.Connection) -> None:
    await self.mesh.connect_first()
    leader.send(_Kind.READY)
