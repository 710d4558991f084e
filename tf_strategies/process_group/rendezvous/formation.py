"""Connects the members of a proposed group: all first links, or none of them.

The leader proposes, the members accept, each connects its first data links and
reports, and the leader commits. If a step fails, all links are closed and the
workers poll each other again. The connections that carry the proposal become the
control plane.

A few ranks all have data links to each other from the start. Among many ranks each has
links to its neighbours in the ring, and a collective that needs another link has it made.
The rank that needs a link dials; if both do, the call of the higher rank counts.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from tf_strategies.process_group import execution, plan, state
from tf_strategies.process_group.network import connection as connection_lib
from tf_strategies.process_group.network import protocol
from tf_strategies.process_group.rendezvous import membership
from tf_strategies.process_group.tcp import transport

_Kind = protocol.Kind
# A step takes milliseconds, and a worker that dies closes its connections. Only a
# stopped worker takes this long.
STEP_SECONDS = 20.0


class Proposal:
  """A group in the making, seen by one member; later it makes further data links.

  It works in the event loop.

  Args:
    generation: generation of the group.
    members: the members by rank.
    table: what this process knows of the tasks.
    dial: function that connects to a task.

  Attributes:
    seated: the task of each rank, in order, and its incarnation.
    state: state of the group.
    transport: its data links.
    connections: connections of the control plane by rank.
  """

  def __init__(
    self,
    generation: int,
    members: Sequence[state.Member],
    table: membership.MembershipTable,
    dial: Callable[[int], Awaitable[connection_lib.Connection]],
  ):
    self._table = table
    self._members = members
    self.seated = {member.task: member.incarnation for member in members}
    self._rank = list(self.seated).index(table.task)
    self.state = state.GroupState(members, self._rank, generation)
    self.transport = transport.Transport(self.state.check)
    self.connections: dict[int, connection_lib.Connection] = {}
    self._dial = dial
    # By rank: set once there is a link. Before, this rank has dialled.
    self._linked: dict[int, asyncio.Event] = {}

  async def lead(self) -> None:
    """Does the leader's part; raises if a member does not take part."""
    invitations = map(self._invite, range(1, len(self._members)))
    await connection_lib.together(invitations, STEP_SECONDS)
    self._tell(_Kind.MESH)
    ready = [c.expect(_Kind.READY) for c in self.connections.values()]
    await connection_lib.together([self._connect_first(), *ready], STEP_SECONDS)
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
    connection = await self._dial_again(rank)
    self.connections[rank] = connection
    message = {
      'generation': self.state.generation,
      'members': self._members,
      'gone': self._table.gone(),
    }
    connection.send(_Kind.PROPOSE, message)
    kind, reason = await connection.expect(_Kind.ACCEPT, _Kind.REJECT)
    if kind is _Kind.REJECT:
      raise protocol.ProtocolError(
        f'task {self._members[rank].task} declined: {reason}'
      )

  def _tell(self, kind: protocol.Kind) -> None:
    for connection in self.connections.values():
      connection.send(kind)

  async def _mesh(self, leader: connection_lib.Connection) -> None:
    await self._connect_first()
    leader.send(_Kind.READY)

  async def _connect_first(self) -> None:
    """Makes the links that are there from the start; raises as `connect`."""
    size, rank = len(self._members), self._rank
    peers = [(rank - 1) % size, (rank + 1) % size]
    if size <= plan.FEW_RANKS:
      peers = [r for r in range(size) if r != rank]
    await self.connect(peers)

  async def connect(self, ranks: Iterable[int]) -> None:
    """Returns when there is a link to each; LinkClosedError if one cannot be made."""
    await connection_lib.together(map(self._connect, ranks))

  def accept(
    self, connection: connection_lib.Connection, message: Sequence[Any]
  ) -> None:
    """Takes the link of a peer; ProtocolError if it is of another group."""
    generation, about = message
    peer = state.Member(*about)
    if generation != self.state.generation or peer not in self._members:
      raise protocol.ProtocolError('a data link belongs to another group')
    linked = self._linked.get(peer.rank)
    if linked and (linked.is_set() or peer.rank < self._rank):
      connection.send(_Kind.REJECT, 'there is a link, or it is being made')
      connection.close()
      return
    connection.send(_Kind.ACCEPT)
    self._add(peer.rank, connection)

  async def _connect(self, rank: int) -> None:
    if rank not in self._linked:
      self._linked[rank] = asyncio.Event()
      await self._call(rank)
    # The peer's own call may be the one that counts.
    await self._linked[rank].wait()

  async def _call(self, rank: int) -> None:
    message = [self.state.generation, self._members[self._rank]]
    kind, connection = None, None
    try:
      connection = await self._dial_again(rank)
      connection.send(_Kind.JOIN, message)
      kind, _ = await connection_lib.within(
        connection_lib.HANDSHAKE_SECONDS,
        connection.expect(_Kind.ACCEPT, _Kind.REJECT),
      )
    except (OSError, protocol.ProtocolError) as e:
      why = str(e) or type(e).__name__
      peer = self._members[rank]
      now = asyncio.get_running_loop().time()
      self._table.note_cut(peer.task, peer.incarnation, why, now)
      raise execution.LinkClosedError(rank, why) from e
    finally:
      if connection is not None and kind is not _Kind.ACCEPT:
        connection.close()
    if kind is _Kind.ACCEPT:
      self._add(rank, connection)

  def _add(self, rank: int, connection: connection_lib.Connection) -> None:
    self._linked.setdefault(rank, asyncio.Event()).set()
    self.transport.add(rank, connection.sock)

  async def _dial_again(self, rank: int) -> connection_lib.Connection:
    """Dials twice: with many workers one lost connection is no surprise."""
    task = self._members[rank].task
    try:
      return await self._dial(task)
    except ConnectionRefusedError:
      raise
    except OSError:
      return await self._dial(task)
