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

import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.strategies.parameter_server import (
  batch_message,
  packing,
  traced_step,
  variables,
  worker_function,
)


@dataclasses.dataclass(frozen=True)
class Part:
  """One tensor of a microbatch.

  Attributes:
    server: where it goes.
    spec: its shape and dtype.
  """

  server: int
  spec: tf.TensorSpec

  @property
  def is_small(self) -> bool:
    """Whether it travels with others."""
    return packing.is_small(self.spec.shape, self.spec.dtype)


@dataclasses.dataclass
class Contents:
  """Everything that a traced microbatch has.

  Attributes:
    calls: of `optimizer.apply`, as (optimizer, gradients, variables).
    writes: that the step held back.
    numbers: what it reports, float64 [count].
    rows: of its batch, float32 scalar.
  """

  calls: list
  writes: list[traced_step.Write]
  numbers: tf.Tensor
  rows: tf.Tensor

  def parts_and_tensors(self) -> list[tuple[Part, tf.Tensor]]:
    """All tensors, in the order in which `ApplyFunction` reads them."""
    found = []
    for _, gradients, targets in self.calls:
      for gradient, variable in zip(gradients, targets, strict=True):
        server = getattr(variable, 'value', variable).server
        if isinstance(gradient, tf.IndexedSlices):
          # Another microbatch may have more or fewer rows.
          for tensor in (gradient.values, gradient.indices):
            spec = tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)
            found.append((Part(server, spec), tensor))
        elif gradient is not None:
          found.append(_part_and_tensor(server, tf.convert_to_tensor(gradient)))
    for write in self.writes:
      variable = write.variable
      value = write.value if write.delta is None else write.delta
      value = tf.broadcast_to(tf.cast(value, variable.dtype), variable.shape)
      found.append(_part_and_tensor(variable.server, value))
    return [*found, _part_and_tensor(0, self.numbers)]


def _part_and_tensor(server, tensor):
  return Part(server, tf.TensorSpec(tensor.shape, tensor.dtype)), tensor


class Layout:
  """Which tensors of a microbatch are where; made of the first trace."""

  def __init__(self, contents: Contents):
    self.contents = contents
    self.parts = [part for part, _ in contents.parts_and_tensors()]
    self.servers = sorted({p.server for p in self.parts})
    self.specs = {s: self._specs(s) for s in self.servers}
    self.key = str(self.specs)

  def _indices(self, server: int, is_small: bool) -> list[int]:
    """Of the parts of a server that travel together, or of the others."""
    return [
      i
      for i, p in enumerate(self.parts)
      if p.server == server and p.is_small == is_small
    ]

  def messages(self, server: int, tensors, rows) -> list[tf.Tensor]:
    """What goes to a server: packed tensors with the rows, and large ones."""
    small = [tensors[i] for i in self._indices(server, is_small=True)]
    large = [tensors[i] for i in self._indices(server, is_small=False)]
    return [*packing.pack([*small, rows]), *large]

  def _specs(self, server: int) -> list[tf.TensorSpec]:
    """Of the messages to a server."""
    traced = tf.function(
      lambda *flat: self.messages(server, flat[:-1], flat[-1]), autograph=False
    ).get_concrete_function(
      *(p.spec for p in self.parts), tf.TensorSpec([], tf.float32)
    )
    return [tf.TensorSpec(t.shape, t.dtype) for t in traced.outputs]

  def read(self, server: int, messages) -> tuple[dict[int, tf.Tensor], Any]:
    """The parts by index, and the rows, from the messages on a server."""
    small = self._indices(server, is_small=True)
    large = self._indices(server, is_small=False)
    count = len(messages) - len(large)
    specs = [self.parts[i].spec for i in small]
    *found, rows = packing.unpack(
      messages[:count], [*specs, tf.TensorSpec([], tf.float32)]
    )
    parts = dict(zip(small, found, strict=True))
    parts.update(zip(large, messages[count:], strict=True))
    return parts, rows


class Slots:
  """The variables on the servers that one microbatch writes into."""

  def __init__(self, specs: dict[int, list[tf.TensorSpec]]):
    self._variables = []
    for server, messages in specs.items():
      with tf.device(variables.server_device(server)):
        for spec in messages:
          is_static = spec.shape.is_fully_defined()
          self._variables.append(
            _tf_internal.ResourceVariable(
              tf.zeros([d or 0 for d in spec.shape.as_list()], spec.dtype),
              # TensorFlow aborts a task that is given the handle of a variable
              # of which one dimension is unknown; all unknown is fine.
              shape=spec.shape if is_static else tf.TensorShape(None),
              validate_shape=is_static,
              trainable=False,
            )
          )
    self.handles = [v.handle for v in self._variables]


