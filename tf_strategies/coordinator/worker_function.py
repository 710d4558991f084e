"""A training step as a function that a worker runs on the servers' variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies.coordinator import parcel as parcel_lib
from tf_strategies.coordinator import traced_step, variables

# Marks of done tasks, by task modulo this; far more than are ever on the way.
NUM_MARKS = 1024
_STEP_BITS = 20


@dataclasses.dataclass
class Discovery:
  """What the first trace of a step found.

  Attributes:
    access: which variables it reads and writes, and how.
    outputs: specs of what it returns, in its structure.
  """

  access: traced_step.Access
  outputs: Any

  @property
  def are_numbers(self) -> bool:
    """Whether the step returns scalars only, which fit one message."""
    return all(
      isinstance(s, tf.TensorSpec)
      and s.shape.rank == 0
      and (s.dtype.is_floating or s.dtype.is_integer or s.dtype.is_bool)
      for s in tf.nest.flatten(self.outputs)
    )


def discover(
  run_step: Callable[[Any], Any],
  structure: Any,
  holds_updates: bool = False,
) -> Discovery:
  """Traces a step once, only to look.

  Args:
    run_step: takes a batch.
    structure: of a batch, with a spec for each tensor.
    holds_updates: whether the optimizer's writes will be held back too.
  """
  look = traced_step.TracedStep(holds_updates=holds_updates)
  found = {}

  def trace(*flat):
    with look.tracing():
      outputs = run_step(parcel_lib.pack(structure, flat))
    outputs = tf.nest.map_structure(tf.convert_to_tensor, outputs)
    found['outputs'] = tf.nest.map_structure(
      lambda t: tf.TensorSpec(t.shape, t.dtype), outputs
    )

  with outside_of_graphs():
    tf.function(trace, autograph=False).get_concrete_function(
      *parcel_lib.Layout(structure, 1).specs
    )
  return Discovery(look.access, found['outputs'])


def outside_of_graphs():
  """Lets a function be traced from inside of another one that is being traced.

  `tf.init_scope` would do, but that it stops gradient tapes.
  """
  return tf.__internal__.eager_context.eager_mode()


class Marks:
  """Which tasks have been done, kept on server 0.

  A step's last write sets its mark there, right after the counters that it
  adds to. When a worker is lost, the coordinator looks whether the step had
  been done, so that it counts once.

  Args:
    variable: int64 [NUM_MARKS] on server 0.
  """

  def __init__(self, variable: variables.ServerVariable):
    self.variable = variable

  def set(self, task: tf.Tensor, steps_done: tf.Tensor) -> tf.Operation:
    """In a worker's graph: the task has done so many steps."""
    with tf.device(self.variable.device):
      return tf.raw_ops.ResourceScatterUpdate(
        resource=self.variable.handle,
        indices=[task % NUM_MARKS],
        updates=[task * (1 << _STEP_BITS) + tf.cast(steps_done, tf.int64)],
      )

  def steps_done(self, task: int) -> int:
    """On the coordinator: how many steps of a task were done."""
    with tf.device(self.variable.device):
      mark = int(self.variable.read_directly()[task % NUM_MARKS])
    return mark & ((1 << _STEP_BITS) - 1) if mark >> _STEP_BITS == task else 0


class WorkerFunction:
  """A step, or several one after the other, as one function for workers.

  Args:
    run_step: takes a batch, returns what is reported.
    layout: of the parcels.
    discovery: what the first trace found.
    marks: where done tasks are marked.
  """

  def __init__(
    self,
    run_step: Callable[[Any], Any],
    layout: parcel_lib.Layout,
    discovery: Discovery,
    marks: Marks,
  ):
    self._run_step = run_step
    self._layout = layout
    self._discovery = discovery
    self._marks = marks
    with outside_of_graphs():
      self._function = tf.function(
        self._trace, autograph=False
      ).get_concrete_function(tf.TensorSpec([layout.num_bytes], tf.uint8))

  def __call__(self, worker: int, parcel: tf.Tensor) -> Any:
    """Runs it on a worker; the result stays there until it is read."""
    with tf.device(f'/job:worker/replica:0/task:{worker}'):
      return self._function(parcel)

  def _trace(self, parcel):
    task, first, steps = tf.unstack(self._layout.decode_header(parcel))
    del steps
    if self._layout.steps == 1:
      return self._one_step(parcel, task, 0)
    numbers = len(tf.nest.flatten(self._discovery.outputs))

    def body(step, _):
      result = self._one_step(parcel, task, step, after=[step])
      # The next step must not begin before this one's writes are done.
      with tf.control_dependencies([result]):
        return step + 1, result

    _, result = tf.while_loop(
      lambda step, _: step < self._layout.steps,
      body,
      [first, tf.zeros([numbers], tf.float64)],
      parallel_iterations=1,
    )
    return result

  def _one_step(self, parcel, task, step, after=()):
    traced = traced_step.TracedStep(self._discovery.access)
    with traced.tracing(after):
      outputs = self._run_step(self._layout.decode_batch(parcel, step))
    done = traced.commit(
      lambda: self._marks.set(task, tf.cast(step, tf.int64) + 1)
    )
    with tf.control_dependencies(done):
      return report(outputs, self._discovery.are_numbers)


def report(outputs: Any, are_numbers: bool) -> Any:
  """What a step reports: its numbers as float64 [count], else its tensors."""
  flat = [tf.convert_to_tensor(t) for t in tf.nest.flatten(outputs)]
  if not are_numbers:
    return [tf.identity(t) for t in flat]
  if not flat:
    return tf.zeros([0], tf.float64)
  return tf.stack([tf.cast(t, tf.float64) for t in flat])


def unreport(reported: Any, discovery: Discovery) -> Any:
  """What the step returned, as NumPy values, from what it reported."""
  specs = tf.nest.flatten(discovery.outputs)
  if discovery.are_numbers:
    numbers = reported.numpy()
    flat = [
      np.asarray(n, s.dtype.as_numpy_dtype)
      for n, s in zip(numbers, specs, strict=True)
    ]
  else:
    flat = [t.numpy() for t in reported]
  return tf.nest.pack_sequence_as(discovery.outputs, flat)
