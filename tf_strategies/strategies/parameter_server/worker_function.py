"""A training step as a function that a worker runs on the servers' variables."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import _keras_internal, errors
from tf_strategies.spmd import plan, row_sharing
from tf_strategies.spmd import rules as _rules  # noqa: F401  Registers them.
from tf_strategies.strategies.parameter_server import (
  batch_message,
  packing,
  step_access,
  traced_step,
  variables,
)
from tf_strategies.strategies.parameter_server import journal as journal_lib

COORDINATOR = '/job:chief/replica:0/task:0/device:CPU:0'


@dataclasses.dataclass
class Discovery:
  """What the first trace of a step found."""

  access: step_access.Access
  outputs: Any  # Specs of the results, in their structure.
  python: str | None = None  # What calls this process's Python, by name.
  powers: Powers | None = None  # None: one worker computes all rows.

  @functools.cached_property
  def are_numbers(self) -> bool:
    """Returns whether the step returns numbers and small arrays, which fit one message."""
    return all(
      isinstance(s, tf.TensorSpec)
      and packing.is_small(s.shape, s.dtype)
      and (s.dtype.is_floating or s.dtype.is_integer or s.dtype.is_bool)
      for s in tf.nest.flatten(self.outputs)
    )

  @functools.cached_property
  def sizes(self) -> list[int]:
    """Returns how many numbers each output is."""
    specs = tf.nest.flatten(self.outputs)
    return [s.shape.num_elements() for s in specs]

  @functools.cached_property
  def places(self) -> Any:
    """Returns the positions of each output's numbers among all, in their structure."""
    return self.unflatten(np.arange(sum(self.sizes)))

  def report(self, outputs: Any) -> Any:
    """Returns the report of a step: its numbers as float64 [count], or its tensors."""
    outputs = () if outputs is None else outputs
    flat = [tf.convert_to_tensor(t) for t in tf.nest.flatten(outputs)]
    if not self.are_numbers:
      return [tf.identity(t) for t in flat]
    if not flat:
      return tf.zeros([0], tf.float64)
    if all(t.shape.rank == 0 for t in flat):
      return tf.stack([tf.cast(t, tf.float64) for t in flat])
    return tf.concat(
      [tf.reshape(tf.cast(t, tf.float64), [-1]) for t in flat], 0
    )

  def unreport(self, reported: Any) -> Any:
    """Converts the report of a step to its results, as NumPy values."""
    if not self.are_numbers:
      flat = [t.numpy() for t in reported]
      return tf.nest.pack_sequence_as(self.outputs, flat)
    return tf.nest.map_structure(
      lambda part, spec: np.asarray(part, spec.dtype.as_numpy_dtype),
      self.unflatten(reported.numpy()),
      self.outputs,
    )

  def unflatten(self, numbers: np.ndarray) -> Any:
    """Parts of such an array as all outputs have together, in their shapes."""
    parts = np.split(numbers, np.cumsum(self.sizes)[:-1]) if self.sizes else []
    flat = [
      part.reshape(s.shape)
      for part, s in zip(parts, tf.nest.flatten(self.outputs), strict=True)
    ]
    return tf.nest.pack_sequence_as(self.outputs, flat)


def discover(
  run_step: Callable[[Any], Any],
  structure: Any,
  look: traced_step.TracedStep | None = None,
) -> Discovery:
  """Traces a step once, to record its variables and results.

  Raises:
    ScopeError: if it writes a variable that is not on a server.
    UnsupportedOptionError: if a part of its results is None.
  """
  look = look or traced_step.TracedStep()
  found = {}

  def trace(*flat):
    with look.tracing():
      outputs = run_step(batch_message.pack(structure, flat))
    outputs = () if outputs is None else outputs
    if any(each is None for each in tf.nest.flatten(outputs)):
      raise errors.UnsupportedOptionError(
        f'a step on workers that returns {outputs}',
        'a structure of tensors and numbers, or None alone',
        'leave out what is None',
      )
    outputs = tf.nest.map_structure(tf.convert_to_tensor, outputs)
    found['outputs'] = tf.nest.map_structure(
      lambda t: tf.TensorSpec(t.shape, t.dtype), outputs
    )

  function = concrete(trace, *batch_message.Layout(structure, 1).specs)
  _check_variables(function.graph, look.is_share)
  return Discovery(look.access, found['outputs'], _python_in(function.graph))


@dataclasses.dataclass(frozen=True)
class Powers:
  """How to combine what workers compute from their rows: 1: add up; 0: average.

  `gradients` and `outputs` are in their order; None stands for no gradient. `writes`
  are by the `id` of a variable's handle.
  """

  gradients: list[int | None]
  outputs: list[int]
  writes: dict[int, int]