class MicrobatchFunction:
  """Computes a microbatch on a worker and leaves it in slots."""

  def __init__(
    self,
    step,
    message: batch_message.Layout,
    discovery: worker_function.Discovery,
  ):
    self._step = step
    self._message = message
    self._discovery = discovery
    argument = tf.TensorSpec([message.num_bytes], tf.uint8)
    with worker_function.outside_of_graphs():
      # What is in a microbatch is known when it has been traced once.
      found = []
      tf.function(
        lambda a: found.append(Layout(self._compute(a))), autograph=False
      ).get_concrete_function(argument)
      self.layout = found[0]
      count = sum(map(len, self.layout.specs.values()))
      self._function = tf.function(
        self._trace, autograph=False
      ).get_concrete_function(
        argument, *[tf.TensorSpec([], tf.resource)] * count
      )

  def __call__(self, worker: int, message: Any, slots: Slots) -> None:
    """Runs it on a worker."""
    worker_function.run_on_worker(
      self._function, worker, message, *slots.handles
    )

  def _compute(self, argument) -> Contents:
    traced = traced_step.TracedStep(self._discovery.access)
    with traced.tracing(), self._step.capture(self._step.optimizers) as calls:
      outputs = self._step.run(self._message.decode_batch(argument, 0))
      numbers = tf.zeros([0], tf.float64)
      if self._discovery.are_numbers:
        numbers = worker_function.report(outputs, True)
    return Contents(
      [(o, g, _without_default(v, o)) for o, g, v in calls],
      traced.held_writes(),
      numbers,
      tf.constant(float(self._message.specs[0].shape[0]), tf.float32),
    )

  def _trace(self, argument, *handles):
    contents = self._compute(argument)
    tensors = [tensor for _, tensor in contents.parts_and_tensors()]
    remaining = iter(handles)
    for server in self.layout.servers:
      messages = self.layout.messages(server, tensors, contents.rows)
      with tf.device(variables.server_device(server)):
        for message in messages:
          tf.raw_ops.AssignVariableOp(resource=next(remaining), value=message)


def _without_default(variables_or_none, optimizer):
  if variables_or_none is not None:
    return variables_or_none
  return list(optimizer._trainable_variables)  # pylint: disable=protected-access


class ApplyFunction:
  """Applies the microbatches of a step on the servers, weighted by their rows."""

  def __init__(
    self,
    step,
    layout: Layout,
    count: int,
    in_replica: Callable[[Callable], Callable],
  ):
    self._step = step
    self._layout = layout
    self._count = count
    self._in_replica = in_replica
    handles = sum(map(len, layout.specs.values()))
    with worker_function.outside_of_graphs():
      self._function = tf.function(
        self._trace, autograph=False
      ).get_concrete_function(
        *[tf.TensorSpec([], tf.resource)] * (handles * count)
      )

  def __call__(self, microbatches: Sequence[Slots]) -> tf.Tensor:
    """Applies what is in these slots; returns the numbers to report."""
    return self._function(*(h for slots in microbatches for h in slots.handles))

  def _trace(self, *handles):
    values: dict[int, list[tf.Tensor]] = {}
    weights: dict[int, list] = {}
    each = len(handles) // self._count
    microbatches = [
      handles[i * each : (i + 1) * each] for i in range(self._count)
    ]
    position = 0
    for server in self._layout.servers:
      specs = self._layout.specs[server]
      with tf.device(variables.server_device(server)):
        read = [
          self._layout.read(
            server, _read(found[position : position + len(specs)], specs)
          )
          for found in microbatches
        ]
        weights_here = _weights([rows for _, rows in read])
        for index in read[0][0]:
          values[index] = [parts[index] for parts, _ in read]
          weights[index] = weights_here
      position += len(specs)
    with tf.device(variables.server_device(0)):
      return self._apply(values, weights)

  def _apply(self, values, weights):
    indices = iter(range(len(self._layout.parts)))
    contents = self._layout.contents
    for optimizer, gradients, targets in contents.calls:
      combined = [
        self._gradient(g, v, indices, values, weights)
        for g, v in zip(gradients, targets, strict=True)
      ]
      self._in_replica(
        lambda _, o=optimizer, g=combined, t=targets: o.apply(g, t)
      )(None)
    for write in contents.writes:
      index = next(indices)
      with tf.device(write.variable.device):
        if write.delta is not None:
          write.variable.write_directly(None, tf.add_n(values[index]))
        else:
          mean = _mean(values[index], weights[index])
          write.variable.write_directly(mean, None)
    index = next(indices)
    numbers = _mean(values[index], weights[index])
    if self._step.results is None:
      return numbers
    return worker_function.report(self._step.results(), True)

  def _gradient(self, gradient, variable, indices, values, weights):
    """The gradient of the step, from those of the microbatches."""
    if gradient is None:
      return None
    index = next(indices)
    server = self._layout.parts[index].server
    with tf.device(variables.server_device(server)):
      if not isinstance(gradient, tf.IndexedSlices):
        return _mean(values[index], weights[index])
      rows = next(indices)
      weighted = map(_scaled, values[index], weights[index])
      shape = tf.constant(variable.shape.as_list(), gradient.indices.dtype)
      return tf.IndexedSlices(
        tf.concat(list(weighted), 0), tf.concat(values[rows], 0), shape
      )


def _read(handles, specs) -> list[tf.Tensor]:
  messages = []
  for handle, spec in zip(handles, specs, strict=True):
    message = tf.raw_ops.ReadVariableOp(resource=handle, dtype=spec.dtype)
    message.set_shape(spec.shape)
    messages.append(message)
  return messages


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


def _mean(values, weights) -> tf.Tensor:
  """The mean of values, by weight; integers are those of the first."""
  if weights[0] is None or not values[0].dtype.is_floating:
    return values[0]
  return tf.add_n(list(map(_scaled, values, weights)))
