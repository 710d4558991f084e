"""What a microbatch of a synchronous step leaves on the servers.

A worker that computes a microbatch writes no variable: its gradients, and what
it would write (metrics, moving statistics), go into slots on the servers that
hold the variables. When enough microbatches are done, `ApplyFunction` adds them
up there and applies them at once. One that is lost or late has changed nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import _keras_internal, _tf_internal
from tf_strategies.checkpoint import model_state
from tf_strategies.keras import row_updates
from tf_strategies.strategies.parameter_server import (
  batch_message,
  packing,
  step_access,
  traced_step,
  variables,
  worker_function,
)


@dataclasses.dataclass
class Contents:
  """Everything that a traced microbatch has."""

  calls: list  # Of `optimizer.apply`: (optimizer, gradients, variables).
  writes: list[step_access.Write]  # That the step held back.
  numbers: tf.Tensor  # The reported numbers, float64 [count].
  rows: tf.Tensor  # Of its batch, float32 scalar.
  argument: tf.Tensor  # The message with the batch, or where it is read.

  def tensors(self) -> list[tuple[int, tf.Tensor, bool]]:
    """Returns all tensors in the order in which `ApplyFunction` reads them.

    Each comes with its server, and whether its row count varies between microbatches.
    """
    found = []
    for _, gradients, targets in self.calls:
      for gradient, variable in zip(gradients, targets, strict=True):
        server = model_state.value_of(variable).server
        if isinstance(gradient, tf.IndexedSlices):
          found.append((server, gradient.values, True))
          found.append((server, gradient.indices, True))
          if _is_counted(gradient, variable):
            found.append((server, gradient.counts, True))
        elif gradient is not None:
          found.append((server, tf.convert_to_tensor(gradient), False))
    for write in self.writes:
      variable = write.variable
      value = write.value if write.delta is None else write.delta
      value = tf.broadcast_to(tf.cast(value, variable.dtype), variable.shape)
      found.append((variable.server, value, False))
    return [*found, (0, self.numbers, False)]


class Layout:
  """Which tensors of a microbatch are where; made in its first trace."""

  def __init__(self, contents: Contents):
    self.contents = contents
    tensors = []
    # Server, shape and dtype of each tensor; `specs`: of the messages to a server.
    self.parts: list[tuple[int, tf.TensorSpec]] = []
    for server, tensor, rows_vary in contents.tensors():
      shape = [None, *tensor.shape[1:]] if rows_vary else tensor.shape
      tensors.append(tensor)
      self.parts.append((server, tf.TensorSpec(shape, tensor.dtype)))
    self.specs: dict[int, list[tf.TensorSpec]] = {}
    for server in sorted({server for server, _ in self.parts}):
      _, large = self._small_and_large(server)
      messages = self.messages(server, tensors, contents.rows)
      packed = messages[: len(messages) - len(large)]
      self.specs[server] = [
        *(tf.TensorSpec(t.shape, t.dtype) for t in packed),
        *(self.parts[i][1] for i in large),
      ]
    self.key = str(self.specs)

  def _small_and_large(self, server: int) -> tuple[list[int], list[int]]:
    """Parts of a server that travel together, and those that travel alone."""
    found = [], []
    for i, (place, spec) in enumerate(self.parts):
      if place == server:
        found[not packing.is_small(spec.shape, spec.dtype)].append(i)
    return found

  def messages(self, server: int, tensors, rows) -> list[tf.Tensor]:
    """Returns the messages to a server: packed tensors with the rows, and large ones."""
    small, large = self._small_and_large(server)
    return [
      *packing.pack([*(tensors[i] for i in small), rows]),
      *(tensors[i] for i in large),
    ]

  def read(self, server: int, handles) -> tuple[dict[int, tf.Tensor], Any]:
    """Reads slots on a server; returns their parts by index, and the row count."""
    messages = []
    for spec in self.specs[server]:
      message = tf.raw_ops.ReadVariableOp(
        resource=next(handles), dtype=spec.dtype
      )
      message.set_shape(spec.shape)
      messages.append(message)
    small, large = self._small_and_large(server)
    count = len(messages) - len(large)
    *found, rows = packing.unpack(
      messages[:count],
      [*(self.parts[i][1] for i in small), tf.TensorSpec([], tf.float32)],
    )
    return {
      **dict(zip(small, found, strict=True)),
      **dict(zip(large, messages[count:], strict=True)),
    }, rows

  def handle_specs(self, microbatches: int) -> list[tf.TensorSpec]:
    """Returns the specs of the handles of the slots of some microbatches."""
    count = microbatches * sum(map(len, self.specs.values()))
    return [tf.TensorSpec([], tf.resource)] * count


class Slots:
  """The variables on the servers that one microbatch writes into."""

  def __init__(self, specs: dict[int, list[tf.TensorSpec]]):
    self._variables = []
    for server, messages in specs.items():
      device = variables.server_device(server)
      for spec in messages:
        is_static = spec.shape.is_fully_defined()
        shape = [d or 0 for d in spec.shape.as_list()]
        zeros = variables.zeros_on(device, shape, spec.dtype)
        with tf.device(device):
          self._variables.append(
            _tf_internal.ResourceVariable(
              zeros,
              # TensorFlow aborts a task that is given the handle of a variable
              # of which one dimension is unknown; all unknown is fine.
              shape=spec.shape if is_static else tf.TensorShape(None),
              validate_shape=is_static,
              trainable=False,
            )
          )
    self.handles = [v.handle for v in self._variables]


class MicrobatchFunction:
  """Computes a microbatch on a worker, and leaves it in slots."""

  def __init__(
    self,
    step,
    message: batch_message.Layout,
    discovery: worker_function.Discovery,
  ):
    self._step = step
    self._message = message
    self._discovery = discovery
    # The layout is known after the first trace.
    found = []
    worker_function.concrete(
      lambda argument: found.append(Layout(self._compute(argument))),
      message.argument,
    )
    self.layout = found[0]
    self._function = worker_function.concrete(
      self._trace, message.argument, *self.layout.handle_specs(1)
    )

  def __call__(self, worker: int, message: Any, slots: Slots) -> None:
    """Runs it on a worker."""
    worker_function.run_on_worker(
      self._function, worker, message, *slots.handles
    )

  def _trace(self, argument, *handles):
    contents = self._compute(argument)
    tensors = [tensor for _, tensor, _ in contents.tensors()]
    remaining = iter(handles)
    for server in self.layout.specs:
      messages = self.layout.messages(server, tensors, contents.rows)
      with tf.device(variables.server_device(server)):
        for message in messages:
          tf.raw_ops.AssignVariableOp(resource=next(remaining), value=message)

  def _compute(self, argument) -> Contents:
    traced = traced_step.TracedStep(self._discovery.access, is_share=True)
    with (
      traced.tracing(),
      _keras_internal.capture_apply(self._step.optimizers) as calls,
    ):
      batch = self._message.read(argument, tf.constant(0, tf.int64)).batch
      outputs = self._step.run(batch)
      numbers = tf.zeros([0], tf.float64)
      if self._discovery.are_numbers:
        numbers = self._discovery.report(outputs)
      # On the worker, before they are sent.
      calls = [
        (o, [row_updates.summed(g) for g in grads], v)
        if row_updates.takes_sums(o, clips=True)
        else (o, grads, v)
        for o, grads, v in calls
      ]
    return Contents(
      [
        (o, g, _keras_internal.trainable_variables(o) if v is None else v)
        for o, g, v in calls
      ],
      traced.held_writes(),
      numbers,
      tf.cast(batch_message.rows_of(batch), tf.float32),
      argument,
    )


class ApplyFunction:
  """Applies the microbatches of a step on the servers, weighted by their rows."""

  def __init__(
    self,
    step,
    layout: Layout,
    count: int,
    discovery: worker_function.Discovery,
    in_replica: Callable[[Callable], Callable],
  ):
    self._step = step
    self._layout = layout
    self._count = count
    self._discovery = discovery
    self._in_replica = in_replica
    self._function = worker_function.concrete(
      self._trace, *layout.handle_specs(count)
    )

  def __call__(self, microbatches: Sequence[Slots]) -> tf.Tensor:
    """Applies the contents of these slots; returns the numbers to report."""
    return self._function(*(h for slots in microbatches for h in slots.handles))

  def _trace(self, *handles):
    # Of each part, its values in the microbatches and their weights.
    parts: dict[int, tuple[list, list]] = {}
    each = len(handles) // self._count
    microbatches = [
      iter(handles[i * each : (i + 1) * each]) for i in range(self._count)
    ]
    for server in self._layout.specs:
      with tf.device(variables.server_device(server)):
        read = [self._layout.read(server, slots) for slots in microbatches]
        weights = _weights([rows for _, rows in read])
        for index in read[0][0]:
          parts[index] = [found[index] for found, _ in read], weights
    with tf.device(variables.server_device(0)):
      numbers = self._apply(iter([parts[i] for i in sorted(parts)]))
    # A tensor that is read from another task leaves 3 kB there for good: a kernel
    # with the number of the copy.
    with tf.device(worker_function.COORDINATOR):
      return tf.identity(numbers)

  def _apply(self, parts):
    contents, powers = self._layout.contents, self._discovery.powers
    of_gradients = iter(powers.gradients)
    for optimizer, gradients, targets in contents.calls:
      combined = [
        None if g is None else self._gradient(g, v, parts, power)
        for g, v, power in zip(gradients, targets, of_gradients, strict=False)
      ]
      self._in_replica(
        lambda _, o=optimizer, g=combined, t=targets: o.apply(g, t)
      )(None)
    for write in contents.writes:
      values, weights = next(parts)
      power = powers.writes[id(write.variable.handle)]
      with tf.device(write.variable.device):
        combined = _combined(values, weights, power)
        if write.delta is None:
          write.variable.write_directly(combined, None)
        else:
          write.variable.write_directly(None, combined)
    numbers = next(parts)
    if self._step.results is not None:
      return self._discovery.report(self._step.results())
    are_sums = np.repeat(np.array(powers.outputs, bool), self._discovery.sizes)
    return tf.where(are_sums, tf.add_n(numbers[0]), _combined(*numbers))

  def _gradient(self, gradient, variable, parts, power):
    """Combines the gradients of the microbatches into the gradient of the step."""
    values, weights = next(parts)
    if power:
      weights = [None] * len(weights)
    server = model_state.value_of(variable).server
    with tf.device(variables.server_device(server)):
      if not isinstance(gradient, tf.IndexedSlices):
        return _combined(values, weights, power)
      is_counted = _is_counted(gradient, variable)
      columns = [
        list(map(_scaled, values, weights)),
        *(next(parts)[0] for _ in range(1 + is_counted)),
      ]
      # On one device as here: rows that were looked up apart stay apart, since
      # Adam does not make the same of two gradients and of their sum.
      argument = self._layout.contents.argument.op.name
      is_of_batch = worker_function.depends_on(gradient.indices, [argument])
      values, *others = (
        tf.concat(each, 0) if is_of_batch else each[0] for each in columns
      )
      if not is_of_batch:
        values = tf.add_n(columns[0])
      shape = tf.constant(variable.shape.as_list(), gradient.indices.dtype)
      kind = row_updates.SummedSlices if is_counted else tf.IndexedSlices
      slices = kind(values, others[0], shape, *others[1:])
      is_once = is_of_batch and _origin_type(gradient.indices) == 'Unique'
      return row_updates.summed(slices) if is_once else slices


def _origin_type(tensor) -> str:
  """The type of the op that made a tensor, whatever reshaped it since."""
  while tensor.op.type in ('Identity', 'Reshape', 'Cast'):
    tensor = tensor.op.inputs[0]
  return tensor.op.type


def _is_counted(gradient, variable) -> bool:
  """Returns whether a gradient of rows travels with counts: dynamic tables count uses."""
  is_summed = isinstance(gradient, row_updates.SummedSlices)
  return is_summed and _keras_internal.table_of(variable) is not None


def _weights(rows) -> list[tf.Tensor | None]:
  """The part of the step's rows in each microbatch; None for all of them."""
  if len(rows) == 1:
    return [None]
  total = tf.add_n(rows)
  return [r / total for r in rows]


def _scaled(value, weight):
  if weight is None:
    return value
  return value * tf.cast(weight, value.dtype)


def _combined(values, weights, power: int = 0) -> tf.Tensor:
  """Returns the sum of values (power 1) or their weighted mean (power 0).

  Integers with the power 0 do not depend on the rows, so it returns the first.
  """
  if power:
    return tf.add_n(values)
  dtype = values[0].dtype
  if weights[0] is None or not (dtype.is_floating or dtype.is_complex):
    return values[0]
  return tf.add_n(list(map(_scaled, values, weights)))