def powers_of_rows(
  run_step: Callable[[Any], Any], structure: Any, gradients: list[Any]
) -> Powers:
  """Traces a step on any number of rows, to see how to combine the results of workers.

  Args:
    run_step: the step, a function of a batch. It adds its gradients to `gradients`.
    structure: structure of the batch, with dense tensors.
    gradients: an empty list.

  Raises:
    NeedsExchangeError: workers cannot share the rows. The message says why.
  """
  look = traced_step.TracedStep(is_share=True)
  structure = tf.nest.map_structure(batch_message.with_any_rows, structure)
  returned = []

  def trace(*flat):
    with look.tracing():
      outputs = run_step(batch_message.pack(structure, flat))
      # A metric's result may be its variable.
      returned.extend(
        tf.convert_to_tensor(t)
        for t in tf.nest.flatten(outputs)
        if t is not None
      )

  specs = batch_message.Layout(structure, 1).specs
  try:
    graph = concrete(trace, *specs).graph
  except (TypeError, ValueError) as e:
    raise plan.NeedsExchangeError(
      f'a step that needs to know how many rows there are ({e})'
    ) from e
  if not all(t.shape.is_fully_defined() for t in returned):
    raise plan.NeedsExchangeError('results that are as long as the batch')
  of_rows = functools.partial(row_sharing.powers, graph, len(specs))
  batch = [t.op.name for t in graph.inputs[: len(specs)]]
  groups = [_of_rows(g, batch) for g in gradients]
  written = [op for op in graph.get_operations() if op.type in _ASSIGNMENTS]
  values = [op.inputs[1] for op in written]
  try:
    found = iter(of_rows([*itertools.chain(*groups), *returned, *values]))
  except plan.NeedsExchangeError as error:
    for op in written:
      try:
        of_rows([op.inputs[1]])
      except plan.NeedsExchangeError:
        name = _variable_name(graph, op.inputs[0])
        raise plan.NeedsExchangeError(f'{error}, for {name!r}') from None
    raise
  of_gradients = []
  for group in groups:
    values = [next(found) for _ in group][: -(-len(group) // 2)]
    if len(set(values)) > 1:
      raise plan.NeedsExchangeError('rows of a table are used in two ways')
    of_gradients.append(values[0] if values else None)
  of_outputs = [next(found) for _ in returned]
  handles = {id(inside): outside for outside, inside in graph.captures}
  writes: dict[int, int] = {}
  for op, power in zip(written, found, strict=True):
    key = id(handles[id(op.inputs[0])])
    if writes.setdefault(key, power) != power:
      name = _variable_name(graph, op.inputs[0])
      raise plan.NeedsExchangeError(
        f'{name!r} gets both sums over rows and other values'
      )
  return Powers(of_gradients, of_outputs, writes)


_ASSIGNMENTS = 'AssignVariableOp', 'AssignAddVariableOp', 'AssignSubVariableOp'


def _variable_name(graph, handle: tf.Tensor) -> str:
  """Returns the name of the variable that a function captures by `handle`."""
  for outside, inside in graph.captures:
    for variable in graph.variables:
      if inside is handle and variable.handle is outside:
        return variable.name.removesuffix(':0')
  return handle.op.name


def _of_rows(gradient, batch: Sequence[str]) -> list[tf.Tensor]:
  """The tensors of a gradient; of one of several lookups those of each of them.

  Their rows follow each other, in any order. Not where some are of the batch and
  others, such as positions, of all rows: these would be added up.
  """
  if not isinstance(gradient, tf.IndexedSlices):
    return [] if gradient is None else [gradient]
  values, indices = map(_followed, (gradient.values, gradient.indices))
  if len(values) == len(indices) and all(
    depends_on(part, batch) for part in indices
  ):
    return [*values, *indices]
  return [gradient.values, gradient.indices]


def _followed(tensor) -> list[tf.Tensor]:
  """The tensors of which one is a concatenation."""
  if tensor.op.type != 'ConcatV2':
    return [tensor]
  return [part for each in tensor.op.inputs[:-1] for part in _followed(each)]


def depends_on(tensor: tf.Tensor, sources: Sequence[str]) -> bool:
  """Returns whether the numbers in a tensor, not its shape, come from these operations."""
  seen, todo = set(), [tensor]
  while todo:
    op = todo.pop().op
    if op.name in sources:
      return True
    if op.type != 'Shape' and op.name not in seen:
      seen.add(op.name)
      todo += op.inputs
  return False


_PYTHON = frozenset(('EagerPyFunc', 'PyFunc', 'PyFuncStateless'))
# What does nothing to a variable.
_READS = frozenset(('ReadVariableOp', 'ResourceGather', 'ResourceGatherNd'))


def _python_in(graph) -> str | None:
  """The name of an operation that calls this process's Python, if there is one."""
  definition = graph.as_graph_def()
  nodes = list(definition.node)
  for function in definition.library.function:
    nodes += function.node_def
  return next((node.name for node in nodes if node.op in _PYTHON), None)


def _check_variables(graph, is_share: bool) -> None:
  """Raises an error for a variable of this process that workers would write.

  Workers may read such variables, for example the vocabulary of an adapted layer.
  """
  for variable in graph.variables:
    if isinstance(variable, variables.ServerVariable) or (
      tf.DeviceSpec.from_string(variable.handle.device).job == 'ps'
    ):
      continue  # Of a table in parts, it is the first part's handle.
    users = graph.capture(variable.handle).consumers()
    is_written = any(op.type not in _READS for op in users)
    is_seed = _keras_internal.is_seed_state(variable.name, variable.dtype)
    if not is_seed and (is_written or (is_share and variable.trainable)):
      raise errors.ScopeError(
        f'variable {variable.name!r} in a step on workers, made outside of the '
        "strategy's scope,",
        'variables on parameter servers',
        'make the model, its optimizer, losses and metrics inside '
        '`with strategy.scope():`',
      )


def concrete(function: Callable, *specs: tf.TensorSpec) -> Callable:
  """Traces a function, maybe while another one is being traced.

  `tf.init_scope` would do, but that it stops gradient tapes.
  """
  with tf.__internal__.eager_context.eager_mode():
    return tf.function(function, autograph=False).get_concrete_function(*specs)


class WorkerFunction:
  """A step, or several one after the other, as one function for workers."""

  def __init__(
    self,
    run_step: Callable[[Any], Any],
    layout: batch_message.Layout,
    discovery: Discovery,
    journal: journal_lib.Journal,
  ):
    self._run_step = run_step
    self._layout = layout
    self._discovery = discovery
    self._journal = journal
    self._function = concrete(self._trace, layout.argument)

  def __call__(self, worker: int, argument: Any) -> Any:
    """Runs it on a worker; the result stays there until it is read."""
    return run_on_worker(self._function, worker, argument)

  def _begin(self, traced, argument, step) -> Any:
    """The batch of a step, which from now on shows its ticket."""
    reading = self._layout.read(argument, step)
    traced.begin(
      self._journal.ticket(
        self._layout.kind, reading.token, reading.key, reading.done
      )
    )
    return reading.batch

  def _trace(self, argument):
    if self._layout.steps == 1:
      return self._one_step(argument, tf.constant(0, tf.int64))
    if not self._discovery.are_numbers:
      raise errors.UnsupportedOptionError(
        f'steps_per_execution={self._layout.steps} with a step that returns '
        f'{self._discovery.outputs}',
        'numbers, and arrays of a fixed shape',
        'leave out steps_per_execution, or return fewer values',
      )
    return one_by_one(
      lambda step: self._one_step(argument, step, after=[step]),
      self._layout.first_step(argument),
      self._layout.steps,
      sum(self._discovery.sizes),
    )

  def _one_step(self, argument, step, after=()):
    traced = traced_step.TracedStep(self._discovery.access)
    with traced.tracing(after):
      with tf.control_dependencies(list(after)):
        batch = self._begin(traced, argument, step)
      # Inside: a step may return a variable, whose value only it knows.
      reported = self._discovery.report(self._run_step(batch))
    done = traced.commit()
    if self._layout.steps == 1:
      # The call ends when all tasks have done their part of it.
      return reported
    with tf.control_dependencies(done):
      return tf.nest.map_structure(tf.identity, reported)


def one_by_one(
  run: Callable[[tf.Tensor], tf.Tensor], first: Any, steps: int, count: int
) -> tf.Tensor:
  """Runs steps in a loop of a graph; what the last one reports, float64 [count]."""

  def body(step, _):
    result = run(step)
    # The next step must not begin before this one's writes are done.
    with tf.control_dependencies([result]):
      return step + 1, result

  _, result = tf.while_loop(
    lambda step, _: step < steps,
    body,
    [first, tf.zeros([count], tf.float64)],
    parallel_iterations=1,
  )
  return result


def run_on_worker(function: Callable, worker: int, argument: Any, *handles):
  """Calls a concrete function on a worker."""
  if isinstance(argument, np.ndarray):
    with tf.device(COORDINATOR):
      argument = tf.constant(argument)
  with tf.device(f'/job:worker/replica:0/task:{worker}'):
    return function(argument, *handles)
