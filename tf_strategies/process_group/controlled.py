"""What groups share whose ranks watch each other over a control plane."""

from __future__ import annotations

import collections
import threading
from typing import Any

from tf_strategies import errors
from tf_strategies.process_group import buffers, group
from tf_strategies.process_group import options as options_lib
from tf_strategies.process_group import state as state_lib
from tf_strategies.process_group.control import control_plane
from tf_strategies.process_group.network import protocol


class ControlledGroup(group.ProcessGroup):
  """A group with a control plane; how arrays move is the subclass's.

  Args:
    state: what the group's threads share.
    plane: the control plane; None in a group of one that has none.
    options: of the group.
  """

  def __init__(
    self,
    state: state_lib.GroupState,
    plane: control_plane.ControlPlane | None,
    options: options_lib.GroupOptions,
  ):
    self._state = state
    self._control = plane
    self._options = options
    self._closed = False
    self._lock = threading.RLock()
    self._agreements: collections.Counter[str] = collections.Counter()
    self._agreements_lock = threading.Lock()
    self._pool = buffers.Pool()

  @property
  def rank(self) -> int:
    """See base class."""
    return self._state.rank

  @property
  def members(self) -> tuple[group.Member, ...]:
    """See base class."""
    return self._state.members

  @property
  def generation(self) -> int:
    """See base class."""
    return self._state.generation

  @property
  def failure(self) -> errors.Error | None:
    """See base class."""
    verdict = self._state.verdict
    return None if verdict is None else verdict.exception()

  def exchange(
    self, tag: str, payload: bytes, timeout_seconds: float | None = None
  ) -> list[bytes]:
    """See base class."""
    self._check()
    if len(payload) > protocol.MAX_PAYLOAD_BYTES or not protocol.check_tag(tag):
      raise errors.UnsupportedOptionError(
        f'exchange of {len(payload)} bytes with a tag of {len(tag)} characters',
        f'{protocol.MAX_PAYLOAD_BYTES} bytes with a tag of 128 characters',
        'send arrays with all_gather or broadcast',
      )
    if self.world_size == 1:
      return [bytes(payload)]
    if timeout_seconds is None:
      timeout_seconds = self._options.collective_timeout_seconds
    with self._state.exchanging(tag):
      return self._control.exchange(tag, bytes(payload), timeout_seconds)

  def describe(self) -> dict[str, Any]:
    """See base class."""
    return self._state.describe()

  def describe_ranks(
    self, timeout_seconds: float = 1.0
  ) -> dict[int, dict[str, Any]]:
    """See base class."""
    if self._control is None or self._closed:
      return {self.rank: self.describe()}
    return self._control.describe_ranks(timeout_seconds)

  def annotate(self, note: str) -> None:
    """See base class."""
    self._state.note = note

  def pending_joiners(self) -> tuple[int, ...]:
    """See base class; nobody can join a group that is not elastic."""
    if self._control is None or not self.elastic:
      return ()
    return self._control.joiners()

  def abort(self, reason: str) -> None:
    """See base class."""
    if self._closed:
      return
    verdict = self._state.lost(self.rank, f'aborted the group ({reason})')
    if self._control is None:
      self._state.fail(verdict)
    else:
      self._control.convict(verdict)

  def _next_agreement(self, what: str) -> int:
    with self._agreements_lock:
      self._agreements[what] += 1
      return self._agreements[what]

  def _check(self) -> None:
    self._state.check()
    if self._closed:
      raise errors.WorkerUnavailableError(
        'This process has closed its group. Form a new one.'
      )
