"""Small payloads of all ranks to all ranks, through rank 0."""

from __future__ import annotations

import concurrent.futures
import json
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
_LENGTH = struct.Struct('!Q')


class _Call(NamedTuple):
  """This rank's call for one tag."""

  timeout_seconds: float
  future: concurrent.futures.Future


class Exchanges:
  """The open exchanges of this rank, and on rank 0 the exchanges of all ranks.

  Everything runs in the event loop. `links` are connections by rank; on the other
  ranks there is only the connection to rank 0.
  """

  def __init__(
    self,
    state: state_lib.GroupState,
    links: Mapping[int, connection_lib.Connection],
  ):
    self._state = state
    self._links = links
    self._calls: dict[str, _Call] = {}
    # On rank 0: by tag, the payloads that have come.
    self._payloads: dict[str, dict[int, bytes]] = {}

  def begin(
    self,
    tag: str,
    payload: bytes,
    timeout_seconds: float,
    future: concurrent.futures.Future,
  ) -> None:
    """Sends this rank's payload; `future` gets all ranks' payloads, or an error."""
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
        self._contribute(0, tag, payload)
      else:
        self._links[0].send_frame(_Kind.EXCHANGE, tag, payload)

  def time_out(self, tag: str) -> None:
    """Ends the call for a tag with an error that names the missing ranks."""
    if self._state.rank == 0:
      self._give_up(tag, self._missing(tag))
    else:
      self._links[0].send_frame(_Kind.LATE, tag, b'null')

  def fail(self) -> None:
    """Ends all calls, because the group failed or a rank left."""
    calls, self._calls = self._calls, {}
    for call in calls.values():
      call.future.set_exception(self._failure())
    self._payloads.clear()

  def on_contribution(self, rank: int, frame: protocol.Frame) -> None:
    """On rank 0: takes another rank's payload."""
    self._contribute(rank, frame.tag, frame.payload)

  def on_result(self, rank: int, frame: protocol.Frame) -> None:
    """On the other ranks: takes the payloads of all ranks."""
    self._finish(frame.tag, _unpack(frame.payload, len(self._state.members)))

  def on_late(self, rank: int, frame: protocol.Frame) -> None:
    """On rank 0, says which ranks are missing; on the others, hears it."""
    missing = connection_lib.decode(frame, len(self._state.members))
    if missing:
      self._give_up(frame.tag, missing)
    elif self._state.rank == 0 and frame.tag in self._payloads:
      missing = json.dumps(self._missing(frame.tag)).encode()
      self._links[rank].send_frame(_Kind.LATE, frame.tag, missing)

  def _missing(self, tag: str) -> list[int]:
    there = self._payloads.get(tag, {})
    return [r for r in range(len(self._state.members)) if r not in there]

  def _contribute(self, rank: int, tag: str, payload: bytes) -> None:
    there = self._payloads.setdefault(tag, {})
    there[rank] = payload
    if len(there) < len(self._state.members):
      return
    del self._payloads[tag]
    payloads = [there[r] for r in sorted(there)]
    packed = b''.join(_LENGTH.pack(len(p)) + p for p in payloads)
    for link in self._links.values():
      link.send_frame(_Kind.RESULT, tag, packed)
    self._finish(tag, payloads)

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
