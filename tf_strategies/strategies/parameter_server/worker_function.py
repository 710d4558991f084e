"""A training step as a function that a worker runs on the servers' variables."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies.strategies.parameter_server import (
  batch_message,
  traced_step,
  variables,
)

# Markers of tasks, by number modulo this; far more than run at the same time.
NUM_MARKERS = 1024
_COUNT_BITS = 32


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
  """Traces a step once, only to look."""
  look = traced_step.TracedStep(holds_updates=holds_updates)
  found = {}

  def trace(*flat):
    with look.tracing():
      outputs = run_step(batch_message.pack(structure, flat))
    outputs = () if outputs is None else outputs
    outputs = tf.nest.map_structure(tf.convert_to_tensor, outputs)
    found['outputs'] = tf.nest.map_structure(
      lambda t: tf.TensorSpec(t.shape, t.dtype), outputs
    )

  with outside_of_graphs():
    tf.function(trace, autograph=False).get_concrete_function(
      *batch_message.Layout(structure, 1).specs
    )
  return Discovery(look.access, found['outputs'])


def outside_of_graphs():
  """Lets a function be traced from inside of another one that is being traced.

  `tf.init_scope` would do, but that it stops gradient tapes.
  """
  return tf.__internal__.eager_context.eager_mode()


class CompletionMarkers:
  """How far tasks and splits have come, kept on server 0.

  A step's last write sets its marker there, right after the counters that it
  adds to. When a worker is lost, the coordinator reads whether the step was
  done, so that it counts once.
  """

  TASKS = 0
  SPLITS = 1

  def __init__(self, variable: variables.ServerVariable):
    self.variable = variable

  @classmethod
  def create(cls) -> CompletionMarkers:
    """Makes the variable on server 0."""
    return cls(
      variables.ServerVariable(
        server=0,
        initial_value=lambda: tf.zeros([2, NUM_MARKERS], tf.int64),
        trainable=False,
        name='completion_markers',
      )
    )

  def recreate_if_dead(self) -> None:
    """Recreates the variable if its server was restarted."""
    if not self.variable.is_alive():
      self.variable.recreate()

  def mark(self, kind: int, key: tf.Tensor, done: tf.Tensor):
    """In a worker's graph: marks how much of task or split `key` is done."""
    mark = key * (1 << _COUNT_BITS) + tf.cast(done, tf.int64)
    return traced_step.Marker(
      self.variable, mark, lambda sent: self._write(kind, sent)
    )

  def _write(self, kind, mark):
    key = tf.bitwise.right_shift(mark, _COUNT_BITS)
    return tf.raw_ops.ResourceScatterNdUpdate(
      ref=self.variable.handle,
      indices=[[kind, key % NUM_MARKERS]],
      updates=[mark],
    )

  def done(self, kind: int, key: int) -> int:
    """On the coordinator: how much of the task or split `key` is done."""
    with tf.device(self.variable.device):
      mark = int(self.variable.read_directly()[kind, key % NUM_MARKERS])
    is_of_key = mark >> _COUNT_BITS == key
    return mark & ((1 << _COUNT_BITS) - 1) if is_of_key else 0


class WorkerFunction(abc.ABC):
  """A step, or several one after the other, as one function for workers."""

  def __init__(
    self,
    run_step: Callable[[Any], Any],
    steps: int,
    discovery: Discovery,
    markers: CompletionMarkers,
    spec: tf.TensorSpec,
  ):
    self._run_step = run_step
    self._steps = steps
    self._discovery = discovery
    self._markers = markers
    with outside_of_graphs():
      self._function = tf.function(
        self._trace, autograph=False
      ).get_concrete_function(spec)

  def __call__(self, worker: int, argument: Any) -> Any:
    """Runs it on a worker; the result stays there until it is read."""
    return run_on_worker(self._function, worker, argument)

  @abc.abstractmethod
  def _first_step(self, argument) -> tf.Tensor:
    """The first step to do, int64."""

  @abc.abstractmethod
  def _batch_and_marker(self, argument, step) -> tuple[Any, traced_step.Marker]:
    """The batch of a step, and what marks the step as done."""

  def _trace(self, argument):
    if self._steps == 1:
      return self._one_step(argument, tf.constant(0, tf.int64))
    numbers = len(tf.nest.flatten(self._discovery.outputs))

    def body(step, _):
      result = self._one_step(argument, step, after=[step])
      # The next step must not begin before this one's writes are done.
      with tf.control_dependencies([result]):
        return step + 1, result

    _, result = tf.while_loop(
      lambda step, _: step < self._steps,
      body,
      [self._first_step(argument), tf.zeros([numbers], tf.float64)],
      parallel_iterations=1,
    )
    return result

  def _one_step(self, argument, step, after=()):
    traced = traced_step.TracedStep(self._discovery.access)
    with traced.tracing(after):
      with tf.control_dependencies(list(after)):
        batch, marker = self._batch_and_marker(argument, step)
      # Inside: a step may return a variable, whose value only it knows.
      reported = report(self._run_step(batch), self._discovery.are_numbers)
    done = traced.commit(marker)
    if self._steps == 1:
      # The call ends when all tasks have done their part of it.
      return reported
    with tf.control_dependencies(done):
      return tf.nest.map_structure(tf.identity, reported)


class BatchFunction(WorkerFunction):
  """For batches that the coordinator sends; `layout` is of the messages."""

  def __init__(
    self, run_step, layout: batch_message.Layout, discovery, markers
  ):
    self._layout = layout
    spec = tf.TensorSpec([layout.num_bytes], tf.uint8)
    super().__init__(run_step, layout.steps, discovery, markers, spec)

  def _first_step(self, argument):
    return self._layout.decode_header(argument)[1]

  def _batch_and_marker(self, argument, step):
    task = self._layout.decode_header(argument)[0]
    batch = self._layout.decode_batch(argument, step)
    return batch, self._markers.mark(CompletionMarkers.TASKS, task, step + 1)


class InputFunction(WorkerFunction):
  """For batches with `element_spec` that the worker reads itself."""

  def __init__(self, run_step, element_spec: Any, steps, discovery, markers):
    self._element_spec = element_spec
    spec = tf.TensorSpec([], tf.resource)
    super().__init__(run_step, steps, discovery, markers, spec)

  def _first_step(self, argument):
    return tf.constant(0, tf.int64)

  def _batch_and_marker(self, argument, step):
    specs = tf.nest.flatten(self._element_spec)
    key, index, *flat = tf.raw_ops.IteratorGetNext(
      iterator=argument,
      output_types=[tf.int64, tf.int64, *(s.dtype for s in specs)],
      output_shapes=[[], [], *(s.shape for s in specs)],
    )
    batch = batch_message.pack(self._element_spec, flat)
    return batch, self._markers.mark(CompletionMarkers.SPLITS, key, index + 1)


def run_on_worker(function: Callable, worker: int, argument: Any, *handles):
  """Calls a concrete function on a worker."""
  if isinstance(argument, np.ndarray):
    with tf.device('/job:chief/replica:0/task:0/device:CPU:0'):
      argument = tf.constant(argument)
  with tf.device(f'/job:worker/replica:0/task:{worker}'):
    return function(argument, *handles)


def report(outputs: Any, are_numbers: bool) -> Any:
  """What a step reports: its numbers as float64 [count], else its tensors."""
  outputs = () if outputs is None else outputs
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
