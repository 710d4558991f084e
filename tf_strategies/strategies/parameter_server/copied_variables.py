"""Copies of servers' variables that a worker trains by itself, while that is traced.

`TracedStep` answers reads and holds writes back, which no branch or loop of a step can
do for the step around it. A worker that trains by itself for a while has real
variables instead, for as long as the function runs: whatever a step does with a
variable of a server, in a branch, by rows or in an optimizer, it does with the copy,
since the variable says that its handle is the copy's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.strategies.parameter_server import step_access


class _Current(threading.local):
  copies: Copies | None = None


_current = _Current()


def current() -> Copies | None:
  """The copies that the step which this thread traces has, if any."""
  return None if tf.executing_eagerly() else _current.copies


class Copies:
  """What a worker has of variables of servers, in the graph of one function.

  Without `variables` it only looks which a step uses, and which it writes.
  """

  def __init__(
    self, variables: Sequence[Any] = (), values: Sequence[tf.Tensor] = ()
  ):
    self.variables = list(variables)  # In order of first use.
    self.added: set[int] = set()  # Those that were added to,
    self.assigned: set[int] = set()  # and written otherwise.
    self.access = None
    self._values = list(values)
    self._looks_only = not self.variables
    self._handles: dict[int, tf.Tensor] = {}
    self._graph: tf.Graph | None = None

  @contextlib.contextmanager
  def tracing(self) -> Iterator[None]:
    """Makes variables in the current graph that stand for those of servers."""
    self._graph = tf.compat.v1.get_default_graph()
    for variable, value in zip(self.variables, self._values, strict=True):
      handle = self._make(variable)
      assigned = tf.raw_ops.AssignVariableOp(resource=handle, value=value)
      # Also for what TensorFlow does not order: the gradient of a loop asks for the
      # variable's shape by the handle that the loop returns.
      with tf.control_dependencies([assigned]):
        self._handles[id(variable)] = _tf_internal.same_handle(handle)
    before, _current.copies = _current.copies, self
    try:
      # The graph of a function would remember these copies, and be called again.
      with _tf_internal.functions_inlined(self._called):
        yield
    finally:
      _current.copies = before

  def _called(
    self, function: _tf_internal.CalledFunction
  ) -> dict[int, tf.Tensor]:
    """Lets a concrete function read the copies."""
    step_access.check_writes(function)
    found = {}
    for handle in function.read:
      variable = function.variables.get(id(handle))
      if variable is not None:
        found[id(handle)] = variable.handle
    return found

  def handle_of(self, variable) -> tf.Tensor | None:
    """The handle of the copy of a variable; None of one that has none."""
    key = id(variable)
    if key not in self._handles and self._looks_only:
      self.variables.append(variable)
      self._handles[key] = self._make(variable)
    return self._handles.get(key)

  def note_write(self, variable, adds: bool) -> None:
    """Is told that the step writes a variable, or adds to it."""
    (self.added if adds else self.assigned).add(id(variable))

  def take_values(self) -> list[tf.Tensor]:
    """The values of all copies, which are gone afterwards."""
    values = []
    shapes = [
      op for op in self._graph.get_operations() if op.type == 'VariableShape'
    ]
    for variable in self.variables:
      handle = self._handles[id(variable)]
      value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype)
      value.set_shape(variable.shape)
      with tf.control_dependencies([value, *shapes]):
        tf.raw_ops.DestroyResourceOp(resource=handle)
      values.append(value)
    return values

  def _make(self, variable) -> tf.Tensor:
    with (
      self._graph.as_default(),
      tf.device(None),
      tf.control_dependencies(None),
    ):
      return _tf_internal.anonymous_variable(variable.dtype, variable.shape)
