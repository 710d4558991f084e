"""What a step on a worker leaves on the servers, and the function that applies it.

A worker writes no variable. Its task has slots: variables of its own on the servers. It
puts the gradients of the step there, what the step wrote to its copies of variables, and
the numbers that it reports. Then the chief calls an `ApplyFunction`, which applies the
slots of one task, or of several that share the rows of a batch. No other variable changes
before. If a worker is lost, its task is repeated with other slots.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.keras.tables import row_updates
from tf_strategies.strategies.parameter_server import (
  batch_message,
  packing,
  traced_step,
  variables,
)

_ROWS = tf.TensorSpec([], tf.float32)


class SlotLayout:
  """Which tensors of a traced step are in which slots.

  First come the gradients, then the writes, then the numbers. If tasks share rows, their
  number follows, to each server.

  Attributes:
    parts: server and spec of each tensor.
    specs: specs of the messages to each server; empty for a step that changes nothing
      and returns no numbers.
    handles: specs of the handles of the slots of a task.
  """

  def __init__(self, traced: traced_step.TracedStep, has_rows: bool):
    self._has_rows = has_rows
    self.parts: list[tuple[int, tf.TensorSpec]] = [
      (part.server, spec)
      for gradient in traced.gradients
      for part in gradient.variable.parts
      for spec in gradient.specs_of(part)
    ]
    self.parts += [
      (part.server, tf.TensorSpec(part.shape, part.dtype))
      for write in traced.writes
      for part in write.variable.parts
    ]
    # By server: numbers of its parts, and how they travel.
    self._sent: dict[int, tuple[list[int], packing.Packing]] = {}
    self.specs: dict[int, list[tf.TensorSpec]] = {}
    if traced.outputs.are_numbers:
      self.parts += [(0, spec) for spec in traced.outputs.specs]
    for server in sorted({server for server, _ in self.parts}):
      there = [i for i, (place, _) in enumerate(self.parts) if place == server]
      specs = [self.parts[i][1] for i in there]
      packed = packing.Packing(specs + [_ROWS] * has_rows)
      self._sent[server], self.specs[server] = (there, packed), packed.specs
    count = sum(map(len, self.specs.values()))
    self.handles = [tf.TensorSpec([], tf.resource)] * count

  @functools.cached_property
  def key(self) -> str:
    """Returns the same for layouts whose slots one function can apply."""
    return str((self.parts, self._has_rows))

  def messages(self, server: int, tensors, rows) -> list[tf.Tensor]:
    """Returns the messages to a server, with its tensors and the number of rows."""
    there, packed = self._sent[server]
    sent = [tensors[i] for i in there]
    return packed.pack(sent + [rows] * self._has_rows)

  def take(self, server: int, handles) -> tuple[dict[int, tf.Tensor], Any]:
    """Empties slots on a server; returns their parts by index, and the row count."""
    there, packed = self._sent[server]
    found = packed.unpack(
      [_taken(next(handles), spec) for spec in packed.specs]
    )
    rows = found.pop() if self._has_rows else None
    return dict(zip(there, found, strict=True)), rows


def _taken(handle: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
  """Reads a slot and empties it.

  Then the optimizer has the only reference to a gradient, and can write its own results
  into the same memory.
  """
  value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=spec.dtype)
  emptied = tf.raw_ops.AssignVariableOp(
    resource=handle, value=tf.zeros([0], spec.dtype)
  )
  with tf.control_dependencies([emptied]):
    value = tf.identity(value)
  value.set_shape(spec.shape)
  return value


class Slots:
  """The variables on the servers that one task writes into."""

  def __init__(self, specs: dict[int, list[tf.TensorSpec]]):
    # TensorFlow aborts a task that is given the handle of a variable of which one
    # dimension is unknown; all unknown is fine.
    self._variables = [
      variables.zeros_on(
        server,
        [0],
        spec.dtype,
        shape=tf.TensorShape(None),
        validate_shape=False,
      )
      for server, messages in specs.items()
      for spec in messages
    ]
    self.handles = [v.handle for v in self._variables]


class WorkerFunction:
  """Runs a traced step on copies of its variables, and fills slots.

  If several tasks share the rows of a step, each sends its number of rows. `powers`
  says how to combine their results; None if tasks share no rows.
  """

  def __init__(
    self,
    traced: traced_step.TracedStep,
    batch: batch_message.BatchLayout,
    powers: traced_step.Powers | None,
  ):
    self.traced, self.powers = traced, powers
    self._batch = batch
    self.layout = SlotLayout(traced, has_rows=powers is not None)
    self._function = traced_step.concrete(
      self._trace, batch.argument, *self.layout.handles
    )

  def __call__(self, worker: int, argument: tf.Tensor, slots: Slots) -> Any:
    """Runs it on a worker; returns the results that are not in the slots."""
    with tf.device(f'/job:worker/replica:0/task:{worker}'):
      return _tf_internal.call_with(self._function, [argument, *slots.handles])

  def _trace(self, argument, *handles):
    batch = self._batch.read(argument)
    copies = self._copies()
    # Rows of tables are read after the variables, as one device would in a step.
    outputs, gradients, added = _tf_internal.call_with(
      self.traced.function,
      batch_message.components(batch),
      {key: handle for key, (handle, _) in copies.items()},
    )
    tensors = [*self._by_part(gradients), *self._written(copies, added)]
    if self.traced.outputs.are_numbers:
      tensors += outputs
      outputs = []
    rows = None
    if self.powers:
      rows = tf.cast(batch_message.rows_of(batch), tf.float32)
    remaining = iter(handles)
    for server in self.layout.specs:
      messages = self.layout.messages(server, tensors, rows)
      with tf.device(variables.server_device(server)):
        for message in messages:
          tf.raw_ops.AssignVariableOp(resource=next(remaining), value=message)
    return list(map(tf.identity, outputs))

  def _copies(self) -> dict[int, tuple[tf.Tensor, tf.Tensor]]:
    """Returns, by handle, a copy's handle and its value before the step."""
    copied = self.traced.copied
    values = iter(
      packing.fetch([part for each in copied for part in each.parts])
    )
    found = {}
    for variable in copied:
      fetched = [next(values) for _ in variable.parts]
      whole = tf.concat(fetched, 0)
      handle = _tf_internal.temporary_variable(whole)
      found[id(variable.stand_in.handle)] = handle, whole
    return found

  def _by_part(self, tensors) -> list[tf.Tensor]:
    """Returns the tensors of gradients, for each part of their variables."""
    remaining, found = iter(tensors), []
    for gradient in self.traced.gradients:
      own = [next(remaining) for _ in gradient.specs]
      whole = tf.IndexedSlices(*own) if gradient.is_sparse else own[0]
      for each in gradient.variable.split(whole):
        found += [each.values, each.indices] if gradient.is_sparse else [each]
    return found

  def _written(self, copies, added) -> list[tf.Tensor]:
    """Returns what the step has written to parts of variables, or added to them."""
    found = []
    for write in self.traced.writes:
      variable = write.variable
      if write.added is not None:
        whole = tf.add_n([added[i] for i in write.added])
      else:
        handle, before = copies[id(variable.stand_in.handle)]
        whole = tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype)
        if write.adds:
          # An infinite value that stays has no difference.
          is_equal = tf.equal(whole, before)
          whole = tf.where(is_equal, tf.zeros_like(whole), whole - before)
      whole.set_shape(variable.shape)
      found += variable.split(whole)
    return found


