"""What a worker's share of a synchronous step leaves on the servers.

A share computes and writes no variable: its gradients, and what it would write
(metrics, moving statistics), go into slots on the servers that hold the
variables. When enough shares have come, `ApplyFunction` adds them up there and
applies them at once. A share that is lost or late has touched nothing.
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
  """One tensor of a share.

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
  """Everything that a share has, as a structure of anything with leaves.

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

  def tensors(self) -> list[tuple[int, tf.Tensor]]:
    """(server, tensor) of all, in an order that `rebuild` knows."""
    found = []
    for _, gradients, targets in self.calls:
      for gradient, variable in zip(gradients, targets, strict=True):
        server = _server_of(variable)
        if isinstance(gradient, tf.IndexedSlices):
          found.append((server, gradient.values))
          found.append((server, gradient.indices))
        elif gradient is not None:
          found.append((server, tf.convert_to_tensor(gradient)))
    for write in self.writes:
      value = write.value if write.delta is None else write.delta
      variable = write.variable
      value = tf.cast(value, variable.dtype)
      found.append((variable.server, tf.broadcast_to(value, variable.shape)))
    return [*found, (0, self.numbers)]

  def sparse_tensors(self) -> list[tf.Tensor]:
    """Those of which another share may have more or fewer rows."""
    return [
      tensor
      for _, gradients, _ in self.calls
      for gradient in gradients
      if isinstance(gradient, tf.IndexedSlices)
      for tensor in (gradient.values, gradient.indices)
    ]


class _Identities:
  """A set of tensors, which cannot be compared."""

  def __init__(self, tensors):
    self._ids = {id(t) for t in tensors}

  def __contains__(self, tensor):
    return id(tensor) in self._ids


def _slot_spec(tensor, is_sparse):
  shape = [None, *tensor.shape[1:]] if is_sparse else tensor.shape
  return tf.TensorSpec(shape, tensor.dtype)


def _server_of(variable) -> int:
  return getattr(variable, 'value', variable).server


def _without_default(variables_or_none, optimizer):
  if variables_or_none is not None:
    return variables_or_none
  return list(optimizer._trainable_variables)  # pylint: disable=protected-access


class Layout:
  """Which tensors of a share are where; made of the first trace.

  Args:
    contents: of a traced share.
  """

  def __init__(self, contents: Contents):
    self.contents = contents
    sparse = _Identities(contents.sparse_tensors())
    self.parts = [
      Part(server, _slot_spec(t, t in sparse))
      for server, t in contents.tensors()
    ]
    self.servers = sorted({p.server for p in self.parts})

  def small(self, server: int) -> list[int]:
    """Indices of the parts that travel together to a server."""
    return [
      i for i, p in enumerate(self.parts) if p.server == server and p.is_small
    ]

  def large(self, server: int) -> list[int]:
    """Indices of the parts that travel alone to a server."""
    return [
      i
      for i, p in enumerate(self.parts)
      if p.server == server and not p.is_small
    ]

  def messages(self, server: int, tensors, rows) -> list[tf.Tensor]:
    """What goes to a server: packed tensors with the rows, and large ones."""
    small = [tensors[i] for i in self.small(server)]
    return [
      *packing.pack([*small, rows]),
      *(tensors[i] for i in self.large(server)),
    ]

  def specs(self, server: int) -> list[tf.TensorSpec]:
    """Of the messages to a server."""

    def make(*flat):
      tensors = dict(zip(range(len(self.parts)), flat, strict=False))
      return self.messages(server, tensors, flat[-1])

    traced = tf.function(make, autograph=False).get_concrete_function(
      *(p.spec for p in self.parts), tf.TensorSpec([], tf.float32)
    )
    return [tf.TensorSpec(t.shape, t.dtype) for t in traced.outputs]

  def read(self, server: int, messages) -> tuple[dict[int, tf.Tensor], Any]:
    """The parts by index, and the rows, from the messages on a server."""
    small = self.small(server)
    specs = [self.parts[i].spec for i in small]
    specs.append(tf.TensorSpec([], tf.float32))
    large = self.large(server)
    packed = messages[: len(messages) - len(large)]
    *found, rows = packing.unpack(packed, specs)
    parts = dict(zip(small, found, strict=True))
    parts.update(zip(large, messages[len(packed) :], strict=True))
    return parts, rows


class Slots:
  """The variables on the servers that one share writes into.

  Args:
    specs: of the messages, by server.
  """

  def __init__(self, specs: dict[int, list[tf.TensorSpec]]):
    self._variables = []
    for server, messages in specs.items():
      with tf.device(variables.server_device(server)):
        for spec in messages:
          empty = [0 if d is None else d for d in spec.shape.as_list()]
          self._variables.append(
            _tf_internal.ResourceVariable(
              tf.zeros(empty, spec.dtype),
              # TensorFlow aborts a task that is given the handle of a variable
              # of which one dimension is unknown; all unknown is fine.
              shape=spec.shape
              if spec.shape.is_fully_defined()
              else tf.TensorShape(None),
              validate_shape=spec.shape.is_fully_defined(),
              trainable=False,
            )
          )
    self.handles = [v.handle for v in self._variables]


class MicrobatchFunction:
  """Computes a share on a worker and leaves it in slots.

  Args:
    step: what to run.
    layout: of the parcels.
    discovery: what the first trace found.
  """

  def __init__(
    self,
    step,
    layout: batch_message.Layout,
    discovery: worker_function.Discovery,
  ):
    self._step = step
    self._parcel = layout
    self._discovery = discovery
    self.layout: Layout | None = None
    with worker_function.outside_of_graphs():
      # What is in a share is known when it has been traced once.
      tf.function(self._compute, autograph=False).get_concrete_function(
        tf.TensorSpec([layout.num_bytes], tf.uint8)
      )
      self.specs = {s: self.layout.specs(s) for s in self.layout.servers}
      count = sum(len(s) for s in self.specs.values())
      self._function = tf.function(
        self._trace, autograph=False
      ).get_concrete_function(
        tf.TensorSpec([layout.num_bytes], tf.uint8),
        *[tf.TensorSpec([], tf.resource)] * count,
      )

  def __call__(self, worker: int, argument: tf.Tensor, slots: Slots) -> None:
    """Runs it on a worker."""
    with tf.device(f'/job:worker/replica:0/task:{worker}'):
      self._function(argument, *slots.handles)

  def _compute(self, argument):
    traced = traced_step.TracedStep(self._discovery.access)
    with traced.tracing(), self._step.capture(self._step.optimizers) as calls:
      batch = self._parcel.decode_batch(argument, 0)
      outputs = self._step.run(batch)
      numbers = tf.zeros([0], tf.float64)
      if self._discovery.are_numbers:
        numbers = worker_function.report(outputs, True)
    contents = Contents(
      [(o, g, _without_default(v, o)) for o, g, v in calls],
      traced.held_writes(),
      numbers,
      tf.constant(float(self._parcel.specs[0].shape[0]), tf.float32),
    )
    if self.layout is None:
      self.layout = Layout(contents)
    return [t for _, t in contents.tensors()], contents.rows

  def _trace(self, argument, *handles):
    tensors, rows = self._compute(argument)
    remaining = iter(handles)
    for server in self.layout.servers:
      messages = self.layout.messages(server, tensors, rows)
      with tf.device(variables.server_device(server)):
        for message in messages:
          tf.raw_ops.AssignVariableOp(resource=next(remaining), value=message)


class ApplyFunction:
  """Applies the shares of a step on the servers, weighted by their rows.

  Args:
    step: whose shares they are.
    share: the function that made them.
    count: number of shares.
    in_replica: runs a function in the strategy's replica context.
  """

  def __init__(
    self,
    step,
    share: MicrobatchFunction,
    count: int,
    in_replica: Callable[[Callable], Callable],
  ):
    self._step = step
    self._layout = share.layout
    self._specs = share.specs
    self._count = count
    self._in_replica = in_replica
    handles = sum(len(s) for s in self._specs.values())
    with worker_function.outside_of_graphs():
      self._function = tf.function(
        self._trace, autograph=False
      ).get_concrete_function(
        *[tf.TensorSpec([], tf.resource)] * (handles * count)
      )

  def __call__(self, shares: Sequence[Slots]) -> tf.Tensor:
    """Applies the shares in these slots; returns the numbers to report."""
    return self._function(*(h for slots in shares for h in slots.handles))

  def _trace(self, *handles):
    sums: dict[int, tf.Tensor] = {}
    means: dict[int, Any] = {}
    per_share = len(handles) // self._count
    shares = [
      handles[i * per_share : (i + 1) * per_share] for i in range(self._count)
    ]
    position = 0
    for server in self._layout.servers:
      specs = self._specs[server]
      with tf.device(variables.server_device(server)):
        read = [
          self._layout.read(server, self._read(share, position, specs))
          for share in shares
        ]
        weights = _weights([rows for _, rows in read])
        for index in read[0][0]:
          values = [parts[index] for parts, _ in read]
          sums[index], means[index] = values, weights
      position += len(specs)
    with tf.device(variables.server_device(0)):
      return self._apply(sums, means)

  def _read(self, share, position, specs):
    messages = []
    for i, spec in enumerate(specs):
      message = tf.raw_ops.ReadVariableOp(
        resource=share[position + i], dtype=spec.dtype
      )
      message.set_shape(spec.shape)
      messages.append(message)
    return messages

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
    numbers = _mean(values[next(indices)], weights[len(values) - 1])
    if self._step.results is None:
      return numbers
    return worker_function.report(self._step.results(), True)

  def _gradient(self, gradient, variable, indices, values, weights):
    """The gradient of the step, from those of the shares."""
    if gradient is None:
      return None
    device = variables.server_device(_server_of(variable))
    index = next(indices)
    with tf.device(device):
      if not isinstance(gradient, tf.IndexedSlices):
        return _mean(values[index], weights[index])
      rows = next(indices)
      weighted = [
        _scaled(v, w)
        for v, w in zip(values[index], weights[index], strict=True)
      ]
      shape = tf.constant(variable.shape.as_list(), gradient.indices.dtype)
      return tf.IndexedSlices(
        tf.concat(weighted, 0), tf.concat(values[rows], 0), shape
      )


def _weights(rows) -> list[tf.Tensor | None]:
  """The part of the step's rows that each share has; None for all of them."""
  if len(rows) == 1:
    return [None]
  total = tf.add_n(rows)
  return [r / total for r in rows]


def _scaled(value, weight):
  if weight is None:
    return value
  return value * tf.cast(weight, value.dtype)


def _mean(values, weights) -> tf.Tensor:
  """The mean of values, by weight; whole numbers are those of the first."""
  if weights[0] is None or not values[0].dtype.is_floating:
    return values[0]
  return tf.add_n([_scaled(v, w) for v, w in zip(values, weights, strict=True)])
