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
  """A proposal failed; internal."""


class Proposal:
  """A group in the making, seen by one member."""

  def __init__(
    self,
    generation: int,
    seats: Sequence[membership.Seat],
    task: int,
    dial: mesh_lib.Dial,
    on_cut: mesh_lib.OnCut,
    gone: Sequence[int] = (),
  ):
    self.generation = generation
    self._gone = list(gone)
    self.seats = tuple(seats)
    self.seated = {seat.task: seat.incarnation for seat in seats}
    self.rank = list(self.seated).index(task)
    self.connections: dict[int, connection_lib.Connection] = {}
    self._dial = dial
    self.mesh = mesh_lib.Mesh(generation, self.rank, self.seated, dial, on_cut)

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
          self.mesh.connect_first(),
          *(c.expect(_Kind.READY) for c in self.connections.values()),
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
    except BaseException:
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
    kind, reason = await connection.expect(_Kind.ACCEPT, _Kind.REJECT)
    if kind is _Kind.REJECT:
      raise ProposalFailedError(
        f'task {self.seats[rank].task} declined: {reason}'
      )

  def _tell(self, kind: protocol.Kind) -> None:
    for connection in self.connections.values():
      connection.send(kind)

  async def _mesh(self, leader: connection_lib.Connection) -> None:
    await self.mesh.connect_first()
    leader.send(_Kind.READY)


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
