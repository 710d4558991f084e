"""A process group over TCP."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterable

from tf_strategies.process_group import execution as execution_lib
from tf_strategies.process_group import group as group_lib
from tf_strategies.process_group import options as options_lib
from tf_strategies.process_group import state as state_lib
from tf_strategies.process_group.control import control_plane
from tf_strategies.process_group.tcp import link as link_lib
from tf_strategies.process_group.tcp import mesh
from tf_strategies.process_group.tcp import transport as transport_lib

# Between two looks at the group while a link is being made.
_CHECK_SECONDS = 0.05


class TcpProcessGroup(group_lib.ProcessGroup):
  """See the base class; made by `Rendezvous.form`."""

  name = 'tcp'
  elastic = True
  candidates = ('ring', 'direct')
  default_piece_bytes = 1 << 19

  def __init__(
    self,
    state: state_lib.GroupState,
    transport: transport_lib.Transport,
    control: control_plane.ControlPlane,
    options: options_lib.GroupOptions,
    connect: Callable[[Iterable[int]], concurrent.futures.Future],
    on_end: Callable[[], None] = lambda: None,
  ):
    super().__init__(state, control, options)
    self._transport = transport
    self._connect = connect
    self._on_end = on_end
    state.on_failure(transport.shut_down)

  @property
  def bytes_sent(self) -> int:
    """See base class."""
    return self._transport.bytes_sent

  def paths(self) -> dict[int, str]:
    """See base class."""
    return self._transport.paths()

  def _leave(self, has_ended: bool) -> None:
    """See base class."""
    self._control.close(has_ended)
    if self._state.failure is None and self._lock.acquire(blocking=False):
      try:
        self._transport.finish()
      finally:
        self._lock.release()
    # Wakes a collective in another thread, which gives the lock back.
    self._transport.shut_down()
    with self._lock:
      self._transport.close()
    self._on_end()

  def _move(self, execution, collective, operation, deadline) -> None:
    plan = execution.plan
    missing = self._transport.missing({*plan.sends, *plan.receives})
    if missing:
      self._make_links(missing, deadline)
    header = link_lib.Header(operation.sequence, collective.digest)
    self._transport.run(execution, header, deadline, self._state.departed)

  def _make_links(self, ranks: set[int], deadline: float) -> None:
    future = self._connect(ranks)
    try:
      while not concurrent.futures.wait([future], _CHECK_SECONDS).done:
        self._check()
        if time.monotonic() >= deadline:
          raise execution_lib.DeadlineError(sorted(ranks))
      future.result()
    except mesh.LinkError as e:
      raise execution_lib.LinkClosedError(e.rank, e.why) from e
    finally:
      future.cancel()
    # A group that has ended meanwhile has not taken them.
    self._check()
    for rank in self._transport.missing(ranks):
      raise execution_lib.LinkClosedError(rank)
