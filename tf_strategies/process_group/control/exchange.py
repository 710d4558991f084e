"""Small payloads of all ranks to all ranks, through rank 0."""

from __future__ import annotations

import base64
import concurrent.futures
from collections.abc import Mapping
from typing import Any

from tf_strategies import errors
from tf_strategies.process_group import state as state_lib
from tf_strategies.process_group.network import connection as connection_lib
from tf_strategies.process_group.network import protocol


class Exchanges:
  """Carries out the exchanges of this rank, and on rank 0 those of all ranks.

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
    # On rank 0: by tag, the payloads that have come, as text.
    self._payloads: dict[str, dict[int, str]] = {}

  def begin(
    self, tag: str, payload: bytes, future: concurrent.futures.Future
  ) -> None:
    """Sends this rank's payload; `future` gets all ranks' payloads, or an error."""
    if self._state.failure is not None or self._state.departed:
      future.set_exception(self._failure())
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
      message = {'tag': tag, 'payload': base64.b64encode(payload).decode()}
      if self._state.rank == 0:
        self.on_contribution(0, message)
      else:
        self._links[0].send(protocol.Kind.EXCHANGE, message)

  def fail(self) -> None:
    """Ends all calls, because the group failed or a rank left."""
    calls, self._state.exchanges = self._state.exchanges, {}
    for future in calls.values():
      future.set_exception(self._failure())
    self._payloads.clear()

  def on_contribution(self, rank: int, message: dict[str, Any]) -> None:
    """Takes a rank's payload, on rank 0."""
    tag = message['tag']
    there = self._payloads.setdefault(tag, {})
    there[rank] = message['payload']
    if len(there) < len(self._state.members):
      return
    del self._payloads[tag]
    result = {'tag': tag, 'payloads': [there[r] for r in sorted(there)]}
    for link in self._links.values():
      link.send(protocol.Kind.RESULT, result)
    self.on_result(0, result)

  def on_result(self, rank: int, message: dict[str, Any]) -> None:
    """Takes the payloads of all ranks."""
    # A call that was too late has failed with the group.
    if future := self._state.exchanges.pop(message['tag'], None):
      future.set_result([base64.b64decode(p) for p in message['payloads']])

  def _failure(self) -> errors.Error:
    if self._state.failure is not None:
      return self._state.failure.exception()
    # The first: those after it may have left because of it.
    departed = next(iter(self._state.departed), self._state.rank)
    return self._state.left(departed).exception()
