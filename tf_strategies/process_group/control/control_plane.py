"""The control plane of one group: a star of connections around rank 0.

It carries heartbeats, small exchanges, goodbyes and failures. Ranks report what
goes wrong to rank 0, which decides and tells everyone, so that all raise the
same error. If rank 0 itself is lost, every rank sees that directly.

Everything runs in the event loop of the rendezvous; the public methods, except
`start`, may be called from any thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from tf_strategies import errors
from tf_strategies.process_group import failure_detection
from tf_strategies.process_group import options as options_lib
from tf_strategies.process_group import state as state_lib
from tf_strategies.process_group.control import exchange as exchange_lib
from tf_strategies.process_group.network import connection as connection_lib
from tf_strategies.process_group.network import protocol, server

_Kind = protocol.Kind
# Ranks say where they are with each heartbeat; those that are late get this much longer.
_DESCRIBE_SECONDS = 1.0
_FLUSH_SECONDS = 1.0
# Between two looks at ranks that wait for each other.
_STALL_SECONDS = 10.0
# If no decision comes in this time, rank 0 is in trouble itself.
_DECISION_SECONDS = _DESCRIBE_SECONDS + 3.0


class ControlPlane:
  """Links to rank 0, or on rank 0 to all other ranks; owns its connections.

  `own_joiners` returns the tasks that asked this process for a new group and can
  join it. Rank 0 tells the others its own: every task asks the lowest.
  """

  def __init__(
    self,
    host: server.Server,
    state: state_lib.GroupState,
    connections: Mapping[int, connection_lib.Connection],
    options: options_lib.GroupOptions,
    own_joiners: Callable[[], tuple[int, ...]] = tuple,
  ):
    self._host = host
    self._state = state
    self._own_joiners = own_joiners
    self._links = dict(connections)
    self._monitor = failure_detection.HeartbeatMonitor(
      self._links, options.heartbeat_timeout_seconds, host.now()
    )
    self._joiners: tuple[int, ...] = ()  # As rank 0 says.
    # What the other ranks did at their last heartbeats.
    self._said: dict[int, dict[str, Any]] = {}
    self._diagnosing = False
    self._closing = False
    self._exchanges = exchange_lib.Exchanges(state, self._links)
    self._handlers = {
      _Kind.HEARTBEAT: self._on_heartbeat,
      _Kind.GOODBYE: self._on_goodbye,
    }
    # A link is from rank 0 or to it.
    if state.rank == 0:
      self._handlers[_Kind.EXCHANGE] = self._exchanges.on_contribution
      self._handlers[_Kind.REPORT] = self._on_report
    else:
      self._handlers[_Kind.RESULT] = self._exchanges.on_result
      self._handlers[_Kind.FAILED] = self._on_failed

  def start(self) -> None:
    """Begins to listen and to send heartbeats; inside the loop."""
    limit = 2 * protocol.MAX_PAYLOAD_BYTES  # Bytes of an exchange are text.
    if self._state.rank:
      limit *= len(self._state.members)  # Rank 0 brings what all ranks said.
    self._tasks = [self._host.spawn(self._beat())]
    if self._state.rank == 0:
      self._tasks.append(self._host.spawn(self._watch()))
    for rank, link in self._links.items():
      link.max_payload = limit
      self._tasks.append(self._host.spawn(self._read(rank, link)))
    self._state.on_failure(lambda: self._post(self._exchanges.fail))

  # From any thread.

  def report(self, suspicion: dict[str, Any]) -> None:
    """Reports a mismatch or a timeout; returns when the group has failed."""
    suspicion['reporter'] = self._state.rank
    self._post(self._report, suspicion)
    if not self._state.failed.wait(_DECISION_SECONDS):
      said = {self._state.rank: self._state.describe()}
      self._state.fail(
        failure_detection.diagnose(self._state.members, suspicion, said)
      )

  def declare_failed(self, report: state_lib.FailureReport) -> None:
    """Makes the group fail on all ranks; returns when it has failed here."""
    self._post(self.end, report)
    if not self._state.failed.wait(_DECISION_SECONDS):
      self._state.fail(report)

  def exchange(self, tag: str, payload: bytes, seconds: float) -> list[bytes]:
    """See `ProcessGroup.exchange`."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    self._post(self._exchanges.begin, tag, payload, future)
    if not concurrent.futures.wait([future], seconds).done:
      self.report(
        failure_detection.suspicion(self._state.operation, (), seconds, tag)
      )
      self._state.check()
    return errors.result_of(future)

  def joiners(self) -> tuple[int, ...]:
    """Returns the tasks that wait for a new group and can join it, as rank 0 says.

    Rank 0 would propose that group, and knows the tasks that it would leave out.
    """
    return self._joiners if self._state.rank else self._own_joiners()

  def close(self, has_ended: bool = False) -> None:
    """Says goodbye, waits until it is sent, and closes the connections.

    Args:
      has_ended: whether the program of this rank ends.
    """
    with contextlib.suppress(RuntimeError):
      self._host.call(self._close(has_ended))

  def _post(self, function: Callable[..., None], *args: Any) -> None:
    # The loop is gone once the rendezvous is closed.
    with contextlib.suppress(RuntimeError):
      self._host.loop.call_soon_threadsafe(function, *args)

  # Inside the loop.

  async def _close(self, has_ended: bool) -> None:
    if self._closing:
      return
    self._closing = True
    if self._state.failure is None:
      operation = self._state.operation
      last = operation.sequence - operation.busy
      self._send_all(
        _Kind.GOODBYE,
        {'rank': self._state.rank, 'last': last, 'has_ended': has_ended},
      )
    end = self._host.now() + _FLUSH_SECONDS
    while self._host.now() < end and any(
      link.pending for link in self._links.values()
    ):
      await asyncio.sleep(0.01)
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)
    for link in self._links.values():
      link.close()
    self._exchanges.fail()

  async def _read(self, rank: int, link: connection_lib.Connection) -> None:
    try:
      while True:
        kind, message = await link.receive()
        self._monitor.heard(rank, self._host.now())
        self._handlers[kind](rank, message)
    except OSError as e:
      link.shut_down()
      closed = isinstance(e, ConnectionError)
      why = 'its connection is closed' if closed else str(e) or type(e).__name__
      self._lose(rank, f'died or was disconnected ({why})')
    except Exception as e:  # It sent what this version does not.
      logging.exception('Rank %d broke the protocol.', rank)
      link.shut_down()
      self._lose(rank, f'broke the protocol ({e!r})')

  async def _beat(self) -> None:
    while True:
      await asyncio.sleep(self._monitor.interval_seconds)
      for rank, seconds in self._monitor.overdue(self._host.now()).items():
        silence = f'has been silent for {seconds:.1f} s'
        self._lose(rank, f'is stopped or disconnected: it {silence}')
      message = {'joiners': self.joiners(), 'said': self._state.describe()}
      self._send_all(_Kind.HEARTBEAT, message)

  async def _watch(self) -> None:
    """Ends a group if all ranks wait in different methods of a model."""
    before: dict[int, Any] = {}
    while True:
      await asyncio.sleep(_STALL_SECONDS)
      said = self._all_said()
      report = failure_detection.stall(self._state.members, before, said)
      if report is not None:
        self.end(report)
      before = said

  def _lose(self, rank: int, how: str) -> None:
    if self._closing or rank in self._state.departed:
      return
    report = self._state.lost(rank, how)
    pause = self._monitor.own_pause(self._host.now())
    if pause:
      message = (
        f'This process itself stood still for {pause:.0f} s, so the others gave it '
        f'up. {report.message}'
      )
      report = dataclasses.replace(report, message=message)
    if rank == 0:
      # Nobody is left to tell the others: they see it themselves.
      self._state.fail(report)
    else:
      self.end(report)

  def _send_all(self, kind: protocol.Kind, message: Any) -> None:
    for rank, link in self._links.items():
      if rank not in self._state.departed:
        link.send(kind, message)

  def end(self, report: state_lib.FailureReport) -> None:
    """Declares the group failed, in the loop; returns at once."""
    if self._state.failure is not None:
      return
    center = self._links.get(0)
    if center is None:
      # Before this rank itself notices: it may end the process at once.
      self._send_all(_Kind.FAILED, dataclasses.asdict(report))
      self._state.fail(report)
    elif 0 in self._state.departed:
      self._state.fail(report)
    else:
      center.send(_Kind.REPORT, {'failure': dataclasses.asdict(report)})

  def _report(self, suspicion: dict[str, Any]) -> None:
    center = self._links.get(0)
    if center is None:
      self._host.spawn(self._decide(suspicion))
    else:
      center.send(_Kind.REPORT, suspicion)

  async def _decide(self, suspicion: dict[str, Any]) -> None:
    if self._diagnosing or self._state.failure is not None:
      return
    self._diagnosing = True
    self._said.clear()
    end = self._host.now() + self._monitor.interval_seconds + _DESCRIBE_SECONDS
    while self._host.now() < end and not self._has_heard_all(suspicion):
      await asyncio.sleep(0.01)
    said = self._all_said()
    self.end(failure_detection.diagnose(self._state.members, suspicion, said))

  def _has_heard_all(self, suspicion: dict[str, Any]) -> bool:
    """Returns whether all ranks have said where they are.

    After a mismatch that includes ranks that are still on their way there, so that the
    report can describe their calls.
    """
    is_mismatch = suspicion['seconds'] is None
    return len(self._said) == len(self._links) and not (
      is_mismatch
      and any(
        description['sequence'] < suspicion['sequence']
        for description in self._said.values()
      )
    )

  def _all_said(self) -> dict[int, dict[str, Any]]:
    return {self._state.rank: self._state.describe(), **self._said}

  def _on_report(self, rank: int, report: dict[str, Any]) -> None:
    if 'failure' in report:
      self.end(state_lib.FailureReport(**report['failure']))
    else:
      self._report(report)

  def _on_failed(self, rank: int, message: dict[str, Any]) -> None:
    self._state.fail(state_lib.FailureReport(**message))

  def _on_heartbeat(self, rank: int, message: dict[str, Any]) -> None:
    self._said[rank] = message['said']
    if rank == 0:
      self._joiners = tuple(message['joiners'])

  def _on_goodbye(self, rank: int, message: dict[str, Any]) -> None:
    leaver, last = message['rank'], message['last']
    if leaver != rank and rank != 0:
      raise protocol.ProtocolError(f'a GOODBYE of rank {leaver}')
    if message['has_ended']:
      self._state.ended.add(leaver)
    self._state.departed[leaver] = last
    if self._state.rank == 0:
      self._send_all(_Kind.GOODBYE, message)
    self._exchanges.fail()
    missed = self._state.missed()
    if missed is not None:
      # Through rank 0: it would take this rank, which leaves next, for the first.
      self.end(missed)
