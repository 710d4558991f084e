"""The data links of one rank: made when something needs them.

A few ranks all have links to each other from the start. Among many ranks each has links
to its neighbours in the ring, and a collective that needs another link has it made. The
rank that needs a link dials; if both do, the call of the higher rank counts.
"""

import asyncio
import collections
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from tf_strategies.process_group import execution, plan
from tf_strategies.process_group.network import authentication, protocol
from tf_strategies.process_group.network import connection as connection_lib

_Kind = protocol.Kind

Dial = Callable[[int], Awaitable[connection_lib.Connection]]
# Called with a task that cannot be reached, its incarnation and the reason.
OnCut = Callable[[int, str, str], None]


class Mesh:
  """Makes and accepts the links of one rank in one group; in the event loop.

  Args:
    generation: generation of the group.
    rank: rank of this process.
    seated: the task of each rank, in order, and its incarnation.
    dial: function that connects to a task.
    on_cut: function that is called for each task that cannot be reached.
    take: function that takes the socket of each rank, and owns it.
  """

  def __init__(
    self,
    generation: int,
    rank: int,
    seated: Mapping[int, str],
    dial: Dial,
    on_cut: OnCut,
    take: Callable[[int, socket.socket], None],
  ):
    self._generation = generation
    self._rank = rank
    self._tasks, self._incarnations = list(seated), list(seated.values())
    self._dial = dial
    self._on_cut = on_cut
    self._take = take
    self._dialled: set[int] = set()
    self._linked: collections.defaultdict[int, asyncio.Event] = (
      collections.defaultdict(asyncio.Event)
    )

  async def connect_first(self) -> None:
    """Makes the links that are there from the start; raises as `connect`."""
    size, rank = len(self._tasks), self._rank
    peers = [(rank - 1) % size, (rank + 1) % size]
    if size <= plan.FEW_RANKS:
      peers = [r for r in range(size) if r != rank]
    await self.connect(peers)

  async def connect(self, ranks: Iterable[int]) -> None:
    """Returns when there is a link to each; LinkClosedError if one cannot be made."""
    await connection_lib.together(map(self._connect, ranks))

  def accept(
    self, connection: connection_lib.Connection, message: dict[str, Any]
  ) -> None:
    """Takes the link of a peer; ProtocolError if it is of another group."""
    rank = message['rank']
    if (
      message['generation'] != self._generation
      or not 0 <= rank < len(self._tasks)
      or message['incarnation'] != self._incarnations[rank]
    ):
      raise protocol.ProtocolError('a data link belongs to another group')
    both_dial = rank < self._rank and rank in self._dialled
    if both_dial or self._linked[rank].is_set():
      connection.send(_Kind.REJECT, 'there is a link, or it is being made')
      connection.close()
      return
    connection.send(_Kind.ACCEPT)
    self._add(rank, connection)

  async def _connect(self, rank: int) -> None:
    linked = self._linked[rank]
    if rank not in self._dialled and not linked.is_set():
      self._dialled.add(rank)
      await self._call(rank)
    # The peer's own call may be the one that counts.
    await linked.wait()

  async def _call(self, rank: int) -> None:
    message = {
      'rank': self._rank,
      'generation': self._generation,
      'incarnation': self._incarnations[self._rank],
    }
    kind, connection = None, None
    try:
      connection = await dial_again(self._dial, self._tasks[rank])
      connection.send(_Kind.JOIN, message)
      kind, _ = await connection_lib.within(
        authentication.HANDSHAKE_SECONDS,
        connection.expect(_Kind.ACCEPT, _Kind.REJECT),
      )
    except (OSError, protocol.ProtocolError) as e:
      why = str(e) or type(e).__name__
      self._on_cut(self._tasks[rank], self._incarnations[rank], why)
      raise execution.LinkClosedError(rank, why) from e
    finally:
      if connection is not None and kind is not _Kind.ACCEPT:
        connection.close()
    if kind is _Kind.ACCEPT:
      self._add(rank, connection)

  def _add(self, rank: int, connection: connection_lib.Connection) -> None:
    self._linked[rank].set()
    self._take(rank, connection.sock)


async def dial_again(dial: Dial, task: int) -> connection_lib.Connection:
  """Dials twice: with many workers one lost connection is no surprise."""
  try:
    return await dial(task)
  except ConnectionRefusedError:
    raise
  except OSError:
    return await dial(task)
