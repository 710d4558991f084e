"""Traces a worker's step: its reads and writes of variables on servers.

A step on a worker is a TensorFlow function whose variables are on the servers.
Left alone, every read and every write is a message of its own, and a worker
that dies in the middle leaves half of its writes behind. So a step is traced
twice. The first trace only looks which variables are read where. In the second

* variables that are read outside of the optimizer's update are fetched at the
  start, the small ones in one message a server: the step computes on one state;
* writes outside of the update (metrics, counters, moving statistics) stay in
  the step, where later reads see them, and are sent at its end in one message
  a server, after the updates: sums as sums, so that workers do not overwrite
  each other;
* the optimizer's update runs on the server that holds the variable.

A step writes on a server in few units. One unit has the updates of small variables
and of rows, one the update of each large variable, and the last one the held writes. A
repeated step writes each unit at most once.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.strategies.parameter_server import (
  packing,
  step_access,
  units,
)


class _Current(threading.local):
  step: TracedStep | None = None


_current = _Current()


def current() -> TracedStep | None:
  """The step that this thread traces, if any."""
  return None if tf.executing_eagerly() else _current.step


@dataclasses.dataclass
class _Update:
  """An optimizer's update that waits for the others on its server."""

  target: Any  # A variable, or a shard of a table.
  is_small: bool
  run: Callable[[], Any]


