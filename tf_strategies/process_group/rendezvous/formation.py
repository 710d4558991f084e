"""Connects the members of a proposed group: all links, or none of them.

The leader proposes, the members accept, each connects its data links (the higher
rank dials the lower one) and reports, and the leader commits. If a step fails,
all links are closed and the workers poll each other again. The connections that
carry the proposal become the control plane.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from tf_strategies.process_group import state
from tf_strategies.process_group.network import authentication, protocol
from tf_strategies.process_group.network import connection as connection_lib
from tf_strategies.process_group.rendezvous import membership

_Kind = protocol.Kind
# A step takes milliseconds, and a worker that dies closes its connections: only
# one that is stopped takes so long.
STEP_SECONDS = 20.0

Dial = Callable[
  [int, authentication.Purpose], Awaitable[connection_lib.Connection]
]


class ProposalFailedError(Exception):
  """A proposal failed; internal."""


class Proposal:
  """A group in the making, seen by one member."""

  def __init__(
    self,
    generation: int,
    seats: Sequence[membership.Seat],
    task: int,
    dial: Dial,
  ):
    self.generation = generation
    self.seats = tuple(seats)
    self.rank = [seat.task for seat in seats].index(task)
    self.sockets: dict[int, socket.socket] = {}
    self.connections: dict[int, connection_lib.Connection] = {}
    self._dial = dial
    self._lower_done = self.rank == 0
    self._meshed = asyncio.Event()
    self._check_meshed()

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
          self._meshed.wait(),
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

  def expects(self, rank: int, message: dict[str, Any]) -> bool:
    """Whether a data link belongs to this proposal and is still missing."""
    return (
      message['generation'] == self.generation
      and self.rank < rank < len(self.seats)
      and message['incarnation'] == self.seats[rank].incarnation
      and rank not in self.sockets
    )

  def add(self, rank: int, sock: socket.socket) -> None:
    """Takes a data link from a higher rank."""
    self.sockets[rank] = sock
    self._check_meshed()

  def close(self) -> None:
    """Closes all links."""
    for sock in self.sockets.values():
      sock.close()
    for connection in self.connections.values():
      connection.close()

  def _check_meshed(self) -> None:
    if self._lower_done and len(self.sockets) == len(self.seats) - 1:
      self._meshed.set()

  async def _invite(self, rank: int) -> None:
    connection = await self._dial(
      self.seats[rank].task, authentication.Purpose.CONTROL
    )
    self.connections[rank] = connection
    seats = [dataclasses.astuple(seat) for seat in self.seats]
    message = {'generation': self.generation, 'seats': seats}
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
    await together(self._join(rank) for rank in range(self.rank))
    self._lower_done = True
    self._check_meshed()
    await self._meshed.wait()
    leader.send(_Kind.READY)

  async def _join(self, rank: int) -> None:
    connection = await self._dial(
      self.seats[rank].task, authentication.Purpose.DATA
    )
    self.sockets[rank] = connection.detach()
    connection.send(
      _Kind.JOIN,
      {
        'rank': self.rank,
        'generation': self.generation,
        'incarnation': self.seats[self.rank].incarnation,
      },
    )
    await connection.expect(_Kind.ACCEPT)


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
      if error is not None:
        raise ProposalFailedError(str(error) or repr(error)) from error
    if pending:
      raise ProposalFailedError('a worker did not answer in time')
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
