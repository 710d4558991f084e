"""Connects the members of a proposed group: all first links, or none of them.

The leader proposes, the members accept, each connects its first data links and
reports, and the leader commits. If a step fails, all links are closed and the
workers poll each other again. The connections that carry the proposal become the
control plane.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from tf_strategies.process_group import state
from tf_strategies.process_group.network import authentication, protocol
from tf_strategies.process_group.network import connection as connection_lib
from tf_strategies.process_group.rendezvous import membership
from tf_strategies.process_group.tcp import mesh as mesh_lib

_Kind = protocol.Kind
# A step takes milliseconds, and a worker that dies closes its connections: only
# one that is stopped takes so long.
STEP_SECONDS = 20.0


class ProposalFailedError(Exception):
  """A proposal failed; internal.

  Attributes:
    cut: the two tasks that cannot connect, and why, if that is the reason.
  """

  cut: tuple[int, int, str] | None = None


class Proposal:
  """A group in the making, seen by one member."""

  def __init__(
    self,
    generation: int,
    seats: Sequence[membership.Seat],
    task: int,
    dial: mesh_lib.Dial,
    gone: Sequence[int] = (),
  ):
    self.generation = generation
    self._gone = list(gone)
    self.seats = tuple(seats)
    self.rank = [seat.task for seat in seats].index(task)
    self.connections: dict[int, connection_lib.Connection] = {}
    self._dial = dial
    self.mesh = mesh_lib.Mesh(
      generation,
      self.rank,
      [seat.task for seat in seats],
      [seat.incarnation for seat in seats],
      dial,
    )

  def members(self) -> tuple[state.Member, ...]:
    """The seats as members."""
    return tuple(
      state.Member(rank, seat.task, seat.address, seat.progress)
      for rank, seat in enumerate(self.seats)
    )

  async def lead(self) -> None:
    """The leader's part; ProposalFailedError if a member did not take part."""
    try:
      await together(self._invite(rank) for rank in range(1, len(self.seats)))
      self._tell(_Kind.MESH)
      await together(
        [
          self._connect_first(),
          *(self._ready(*found) for found in self.connections.items()),
        ]
      )
      self._tell(_Kind.COMMIT)
    except BaseException:
      self.close()
      raise

  async def follow(self, leader: connection_lib.Connection) -> None:
    """A member's part; ProposalFailedError if another one gave up."""
    self.connections[0] = leader
    try:
      leader.send(_Kind.ACCEPT)
      await together([leader.expect(_Kind.MESH)])
      # Both at once: the leader may die before the mesh is complete.
      await together([self._mesh(leader), leader.expect(_Kind.COMMIT)])
    except BaseException as e:
      if isinstance(e, ProposalFailedError) and e.cut is not None:
        _, task, why, age = e.cut
        leader.send(_Kind.CUT, {'task': task, 'why': why, 'age': age})
      self.close()
      raise

  def close(self) -> None:
    """Closes all links."""
    self.mesh.close()
    for connection in self.connections.values():
      connection.close()

  async def _invite(self, rank: int) -> None:
    connection = await mesh_lib.dial_again(
      self._dial, self.seats[rank].task, authentication.Purpose.CONTROL
    )
    self.connections[rank] = connection
    message = {
      'generation': self.generation,
      'seats': [dataclasses.asdict(seat) for seat in self.seats],
      'gone': self._gone,
    }
    connection.send(_Kind.PROPOSE, message)
    kind, reason = await connection.expect(
      _Kind.ACCEPT, _Kind.REJECT, _Kind.CUT
    )
    if kind is _Kind.CUT:
      raise _cut(self.seats[rank].task, **reason)
    if kind is _Kind.REJECT:
      raise ProposalFailedError(
        f'task {self.seats[rank].task} declined: {reason}'
      )

  async def _ready(
    self, rank: int, connection: connection_lib.Connection
  ) -> None:
    kind, message = await connection.expect(_Kind.READY, _Kind.CUT)
    if kind is _Kind.CUT:
      raise _cut(self.seats[rank].task, **message)

  def _tell(self, kind: protocol.Kind) -> None:
    for connection in self.connections.values():
      connection.send(kind)

  async def _mesh(self, leader: connection_lib.Connection) -> None:
    await self._connect_first()
    leader.send(_Kind.READY)

  async def _connect_first(self) -> None:
    try:
      await self.mesh.connect(self.mesh.first_peers())
    except mesh_lib.LinkError as e:
      called = self.seats[e.rank].task
      raise _cut(self.seats[self.rank].task, called, e.why) from e


def _cut(caller: int, task: int, why: str, age: int = 0) -> ProposalFailedError:
  """That a task could not connect to another, so many seconds ago."""
  error = ProposalFailedError(
    f'task {caller} cannot connect to task {task}: {why}'
  )
  error.cut = caller, task, why, age
  return error


async def together(coroutines: Iterable[Awaitable[Any]]) -> None:
  """Runs coroutines at once; ProposalFailedError if one fails or is too slow."""
  tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
  if not tasks:
    return
  try:
    done, pending = await asyncio.wait(
      tasks, timeout=STEP_SECONDS, return_when=asyncio.FIRST_EXCEPTION
    )
    for task in done:
      error = task.exception()
      if isinstance(error, ProposalFailedError):
        raise error
      if error is not None:
        raise ProposalFailedError(str(error) or repr(error)) from error
    if pending:
      raise ProposalFailedError('a worker did not answer in time')
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