class TracedStep:
  """Answers the variables' reads and writes while one step is traced.

  Without `access` this is the first trace.
  """

  def __init__(
    self, access: step_access.Access | None = None, is_share: bool = False
  ):
    self.access = step_access.Access() if access is None else access
    self.is_share = is_share  # Of the rows of a synchronous step.
    # None where writes harm nobody: to slots that are used once.
    self.ticket: units.Ticket | None = None
    self._units = units.Units()
    # In a merge call: what updates have been asked for, and how many so far.
    self._waiting: list[_Update] = []
    self._merged_in: tf.Graph | None = None
    self._num_updates = self._update = 0
    self.update_server: int | None = None
    self.looks_only = access is None  # Its graph is not run.
    self.applied: Sequence[Any] = ()  # Calls of `apply` that are only noted.
    # Handles, and how many calls and written variables there were before.
    self.noted_reads: list[tuple[tf.Tensor, int, int]] = []
    self.row_writes: list[tf.Variable] = []
    self._graph = None
    self._snapshot: dict[int, tf.Tensor] = {}
    self._held: dict[int, step_access.Write] = {}
    # Variables written or read in place; their values read since the last write.
    self._direct: set[int] = set()
    self._read_since: dict[int, list[tf.Tensor]] = collections.defaultdict(list)
    self._updates = 0  # Of the optimizer's, that are going on.
    # On servers, of the values that it has sent there.
    self.copies = packing.Copies()
    self._first_operation = 0

  @contextlib.contextmanager
  def tracing(self, after: Sequence[tf.Tensor] = ()) -> Iterator[None]:
    """Makes this the current step of the thread, in the current graph."""
    before, _current.step = _current.step, None
    self._graph = tf.compat.v1.get_default_graph()
    self._first_operation = len(self._graph.get_operations())
    if not self.looks_only:
      with tf.control_dependencies(list(after)):
        self._snapshot = self._fetch()
    _current.step = self
    try:
      # A function's graph is of the trace that made it: reads and writes are not.
      with _tf_internal.functions_inlined(self._called):
        yield
    finally:
      _current.step = before

  def _called(self, function: _tf_internal.CalledFunction) -> dict:
    if not self._units.is_open:  # Else it is the unit.
      self._flush()
      for handle in function.read:
        self.note_read(handle)
      step_access.check_writes(function)
      step_access.check_reads(
        function, [w.variable for w in self.held_writes()]
      )
    return {}

  def note_read(self, handle: tf.Tensor) -> None:
    """Notes a read in the first trace."""
    before = len(self.applied), len(self.access.written)
    self.noted_reads.append((handle, *before))

  def _fetch(self) -> dict[int, tf.Tensor]:
    """Reads all variables that the step needs, by server."""
    variables = [
      variable
      for key, variable in self.access.reads.items()
      if key not in self.access.nested_writes
    ]
    return dict(zip(map(id, variables), packing.fetch(variables), strict=True))

  def begin(self, ticket: units.Ticket) -> None:
    """Sets the ticket that the step shows to servers when it writes.

    A repeated step that writes in a branch or a loop gets the whole numbers that the
    first attempt read. So it makes the same choices.
    """
    self.ticket = ticket
    numbers = self.access.choices()
    if not numbers:
      return
    flat = []
    for variable in numbers:
      found = self._snapshot.get(id(variable))
      found = variable.read_directly() if found is None else found
      flat.append(tf.cast(tf.reshape(found, [-1]), tf.int64))
    remembered = ticket.remember(tf.concat(flat, 0))
    remembered = tf.split(remembered, [each.shape[0] for each in flat])
    for variable, value in zip(numbers, remembered, strict=True):
      value = tf.cast(tf.reshape(value, variable.shape), variable.dtype)
      self._snapshot[id(variable)] = value

  def _copy_of(self, key: int) -> tf.Tensor | None:
    """Returns the value fetched at the start; None if it may have changed since."""
    if key in self._direct or (
      key in self.access.nested_writes and self.is_nested()
    ):
      return None
    return self._snapshot.get(key)

  def is_nested(self) -> bool:
    """Returns whether the trace is inside of a branch or a loop of the step."""
    return tf.compat.v1.get_default_graph() is not self._graph

  def read(self, variable) -> tf.Tensor | None:
    """The value to use; None means that the server must be asked here."""
    self._flush()
    key = id(variable)
    if self.looks_only:
      self.note_read(variable.handle)
      if self.update_server is None:
        self.access.note_number(variable, self.is_nested())
      if self.update_server != variable.server:
        self.access.reads.setdefault(key, variable)
        if self.update_server is not None:
          self.access.update_reads.setdefault(key, variable)
          self.access.elsewhere[self._update].add(key)
      return None
    if key in self._held:
      return self.here(self._held[key].value)
    if self.update_server == variable.server:
      return None
    copy = self._copy_of(key)
    if copy is None and self._units.is_open:
      # A call on a server has no other server's variables.
      return self._units.before(variable.device, variable.read_directly)
    if copy is None and self.update_server is None:
      return self._read_once(variable)
    return self.here(copy)

  def _read_once(self, variable) -> tf.Tensor:
    """Reads a variable once between two writes of the step, also in branches.

    A second read might return another worker's write. Then a step could multiply its
    loss by one scale and divide the gradient by another.
    """
    graph = tf.compat.v1.get_default_graph()
    while graph is not self._graph and _tf_internal.is_function_of_its_own(
      graph
    ):
      graph = graph.outer_graph  # What XLA compiles cannot read on a server.
    for tensor in self._read_since[id(variable)]:
      if _tf_internal.runs_once(graph, tensor.graph):
        return tensor
    with graph.as_default():
      tensor = variable.read_directly()
    self._read_since[id(variable)].append(tensor)
    return tensor

  @property
  def looks_up(self) -> bool:
    """Returns whether rows that are read here are rows of the batch: not in an update."""
    return self.update_server is None and not self.is_nested()

  def at_home(self, tensor: tf.Tensor) -> contextlib.AbstractContextManager:
    """Enters the graph of a tensor, to read it outside of a branch or a loop.

    The gradient of a branch reaches only tensors that come from outside. So the read
    must be outside, where tapes record it.
    """
    is_here = tensor.graph is tf.compat.v1.get_default_graph()
    return contextlib.nullcontext() if is_here else tensor.graph.as_default()

  def home_of(self, variables: Sequence[tf.Variable]) -> tf.Graph | None:
    """The step's own graph, if they can be read there, outside of this branch."""
    is_written = any(id(v) in self.access.nested_writes for v in variables)
    return self._graph if self.is_nested() and not is_written else None

  def here(self, tensor: tf.Tensor | None) -> tf.Tensor | None:
    """The copy of a tensor on the server that an update runs on, if any."""
    if self.update_server is None or tensor is None:
      return tensor
    return self.copies.of(tensor, self.update_server)

  def on_server(
    self,
    server: int,
    write: Callable[[], Any] | units.LockedWrite,
    ticket: tf.Tensor | None = None,
    is_last: bool = False,
  ) -> Any:
    """Writes as `units.Units.write`; within a unit, writes immediately."""
    if self.ticket is None or self._units.is_open:
      return write.do() if isinstance(write, units.LockedWrite) else write()
    if ticket is None:
      ticket = self.copies.of(self.ticket.tensor, server)
    return self._units.write(
      self.ticket, server, write, self._graph, ticket, is_last
    )

  @contextlib.contextmanager
  def merging(self) -> Iterator[None]:
    """Groups the updates of a merge call, which run at its end."""
    before = self._waiting, self._merged_in
    self._waiting, self._merged_in = [], tf.compat.v1.get_default_graph()
    try:
      yield
      self._flush()
    finally:
      self._waiting, self._merged_in = before

  def update(
    self, variable, run: Callable[[], Any], inputs: Sequence[Any], waits: bool
  ) -> Any:
    """An optimizer's update by `run`, on its server; maybe later if it `waits`."""
    number, self._num_updates = self._num_updates, self._num_updates + 1
    if self.looks_only:
      self.access.elsewhere[number] = set()
      with self._updating(variable, number):
        result = run()
      if result is not None:
        self.access.direct.add(number)
      return result
    # A call on a server has no other server's variables.
    written = self.access.updated.keys() | self.access.nested_writes.keys()
    if (
      not waits
      # A branch or a loop of the merge call runs inside the merge call.
      or self._merged_in is not tf.compat.v1.get_default_graph()
      or self.ticket is None
      or number in self.access.direct
      or self.access.elsewhere.get(number, set()) & written
    ):
      # What waits comes before it. Its first read would do that in the middle of
      # it, where an optimizer shows its own rows in place of its slots.
      self._flush()
      with self._updating(variable):
        return run()
    # So are the rows that a batch has of a table. Theirs is the last gradient that a
    # step has: to wait for the others costs nothing, and a call of their own does.
    tensors = [t for t in inputs if isinstance(t, tf.Tensor)]
    is_small = all(packing.is_small(t.shape, t.dtype) for t in tensors)

    def run_on_server():
      with self._updating(variable):
        run()

    self._waiting.append(_Update(variable, is_small, run_on_server))
    return None

  def _flush(self) -> None:
    """Does the updates that wait: those of little as one unit a server."""
    if not self._waiting or self._units.is_open:
      return
    groups = collections.defaultdict(list)
    for number, update in enumerate(self._waiting):
      is_alone = not update.is_small or isinstance(update.target, units.Lock)
      group = number if is_alone else None
      groups[update.target.server, group].append(update)
    self._waiting = []
    with self._merged_in.as_default():
      for (server, _), updates in groups.items():
        # What the step holds must be there before a unit that may not be written.
        for key, write in list(self._held.items()):
          if key in self.access.updated and write.variable.server == server:
            self._write_here(write.variable)
        if isinstance(updates[0].target, units.Lock):
          updates[0].run()  # It is one unit itself.
        else:
          self.on_server(server, lambda u=updates: [each.run() for each in u])

  def update_inputs(self) -> list[tf.Tensor]:
    """Returns the present values that updates on other servers will read."""
    found = [] if self.ticket is None else [self.ticket.tensor]
    for key in self.access.update_reads:
      held = self._held.get(key)
      value = held.value if held else self._snapshot.get(key)
      if value is not None and key not in self._direct:
        found.append(value)
    return found

  def held_of(self, server: int) -> list[tf.Tensor]:
    """Returns the held writes of a server, which travel with the gradients."""
    if self.ticket is None:
      return []
    return [
      write.to_send()
      for write in self._held.values()
      if write.variable.server == server
    ]

  def write(self, variable, value, delta=None) -> bool:
    """Holds a write back, or returns False: it must be done here."""
    self._flush()
    key = id(variable)
    if self.looks_only:
      return self._look_at_write(variable, value)
    if (
      self.is_nested()
      or key in self.access.nested_writes
      or key in self._direct
      or self.update_server is not None
    ):
      self._write_here(variable)
      return False
    before = self._held.get(key)
    old = before.value if before else self._snapshot.get(key)
    if value is None:
      if old is None:
        old = variable.read_directly()
      value = old + delta
    elif delta is None and old is not None:
      delta = step_access.additive_delta(value, old)
    if before is not None:
      both = before.delta is not None and delta is not None
      delta = before.delta + delta if both else None
    self._held[key] = step_access.Write(variable, value, delta)
    return True

  def touch_rows(self, variable, writes: bool) -> tf.Tensor | None:
    """Prepares an op on some rows of a variable, which runs on its server.

    Returns the variable's value if the step holds a newer one than the server.
    """
    self._flush()
    key = id(variable)
    if self.looks_only:
      if writes:
        self.row_writes.append(variable)
      else:
        self.note_read(variable.handle)
      if self._updates and variable.server != self.update_server:
        self.access.direct.add(self._update)
      if writes and self.is_nested():
        self._look_at_write(variable, 0)
      elif writes and self._updates:
        self.access.updated.setdefault(key, variable)
      return None
    if writes:
      self._write_here(variable)
      return None
    if key in self._held:
      return self._held[key].value
    return None if self.update_server is not None else self._copy_of(key)

  def _look_at_write(self, variable, value) -> bool:
    self.access.written.setdefault(id(variable), variable)
    if self._updates:
      self.access.updated.setdefault(id(variable), variable)
      if variable.server != self.update_server:
        self.access.direct.add(self._update)
    if self.is_nested():
      self.access.nested_writes.setdefault(id(variable), variable)
    elif value is None and self.update_server != variable.server:
      self.access.reads.setdefault(id(variable), variable)
    return False

  def _write_here(self, variable) -> None:
    """Sends a held write, and lets the step use only the server's copy from now on."""
    key = id(variable)
    held = self._held.pop(key, None)
    self._direct.add(key)
    self._read_since.pop(key, None)
    if held is not None:
      self._send_writes([held], [])

  @contextlib.contextmanager
  def _updating(self, variable, number: int = 0) -> Iterator[None]:
    """Marks the trace of an optimizer's update, which runs on the variable's server."""
    before, self._update = self.update_server, number
    self.update_server = variable.server
    self._updates += 1
    try:
      yield
    finally:
      self._updates -= 1
      self.update_server = before

  def held_writes(self) -> list[step_access.Write]:
    """The writes that the step holds back, in order of first write."""
    return list(self._held.values())

  def commit(self) -> list[tf.Operation]:
    """Sends the held writes, server 0 last; returns the last ops."""
    done = self._writes_done()
    by_server = collections.defaultdict(list)
    for write in self._held.values():
      by_server[write.variable.server].append(write)
    self._held = {}
    last = by_server.pop(0, [])
    for writes in by_server.values():
      done.append(self._send_writes(writes, done))
    return [self._send_writes(last, done, is_last=True)]

  def _writes_done(self) -> list[tf.Operation]:
    """Returns one op for each device that runs after the writes of the step so far."""
    by_device = collections.defaultdict(list)
    for op in self._graph.get_operations()[self._first_operation :]:
      # pylint: disable-next=protected-access
      if op.op_def.is_stateful and op.type not in _READS:
        by_device[op.device].append(op)
    groups = []
    for device, ops in by_device.items():
      with tf.device(device):
        groups.append(tf.group(*ops))
    return groups

  def _send_writes(
    self, writes: Sequence[step_access.Write], after, is_last: bool = False
  ) -> tf.Operation:
    """Sends writes of variables on one server, small ones in one message."""
    server = writes[0].variable.server if writes else 0
    tensors = [write.to_send() for write in writes]
    ticket = None
    if self.ticket is None:
      tensors = packing.send(tensors, writes[0].variable.device)
    else:
      *tensors, ticket = self.copies.sent_once(
        [*tensors, self.ticket.tensor], server, self.ticket.device(server)
      )

    def write_all():
      done = []
      for write, tensor in zip(writes, tensors, strict=True):
        value = (tensor, None) if write.delta is None else (None, tensor)
        done.append(write.variable.write_directly(*value))
      return tf.group(*done)

    with tf.control_dependencies(after):
      return self.on_server(server, write_all, ticket, is_last)


_READS = frozenset(
  (
    'ReadVariableOp',
    'ResourceGather',
    'ResourceGatherNd',
    'VariableShape',
    'Placeholder',
    'StatelessIf',
    'StatelessWhile',
  )
)
