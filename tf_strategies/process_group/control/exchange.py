"""Small payloads of all ranks to all ranks, through rank 0."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import math
import struct
from collections.abc import Mapping
from typing import NamedTuple

from tf_strategies import errors
from tf_strategies.process_group import state as state_lib
from tf_strategies.process_group.network import connection as connection_lib
from tf_strategies.process_group.network import protocol

_Kind = protocol.Kind
# The kinds of frames of exchanges.
KINDS = (_Kind.EXCHANGE, _Kind.RESULT, _Kind.LATE)
_SECONDS = struct.Struct('!d')
_LENGTH = struct.Struct('!Q')


class _Call(NamedTuple):
  """This rank's call for one tag."""

  timeout_seconds: float
  future: concurrent.futures.Future


class _Meeting(NamedTuple):
  """On rank 0: what has come for one tag."""

  payloads: dict[int, bytes]
  timers: list[asyncio.TimerHandle]


class Exchanges:
  """The open exchanges of this rank; on rank 0 those of all ranks.

  Everything runs in the event loop. `links` are connections by rank; to rank 0
  alone on the others.
  """

  def __init__(
    self,
    state: state_lib.GroupState,
    links: Mapping[int, connection_lib.Connection],
  ):
    self._state = state
    self._links = links
    self._loop = asyncio.get_running_loop()
    self._calls: dict[str, _Call] = {}
    self._meetings: dict[str, _Meeting] = {}

  def begin(
    self,
    tag: str,
    payload: bytes,
    timeout_seconds: float,
    future: concurrent.futures.Future,
  ) -> None:
    """Sends this rank's payload; `future` gets all ranks', or an error."""
    if self._state.failure is not None or self._state.departed:
      future.set_exception(self._failure())
    elif tag in self._calls:
      future.set_exception(
        errors.UnsupportedOptionError(
          f'exchange with tag={tag!r} twice at the same time',
          'one call for each tag until all ranks have their answers',
          'use a tag of its own for each meeting, with a counter, say',
        )
      )
    else:
      self._calls[tag] = _Call(timeout_seconds, future)
      if self._state.rank == 0:
        self._contribute(0, tag, payload, timeout_seconds)
      else:
        payload = _SECONDS.pack(timeout_seconds) + payload
        self._links[0].send_frame(_Kind.EXCHANGE, tag, payload)

  def fail(self) -> None:
    """Ends what cannot complete any more: the group failed or a rank left."""
    calls, self._calls = self._calls, {}
    for call in calls.values():
      call.future.set_exception(self._failure())
    for tag in list(self._meetings):
      self._end(tag)

  def on_contribution(self, rank: int, frame: protocol.Frame) -> None:
    """On rank 0: another rank's payload."""
    if len(frame.payload) < _SECONDS.size:
      raise protocol.ProtocolError('an exchange is too short')
    (seconds,) = _SECONDS.unpack_from(frame.payload)
    if not 0 <= seconds < math.inf:
      raise protocol.ProtocolError(f'an exchange of {seconds} s')
    self._contribute(rank, frame.tag, frame.payload[_SECONDS.size :], seconds)

  def on_result(self, rank: int, frame: protocol.Frame) -> None:
    """On the others: the payloads of all ranks."""
    self._finish(frame.tag, _unpack(frame.payload, len(self._state.members)))

  def on_late(self, rank: int, frame: protocol.Frame) -> None:
    """On the others: the ranks that did not come in time."""
    missing = connection_lib.decode(frame, len(self._state.members))
    self._give_up(frame.tag, missing)

  def _contribute(
    self, rank: int, tag: str, payload: bytes, seconds: float
  ) -> None:
    meeting = self._meetings.setdefault(tag, _Meeting({}, []))
    meeting.payloads[rank] = payload
    if len(meeting.payloads) < len(self._state.members):
      timer = self._loop.call_later(seconds, self._late, rank, tag, meeting)
      meeting.timers.append(timer)
      return
    self._end(tag)
    payloads = [meeting.payloads[r] for r in range(len(self._state.members))]
    packed = b''.join(_LENGTH.pack(len(p)) + p for p in payloads)
    for link in self._links.values():
      link.send_frame(_Kind.RESULT, tag, packed)
    self._finish(tag, payloads)

  def _end(self, tag: str) -> None:
    for timer in self._meetings.pop(tag).timers:
      timer.cancel()

  def _late(self, rank: int, tag: str, meeting: _Meeting) -> None:
    ranks = range(len(self._state.members))
    missing = [r for r in ranks if r not in meeting.payloads]
    if rank == 0:
      self._give_up(tag, missing)
    else:
      self._links[rank].send_frame(
        _Kind.LATE, tag, json.dumps(missing).encode()
      )

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
    # The first: those after it may have left because of it.
    departed = next(iter(self._state.departed), self._state.rank)
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
  if start != len(data):
    raise protocol.ProtocolError('the lengths in a result are wrong')
  return payloads