class ApplyFunction:
  """Applies the slots of the tasks of one step.

  Args:
    step: the step.
    function: what each task computes.
    count: number of tasks.
    in_replica: calls a function in the strategy's replica context.
    reports: whether it returns the `results` of a step that has them.
  """

  def __init__(
    self,
    step,
    function: WorkerFunction,
    count: int,
    in_replica: Callable[..., Any],
    reports: bool,
  ):
    self._step, self._worker, self._count = step, function, count
    self._in_replica, self._reports = in_replica, reports
    self._function = traced_step.concrete(
      self._trace, *function.layout.handles * count
    )

  def __call__(self, tasks: Sequence[Slots]) -> list[tf.Tensor]:
    """Applies the contents of these slots; returns the numbers of the step."""
    handles = [h for slots in tasks for h in slots.handles]
    return _tf_internal.call_with(self._function, handles)

  def _trace(self, *handles):
    # Of each part, its values in the tasks, and their weights.
    parts: dict[int, tuple[list, list]] = {}
    each = len(handles) // self._count
    tasks = [
      iter(handles[i * each : (i + 1) * each]) for i in range(self._count)
    ]
    layout = self._worker.layout
    for server in layout.specs:
      with tf.device(variables.server_device(server)):
        read = [layout.take(server, slots) for slots in tasks]
        weights = _weights([rows for _, rows in read])
        for index in read[0][0]:
          parts[index] = [found[index] for found, _ in read], weights
    with tf.device(variables.server_device(0)), variables.applying():
      return _sent(self._apply(iter([parts[i] for i in sorted(parts)])))

  def _apply(self, parts):
    traced, powers = self._worker.traced, self._worker.powers
    of_gradients = iter(powers.gradients if powers else ())
    for optimizer, gradients, targets, begin in traced.calls:
      combined = []
      for gradient in gradients:
        if gradient is None:
          combined.append(None)
          continue
        power = next(of_gradients, 0)
        variable = gradient.variable
        combined.append(
          variable.join(
            [_gradient(part, gradient, parts, power) for part in variable.parts]
          )
        )
      self._in_replica(optimizer.apply, combined, targets)
      _check_reads(
        optimizer, [w.variable for w in traced.writes if w.begin < begin]
      )
    for write in traced.writes:
      power = powers.writes[id(write.variable)] if powers else 0
      for part in write.variable.parts:
        with tf.device(part.device):
          value = _combined(*next(parts), power)
          assign = part.assign_add if write.adds else part.assign
          assign(value, read_value=False)
    if not traced.outputs.are_numbers:
      return []
    if self._step.results is not None:
      return _results(self._step) if self._reports else []
    of_outputs = powers.outputs if powers else itertools.repeat(0)
    found = []
    for (values, weights), power in zip(parts, of_outputs, strict=False):
      exact = [tf.cast(value, tf.float64) for value in values]
      found.append(tf.cast(_combined(exact, weights, power), values[0].dtype))
    return found


