"""The control plane of one group: a star of connections around rank 0.

It carries heartbeats, small exchanges, goodbyes and failures. Ranks report what
goes wrong to rank 0, which decides and tells everyone, so that all raise the
same error. If rank 0 itself is lost, every rank sees that directly.

Everything runs in the event loop of the rendezvous, where it is made; the public methods
may be called from any thread.
"""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from absl import logging

from tf_strategies import errors
from tf_strategies.process_group import failure_detection
from tf_strategies.process_group import options as options_lib
from tf_strategies.process_group import state as state_lib
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
    # On rank 0: by the tag of an exchange, the payloads that have come.
    self._payloads: dict[str, dict[int, str]] = {}
    # What each takes: the rank that sent a message, and the message.
    self._handlers: dict[protocol.Kind, Callable[[int, Any], None]] = {
      _Kind.HEARTBEAT: self._on_heartbeat,
      _Kind.GOODBYE: self._on_goodbye,
      # To rank 0, and from it.
      _Kind.FAILED: self._on_failed,
      # To rank 0.
      _Kind.EXCHANGE: self._on_contribution,
      _Kind.REPORT: self._on_report,
      # From rank 0.
      _Kind.RESULT: self._on_result,
    }
    self._tasks = [host.spawn(self._beat())]
    if state.rank == 0:
      self._tasks.append(host.spawn(self._watch()))
    for rank, link in self._links.items():
      # Rank 0 brings what all ranks said. Quotes in a text take two bytes.
      link.max_payload = 3 * protocol.MAX_PAYLOAD_BYTES * len(state.members)
      self._tasks.append(host.spawn(self._read(rank, link)))
    state.on_failure(lambda: self._post(self._fail_exchanges))

  # From any thread.

  def suspect(
    self, ranks: Iterable[int], seconds: float | None = None, tag: str = ''
  ) -> None:
    """Reports a mismatch or a timeout; raises the error of the group once it has failed.

    Args:
      ranks: the ranks that are at another collective, or that did not come.
      seconds: how long this rank waited for them; None if they are at another one.
      tag: names the exchange that failed; empty for the running collective.
    """
    operation = self._state.operation
    suspicion = {
      'reporter': self._state.rank,
      'text': operation.text,
      'sequence': operation.sequence,
      'name': tag or operation.name,
      'tag': tag,
      'seconds': seconds,
      'ranks': list(ranks),
    }
    self._post(self._tell_rank_0, _Kind.REPORT, suspicion)
    if not self._state.failed.wait(_DECISION_SECONDS):
      said = {self._state.rank: self._state.describe()}
      self._state.fail(
        failure_detection.diagnose(self._state.members, suspicion, said)
      )
    self._state.check()

  def declare_failed(self, report: state_lib.FailureReport) -> None:
    """Makes the group fail on all ranks; returns when it has failed here."""
    self._post(self.end, report)
    if not self._state.failed.wait(_DECISION_SECONDS):
      self._state.fail(report)

  def exchange(self, tag: str, payload: str, seconds: float) -> list[str]:
    """See `ProcessGroup.exchange`."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    self._post(self._begin_exchange, tag, payload, future)
    if not concurrent.futures.wait([future], seconds).done:
      self.suspect((), seconds, tag)
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
    await connection_lib.end(self._tasks)
    for link in self._links.values():
      link.close()

  def _begin_exchange(
    self, tag: str, payload: str, future: concurrent.futures.Future
  ) -> None:
    """Sends this rank's payload; `future` gets all ranks' payloads, or an error."""
    if self._state.failure is not None or self._state.departed:
      future.set_exception(self._end_of_exchanges())
    elif tag in self._state.exchanges:
      future.set_exception(
        errors.UnsupportedOptionError(
          f'tag={tag!r} twice',
          'one exchange at a time for each tag',
          'use a tag of its own for each meeting, with a counter, say',
        )
      )
    else:
      self._state.exchanges[tag] = future
      message = {'tag': tag, 'payload': payload}
      self._tell_rank_0(_Kind.EXCHANGE, message)

  def _fail_exchanges(self) -> None:
    """Ends all exchanges, because the group failed or a rank left."""
    calls, self._state.exchanges = self._state.exchanges, {}
    for future in calls.values():
      future.set_exception(self._end_of_exchanges())
    self._payloads.clear()

  def _end_of_exchanges(self) -> errors.Error:
    if self._state.failure is not None:
      return self._state.failure.exception()
    # The first: those after it may have left because of it.
    departed = next(iter(self._state.departed))
    return self._state.left(departed).exception()

  def _on_contribution(self, rank, message):
    """Takes a rank's payload, on rank 0."""
    tag = message['tag']
    there = self._payloads.setdefault(tag, {})
    there[rank] = message['payload']
    if len(there) == len(self._state.members):
      del self._payloads[tag]
      result = {'tag': tag, 'payloads': [there[r] for r in sorted(there)]}
      self._send_all(_Kind.RESULT, result)
      self._on_result(0, result)

  def _on_result(self, rank, message):
    """Takes the payloads of all ranks."""
    # A call that was too late has failed with the group.
    if future := self._state.exchanges.pop(message['tag'], None):
      future.set_result(message['payloads'])

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
      report = report._replace(message=message)
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
    if 0 in self._state.departed:
      self._state.fail(report)
    else:
      self._tell_rank_0(_Kind.FAILED, report._asdict())

  def _tell_rank_0(self, kind: protocol.Kind, message: Any) -> None:
    """Has rank 0 take a message, which may be this rank."""
    if self._state.rank == 0:
      self._handlers[kind](0, message)
    else:
      self._links[0].send(kind, message)

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
    said = self._said.values()
    if suspicion['seconds'] is None:
      said = [d for d in said if d['sequence'] >= suspicion['sequence']]
    return len(said) == len(self._links)

  def _all_said(self) -> dict[int, dict[str, Any]]:
    return {self._state.rank: self._state.describe(), **self._said}

  def _on_report(self, rank, suspicion):
    self._host.spawn(self._decide(suspicion))

  def _on_failed(self, rank, message):
    report = state_lib.FailureReport(**message)
    if self._state.rank == 0 and self._state.failure is None:
      # Before this rank itself notices: it may end the process at once.
      self._send_all(_Kind.FAILED, message)
    self._state.fail(report)

  def _on_heartbeat(self, rank, message):
    self._said[rank] = message['said']
    if rank == 0:
      self._joiners = tuple(message['joiners'])

  def _on_goodbye(self, rank, message):
    leaver, last = message['rank'], message['last']
    if leaver != rank and rank != 0:
      raise protocol.ProtocolError(f'a GOODBYE of rank {leaver}')
    if message['has_ended']:
      self._state.ended.add(leaver)
    self._state.departed[leaver] = last
    if self._state.rank == 0:
      self._send_all(_Kind.GOODBYE, message)
    self._fail_exchanges()
    missed = self._state.missed()
    if missed is not None:
      # Through rank 0: it would take this rank, which leaves next, for the first.
      self.end(missed)
