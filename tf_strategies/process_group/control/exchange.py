"""Small payloads of all ranks to all ranks, through rank 0."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import struct
from collections.abc import Mapping
from typing import Any

from tf_strategies import errors
from tf_strategies.process_group import state as state_lib
from tf_strategies.process_group.network import protocol

_Kind = protocol.Kind
_SECONDS = struct.Struct('!d')
_LENGTH = struct.Struct('!Q')
# A rank gives up by itself if rank 0 does not even say who is late.
_SLACK_SECONDS = 5.0


@dataclasses.dataclass(eq=False)
class Call:
  """One rank's call of `exchange`.

  Attributes:
    tag: where the calls of all ranks meet.
    payload: of this rank.
    timeout_seconds: how long to wait for the others.
    future: gets the payloads of all ranks, or an error.
  """

  tag: str
  payload: bytes
  timeout_seconds: float
  future: concurrent.futures.Future = dataclasses.field(
    default_factory=concurrent.futures.Future
  )

  def result(self) -> list[bytes]:
    """Waits for the payloads of all ranks."""
    try:
      return self.future.result(self.timeout_seconds + _SLACK_SECONDS)
    except concurrent.futures.TimeoutError:
      raise errors.CollectiveTimeoutError(
        f'exchange {self.tag!r} got no answer from rank 0 within '
        f'{self.timeout_seconds:g} s.'
      ) from None


@dataclasses.dataclass
class _Meeting:
  """On rank 0: what has come for one tag."""

  payloads: dict[int, bytes] = dataclasses.field(default_factory=dict)
  timers: list[asyncio.TimerHandle] = dataclasses.field(default_factory=list)

  def cancel_timers(self) -> None:
    for timer in self.timers:
      timer.cancel()


class Exchanges:
  """The open exchanges of this rank; on rank 0 those of all ranks.

  Everything runs in the event loop.

  Args:
    state: of the group.
    links: outboxes by rank; of rank 0 alone on the others.
  """

  def __init__(self, state: state_lib.GroupState, links: Mapping[int, Any]):
    self._state = state
    self._links = links
    self._loop = asyncio.get_running_loop()
    self._calls: dict[str, Call] = {}
    self._meetings: dict[str, _Meeting] = {}

  def begin(self, call: Call) -> None:
    """Sends this rank's payload to rank 0."""
    if self._state.failure is not None or self._state.departed:
      call.future.set_exception(self._failure())
    elif call.tag in self._calls:
      call.future.set_exception(
        errors.UnsupportedOptionError(
          f'exchange with tag={call.tag!r} twice at the same time',
          'one call for each tag until all ranks have their answers',
          'use a tag of its own for each meeting, with a counter, say',
        )
      )
    else:
      self._calls[call.tag] = call
      if self._state.rank == 0:
        self._contribute(0, call.tag, call.payload, call.timeout_seconds)
      else:
        payload = _SECONDS.pack(call.timeout_seconds) + call.payload
        self._links[0].put_frame(_Kind.EXCHANGE, call.tag, payload)

  def fail(self) -> None:
    """Ends what cannot complete any more: the group failed or a rank left."""
    calls, self._calls = self._calls, {}
    for call in calls.values():
      call.future.set_exception(self._failure())
    for meeting in self._meetings.values():
      meeting.cancel_timers()
    self._meetings.clear()

  def on_contribution(self, rank: int, frame: protocol.Frame) -> None:
    """On rank 0: another rank's payload."""
    if len(frame.payload) < _SECONDS.size:
      raise protocol.ProtocolError('an exchange is too short')
    (seconds,) = _SECONDS.unpack_from(frame.payload)
    self._contribute(rank, frame.tag, frame.payload[_SECONDS.size :], seconds)

  def on_result(self, rank: int, frame: protocol.Frame) -> None:
    """On the others: the payloads of all ranks."""
    self._finish(frame.tag, _unpack(frame.payload, len(self._state.members)))

  def on_late(self, rank: int, frame: protocol.Frame) -> None:
    """On the others: the ranks that did not come in time."""
    self._give_up(frame.tag, json.loads(frame.payload))

  def _contribute(
    self, rank: int, tag: str, payload: bytes, seconds: float
  ) -> None:
    meeting = self._meetings.setdefault(tag, _Meeting())
    meeting.payloads[rank] = payload
    if len(meeting.payloads) < len(self._state.members):
      timer = self._loop.call_later(seconds, self._late, rank, tag, meeting)
      meeting.timers.append(timer)
      return
    meeting.cancel_timers()
    del self._meetings[tag]
    payloads = [meeting.payloads[r] for r in range(len(self._state.members))]
    packed = b''.join(_LENGTH.pack(len(p)) + p for p in payloads)
    for link in self._links.values():
      link.put_frame(_Kind.RESULT, tag, packed)
    self._finish(tag, payloads)

  def _late(self, rank: int, tag: str, meeting: _Meeting) -> None:
    ranks = range(len(self._state.members))
    missing = [r for r in ranks if r not in meeting.payloads]
    if rank == 0:
      self._give_up(tag, missing)
    else:
      self._links[rank].put_frame(_Kind.LATE, tag, json.dumps(missing).encode())

  def _give_up(self, tag: str, missing: list[int]) -> None:
    call = self._calls.pop(tag, None)
    if call is None:
      return
    members = self._state.members
    named = ', '.join(str(members[rank]) for rank in missing[:4])
    error = errors.CollectiveTimeoutError(
      f'exchange {tag!r}: {named} did not come within '
      f'{call.timeout_seconds:g} s. All ranks must call it with the same tag.'
    )
    error.rank, error.tensor = missing[0], tag
    call.future.set_exception(error)

  def _finish(self, tag: str, payloads: list[bytes]) -> None:
    # A rank that gave up on this tag does not wait any more.
    call = self._calls.pop(tag, None)
    if call is not None:
      call.future.set_result(payloads)

  def _failure(self) -> errors.Error:
    if self._state.failure is not None:
      return self._state.failure.exception()
    departed = min(self._state.departed, default=self._state.rank)
    return self._state.left(departed).exception()


def _unpack(data: bytes, count: int) -> list[bytes]:
  payloads = []
  start = 0
  for _ in range(count):
    if len(data) < start + _LENGTH.size:
      raise protocol.ProtocolError('a result is too short')
    (length,) = _LENGTH.unpack_from(data, start)
    start += _LENGTH.size + length
    payloads.append(data[start - length : start])
  return payloads