def results_function(step) -> Callable[[], list[tf.Tensor]]:
  """Returns a function that reads the `results` of a step from the servers."""

  def read():
    with tf.device(variables.server_device(0)):
      return _sent(_results(step))

  return traced_step.concrete(read)


def _results(step) -> list[tf.Tensor]:
  """Returns the results that are computed from variables."""
  return list(map(tf.convert_to_tensor, tf.nest.flatten(step.results())))


def _sent(numbers: Sequence[tf.Tensor]) -> list[tf.Tensor]:
  """Returns tensors of a server on the chief."""
  packed = packing.Packing([tf.TensorSpec(t.shape, t.dtype) for t in numbers])
  messages = packed.pack(numbers)
  # A tensor that is read from another task leaves 3 kB there for good: a kernel
  # with the number of the copy.
  with tf.device(traced_step.COORDINATOR):
    return packed.unpack(list(map(tf.identity, messages)))


def _check_reads(optimizer: Any, written: Sequence[Any]) -> None:
  """Raises if `apply` reads variables here that the step had written before it."""
  captures = tf.compat.v1.get_default_graph().captures
  read = {id(external) for external, _ in captures}
  for variable in written:
    if any(id(part.handle) in read for part in variable.parts):
      raise errors.UnsupportedOptionError(
        f'{variable.name!r}, which {type(optimizer).__name__}.apply reads (by '
        'its learning rate, or a constraint)',
        'a variable that the step does not write before optimizer.apply',
        'write it after optimizer.apply, or between steps',
      )


def _gradient(part, gradient: traced_step.Gradient, parts, power):
  """Combines the gradients of the tasks for a part of a variable."""
  values, weights = next(parts)
  if power:
    weights = [None] * len(weights)
  with tf.device(part.device):
    if not gradient.is_sparse:
      return _combined(values, weights, power)
    values, (rows, _) = list(map(_scaled, values, weights)), next(parts)
    # Rows that were looked up apart stay apart, as on one device, since Adam does
    # not make the same of two gradients and of their sum.
    if gradient.is_of_batch:
      values, rows = tf.concat(values, 0), tf.concat(rows, 0)
    else:
      values, rows = tf.add_n(values), rows[0]
    shape = tf.constant(part.shape.as_list(), rows.dtype)
    slices = tf.IndexedSlices(values, rows, shape)
    is_once = gradient.is_of_batch and gradient.is_unique
    return row_updates.summed(slices) if is_once else slices


def _weights(rows) -> list[tf.Tensor | None]:
  """The part of the step's rows in each task; None for all of them."""
  if len(rows) == 1:
    return [None]
  rows = [tf.cast(r, tf.float64) for r in rows]
  total = tf.add_n(rows)
  return [r / total for r in rows]


def _scaled(value, weight):
  if weight is None:
    return value
  return value * tf.cast(weight, value.dtype)


def _combined(values, weights, power: int) -> tf.Tensor:
  """Returns the sum of values (power 1) or their weighted mean (power 0).

  Values that are no floats and have the power 0 do not depend on the rows, so it
  returns the first.
  """
  if power:
    return tf.add_n(values)
  dtype = values[0].dtype
  if weights[0] is None or not (dtype.is_floating or dtype.is_complex):
    return values[0]
  return tf.add_n(list(map(_scaled, values, weights)))
