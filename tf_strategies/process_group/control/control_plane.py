"""The control plane of one group: a star of connections around rank 0.

Heartbeats, small exchanges, goodbyes, and one verdict for all when something
fails: ranks accuse, rank 0 judges and tells everyone, so that all name the same
culprit. If rank 0 itself is gone, everyone sees that directly.

All of it runs in the event loop of the rendezvous; `accuse`, `convict`,
`describe_ranks`, `exchange`, `joiners` and `close` may be called from any
thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from tf_strategies.process_group import failure_detection
from tf_strategies.process_group import options as options_lib
from tf_strategies.process_group import state as state_lib
from tf_strategies.process_group.control import exchange as exchange_lib
from tf_strategies.process_group.network import connection as connection_lib
from tf_strategies.process_group.network import protocol, server

_Kind = protocol.Kind
_DESCRIBE_SECONDS = 1.0
_FLUSH_SECONDS = 1.0
# If no verdict comes in this time, rank 0 is in trouble itself.
_VERDICT_SECONDS = _DESCRIBE_SECONDS + 2.0


class ControlPlane:
  """Links to rank 0, or on rank 0 to everyone else.

  Args:
    host: whose loop and thread all of this runs in.
    state: of the group.
    connections: by rank; owned from here on.
    options: of the group.
    own_joiners: the tasks that asked this process for a new group.
  """

  def __init__(
    self,
    host: server.Server,
    state: state_lib.GroupState,
    connections: Mapping[int, connection_lib.Connection],
    options: options_lib.GroupOptions,
    own_joiners: Callable[[], tuple[int, ...]],
  ):
    self._host = host
    self._state = state
    self._options = options
    self._own_joiners = own_joiners
    self._links = {
      rank: Outbox(connection, state.generation)
      for rank, connection in connections.items()
    }
    self._heard = dict.fromkeys(self._links, time.monotonic())
    self._joiners: dict[int, frozenset[int]] = {}
    self._said: dict[int, Any] = {}
    # What `describe_ranks` has heard, one for each call that waits.
    self._inquiries: list[dict[int, Any]] = []
    self._judging = False
    self._all_said = asyncio.Event()
    self._closing = False
    self._exchanges = exchange_lib.Exchanges(state, self._links)
    self._handlers = {
      _Kind.HEARTBEAT: self._on_heartbeat,
      _Kind.EXCHANGE: self._exchanges.on_contribution,
      _Kind.RESULT: self._exchanges.on_result,
      _Kind.LATE: self._exchanges.on_late,
      _Kind.ACCUSE: self._on_accusation,
      _Kind.ABORT: self._on_abort,
      _Kind.DESCRIBE: self._on_describe,
      _Kind.DESCRIPTION: self._on_description,
      _Kind.GOODBYE: self._on_goodbye,
    }

  def start(self) -> None:
    """Begins to listen and to send heartbeats; inside the loop."""
    limit = len(self._state.members) * (protocol.MAX_PAYLOAD_BYTES + 8)
    self._tasks = [self._host.spawn(self._beat())]
    for rank, link in self._links.items():
      link.connection.max_payload = limit
      self._tasks.append(self._host.spawn(self._read(rank, link.connection)))
    self._state.on_failure(lambda: self._post(self._exchanges.fail))

  # From any thread.

  def accuse(self, accusation: dict[str, Any]) -> None:
    """Reports a mismatch or a timeout; returns when there is a verdict."""
    accusation['accuser'] = self._state.rank
    self._post(self._accuse, accusation)
    if not self._state.failed.wait(_VERDICT_SECONDS):
      said = {self._state.rank: self._state.describe()}
      self._state.fail(_judge(self._state.members, accusation, said))

  def convict(self, verdict: state_lib.Verdict) -> None:
    """Makes the group fail everywhere; returns when it has failed here."""
    self._post(self._convict, verdict)
    if not self._state.failed.wait(_VERDICT_SECONDS):
      self._state.fail(verdict)

  def exchange(
    self, tag: str, payload: bytes, timeout_seconds: float
  ) -> list[bytes]:
    """See `ProcessGroup.exchange`."""
    call = exchange_lib.Call(tag, payload, timeout_seconds)
    self._post(self._exchanges.begin, call)
    return call.result()

  def describe_ranks(self, timeout_seconds: float) -> dict[int, Any]:
    """See `ProcessGroup.describe_ranks`."""
    mine = {self._state.rank: self._state.describe()}
    inquiry = self._inquire(dict(mine), timeout_seconds)
    try:
      future = asyncio.run_coroutine_threadsafe(inquiry, self._host.loop)
    except RuntimeError:
      inquiry.close()
      return mine
    try:
      return future.result(timeout_seconds + _FLUSH_SECONDS)
    except (concurrent.futures.CancelledError, concurrent.futures.TimeoutError):
      # The loop ends, or it is stuck itself.
      return mine

  def joiners(self) -> tuple[int, ...]:
    """Tasks that wait for a new group, as far as this rank knows."""
    heard = frozenset().union(self._own_joiners(), *self._joiners.values())
    return tuple(sorted(heard))

  def close(self) -> None:
    """Says goodbye, waits until it is sent, and closes the connections."""
    with contextlib.suppress(RuntimeError):
      self._host.call(self._close())

  def _post(self, function: Callable[..., None], *args: Any) -> None:
    # The loop is gone once the rendezvous is closed.
    with contextlib.suppress(RuntimeError):
      self._host.loop.call_soon_threadsafe(function, *args)

  # Inside the loop.

  async def _close(self) -> None:
    if self._closing:
      return
    self._closing = True
    if self._state.verdict is None:
      operation = self._state.operation
      last = operation.sequence - operation.busy
      self._send_all(_Kind.GOODBYE, {'rank': self._state.rank, 'last': last})
    end = time.monotonic() + _FLUSH_SECONDS
    while time.monotonic() < end and any(
      link.pending for link in self._links.values()
    ):
      await asyncio.sleep(0.01)
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)
    for link in self._links.values():
      link.close()
    self._exchanges.fail()

  async def _read(
    self, rank: int, connection: connection_lib.Connection
  ) -> None:
    try:
      while True:
        frame = await connection.receive()
        self._heard[rank] = time.monotonic()
        if frame.generation != self._state.generation:
          raise protocol.ProtocolError('a frame is of another generation')
        self._handlers[frame.kind](rank, frame)
    except (OSError, protocol.ProtocolError, KeyError) as e:
      connection.shut_down()
      if rank not in self._state.departed:
        self._lose(rank, f'died or was cut off ({_reason(e)})')

  async def _beat(self) -> None:
    interval = self._options.heartbeat_interval_seconds
    timeout = self._options.heartbeat_timeout_seconds
    ticked = time.monotonic()
    while True:
      await asyncio.sleep(interval)
      now = time.monotonic()
      if now - ticked > timeout / 2 + interval:
        # This process was stopped for a while: what the others sent may still
        # lie in the buffers, so they get another chance.
        self._heard = dict.fromkeys(self._heard, now)
      ticked = now
      for rank, heard in self._heard.items():
        if now - heard > timeout and rank not in self._state.departed:
          silence = f'has been silent for {now - heard:.1f} s'
          self._lose(rank, f'is stopped or cut off: it {silence}')
      self._send_all(_Kind.HEARTBEAT, {'joiners': self.joiners()})

  def _lose(self, rank: int, how: str) -> None:
    if self._closing:
      return
    verdict = self._state.lost(rank, how)
    if rank == 0:
      # Nobody is left to tell it to: the others see it themselves.
      self._state.fail(verdict)
    else:
      self._convict(verdict)

  def _send_all(self, kind: protocol.Kind, message: Any) -> None:
    for rank, link in self._links.items():
      if rank not in self._state.departed:
        link.put(kind, message)

  def _convict(self, verdict: state_lib.Verdict) -> None:
    if self._state.verdict is not None:
      return
    center = self._links.get(0)
    if center is None:
      # Before this rank itself notices: it may end the process at once.
      self._send_all(_Kind.ABORT, verdict.to_json())
      self._state.fail(verdict)
    elif 0 in self._state.departed:
      self._state.fail(verdict)
    else:
      center.put(_Kind.ACCUSE, {'verdict': verdict.to_json()})

  def _accuse(self, accusation: dict[str, Any]) -> None:
    center = self._links.get(0)
    if center is None:
      self._host.spawn(self._judge(accusation))
    else:
      center.put(_Kind.ACCUSE, accusation)

  async def _judge(self, accusation: dict[str, Any]) -> None:
    if self._judging or self._state.verdict is not None:
      return
    self._judging = True
    end = time.monotonic() + _DESCRIBE_SECONDS
    while True:
      await self._ask_all(end - time.monotonic())
      # In a mismatch those that are on their way there are waited for, so that
      # the verdict can say what they do.
      late = accusation['kind'] == 'mismatch' and any(
        description['sequence'] < accusation['sequence']
        for description in self._said.values()
      )
      if not late or time.monotonic() > end:
        break
      await asyncio.sleep(0.05)
    self._convict(_judge(self._state.members, accusation, self._said))

  async def _ask_all(self, seconds: float) -> None:
    self._said = {0: self._state.describe()}
    self._all_said.clear()
    self._send_all(_Kind.DESCRIBE, None)
    with contextlib.suppress(TimeoutError):
      await connection_lib.within(max(seconds, 0.0), self._all_said.wait())

  async def _inquire(self, said: dict[int, Any], seconds: float):
    # Apart from `_said`, which a judgement may be collecting.
    self._inquiries.append(said)
    try:
      self._send_all(_Kind.DESCRIBE, None)
      end = time.monotonic() + seconds
      while len(said) <= len(self._links) and time.monotonic() < end:
        await asyncio.sleep(0.01)
    finally:
      self._inquiries = [i for i in self._inquiries if i is not said]
    return dict(sorted(said.items()))

  def _on_accusation(self, rank: int, frame: protocol.Frame) -> None:
    accusation = connection_lib.decode(frame)
    if 'verdict' in accusation:
      self._convict(state_lib.Verdict.from_json(accusation['verdict']))
    else:
      self._accuse(accusation)

  def _on_abort(self, rank: int, frame: protocol.Frame) -> None:
    message = connection_lib.decode(frame)
    self._state.fail(state_lib.Verdict.from_json(message))

  def _on_describe(self, rank: int, frame: protocol.Frame) -> None:
    self._links[rank].put(_Kind.DESCRIPTION, self._state.describe())

  def _on_description(self, rank: int, frame: protocol.Frame) -> None:
    self._said[rank] = connection_lib.decode(frame)
    for inquiry in self._inquiries:
      inquiry[rank] = self._said[rank]
    if len(self._said) == len(self._state.members):
      self._all_said.set()

  def _on_heartbeat(self, rank: int, frame: protocol.Frame) -> None:
    message = connection_lib.decode(frame)
    self._joiners[rank] = frozenset(message['joiners'])

  def _on_goodbye(self, rank: int, frame: protocol.Frame) -> None:
    message = connection_lib.decode(frame)
    leaver, last = message['rank'], message['last']
    self._state.departed[leaver] = last
    if self._state.rank == 0:
      self._send_all(_Kind.GOODBYE, message)
    self._exchanges.fail()
    operation = self._state.operation
    if operation.busy and operation.sequence > last:
      self._state.fail(self._state.left(leaver))


class Outbox:
  """Sends frames without waiting; what does not fit goes later."""

  def __init__(self, connection: connection_lib.Connection, generation: int):
    self.connection = connection
    self._generation = generation
    self._sock = connection.detach()
    self._loop = asyncio.get_running_loop()
    self._data = bytearray()
    self._closed = False

  @property
  def pending(self) -> bool:
    """Whether something is still to be sent."""
    return bool(self._data)

  def put(self, kind: protocol.Kind, message: Any = None) -> None:
    """Sends a frame that holds a JSON value."""
    payload = json.dumps(message).encode('utf-8')
    self.put_frame(protocol.Frame(kind, self._generation, payload=payload))

  def put_frame(self, frame: protocol.Frame) -> None:
    """Sends a frame."""
    if self._closed:
      return
    idle = not self._data
    self._data += frame.pack()
    if idle:
      self._flush()
      if self._data:
        self._loop.add_writer(self._sock, self._flush)

  def close(self) -> None:
    """Closes the connection; its reader must have ended."""
    self._stop()
    self.connection.shut_down()
    self.connection.close()

  def _flush(self) -> None:
    try:
      del self._data[: self._sock.send(self._data)]
    except (BlockingIOError, InterruptedError):
      return
    except OSError:
      # Whoever reads from this connection finds out, and tells.
      self._stop()
    if not self._data:
      self._loop.remove_writer(self._sock)

  def _stop(self) -> None:
    if not self._closed:
      self._closed = True
      self._data.clear()
      self._loop.remove_writer(self._sock)


def _judge(members, accusation, said) -> state_lib.Verdict:
  decide = {
    'mismatch': failure_detection.mismatch,
    'timeout': failure_detection.timeout,
  }[accusation['kind']]
  return decide(members, accusation, said)


def _reason(error: Exception) -> str:
  if isinstance(error, ConnectionError):
    return 'its connection is closed'
  return str(error) or type(error).__name__
