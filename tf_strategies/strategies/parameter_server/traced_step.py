"""A step on a worker as a function of values: it reads and returns, and writes nothing.

The user's step is traced unchanged. The traced function captures its variables, which
are on the servers. A worker calls it with temporary copies of them instead. Reads,
writes, branches, loops and functions that the step calls therefore mean what they mean
on one device. Afterwards the copies hold the values that the step has written.

* Rows that a step looks up are read on the servers, if it does not use the rest of the
  variable.
* `optimizer.apply` is noted, not run: the gradients are results of the step, and
  servers apply them. Where a step reads what `apply` has updated, or calls `apply` in a
  branch or a loop, the optimizer runs on the copies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_strategies import _keras_internal, _tf_internal, errors
from tf_strategies.checkpoint import model_state
from tf_strategies.keras.tables import row_updates
from tf_strategies.spmd import plan, row_sharing
from tf_strategies.spmd import rules as _rules  # noqa: F401  Registers them.
from tf_strategies.strategies.parameter_server import (
  batch_message,
  packing,
)

COORDINATOR = '/job:chief/replica:0/task:0/device:CPU:0'


class _Current(threading.local):
  trace: Trace | None = None


_current = _Current()


@dataclasses.dataclass
class Trace:
  """A step that is being traced.

  Attributes:
    graph: the graph of the step, without its branches and loops.
    wholes: the `id` of each variable of which the step uses more than rows.
    are_rows_known: whether the operations that read the rows of a table without a
      vocabulary are to be ones that `spmd` knows.
    reduces: whether it has asked for a reduction over replicas.
  """

  graph: Any
  wholes: frozenset[int] = frozenset()
  are_rows_known: bool = False
  reduces: bool = False

  def looks_up(self, variable: Any) -> bool:
    """Returns whether rows that are read here are read on the servers.

    Not in branches and loops, whose gradients reach only tensors from outside.
    """
    is_nested = tf.compat.v1.get_default_graph() is not self.graph
    return not is_nested and id(variable) not in self.wholes


# Variables on servers, by the ids of their handles, which they keep alive.
_by_handle: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def register(variable: tf.Variable, handle: tf.Tensor) -> None:
  """Notes by which handle steps know a variable on servers."""
  _by_handle[id(handle)] = variable


def current() -> Trace | None:
  """Returns the trace of the step that this thread traces, if any."""
  return None if tf.executing_eagerly() else _current.trace


@contextlib.contextmanager
def _tracing(**options) -> Iterator[Trace]:
  trace = Trace(tf.compat.v1.get_default_graph(), **options)
  before, _current.trace = _current.trace, trace
  try:
    yield trace
  finally:
    _current.trace = before


def concrete(function: Callable, *specs: tf.TensorSpec) -> Callable:
  """Traces a function, maybe while another one is being traced.

  `tf.init_scope` would do, but that it stops gradient tapes.
  """
  with tf.__internal__.eager_context.eager_mode():
    return tf.function(function, autograph=False).get_concrete_function(*specs)


class Outputs:
  """What a step returns: numbers and small arrays, or other tensors.

  Attributes:
    structure: of the results.
    specs: of each result.
    are_numbers: whether all are numbers and small arrays, which fit one message.
  """

  def __init__(self, structure: Any):
    self.structure = structure
    self.specs: list[Any] = tf.nest.flatten(structure)
    self.are_numbers = all(
      isinstance(s, tf.TensorSpec) and packing.is_small(s.shape, s.dtype)
      for s in self.specs
    )


@dataclasses.dataclass
class Gradient:
  """A gradient that a step computes for a variable; tensors by field of it."""

  variable: Any
  specs: list[tf.TensorSpec]
  # Of rows: whether their numbers come from the batch, and are never equal.
  is_sparse: bool = False
  is_of_batch: bool = False
  is_unique: bool = False

  def specs_of(self, part: Any) -> list[tf.TensorSpec]:
    """Returns the specs for a part of the variable."""
    if self.is_sparse:
      return self.specs
    return [tf.TensorSpec(part.shape, self.specs[0].dtype)]


@dataclasses.dataclass
class Write:
  """A variable that a step writes.

  Attributes:
    variable: the variable.
    adds: whether it only adds to it.
    is_plain: whether it does so by assignments, outside of branches and loops.
    added: numbers of the tensors that it adds, among all that the step adds. None
      unless that is all. The worker then sends the variable's value, or, if it `adds`,
      how much it has grown.
    begin: number of the first operation that may write it.
  """

  variable: Any
  adds: bool
  is_plain: bool
  added: list[int] | None
  begin: int


class TracedStep:
  """A step, traced for batches of one structure.

  Args:
    run: the step, a function of a batch.
    optimizers: those whose `apply` is noted, where that is possible.
    structure: specs of a batch.
    **options: of the `Trace`.

  Attributes:
    function: a function of the components of a batch, which returns the results, the
      tensors of the gradients, and those that it adds to variables.
    outputs: what the step returns.
    calls: of `apply`: (optimizer, gradients, variables, number of the first operation
      after it); a gradient may be None.
    gradients: those of all calls.
    writes: its other writes.
    copied: variables of which a worker needs a copy.

  Raises:
    ScopeError: if it writes a variable that is not on a server.
    UnsupportedOptionError: if a part of its results is None, or a step calls Python
      functions.
  """

  def __init__(
    self,
    run: Callable[[Any], Any],
    optimizers: Sequence[Any],
    structure: Any,
    **options,
  ):
    self._run, self._structure = run, structure
    noted = list(optimizers)
    wholes: set[int] = set()
    while True:
      self._trace(noted, wholes=frozenset(wholes), **options)
      late = self._late_optimizers()
      # Variables in parts, whose rows may have been read.
      written = {
        id(write.variable)
        for write in self.writes
        if len(write.variable.parts) > 1
      } - wholes
      if not late and not written:
        break
      noted = [o for o in noted if o not in late]
      wholes |= written
    self._are_noted = len(noted) == len(optimizers)
    _check_python(self.function.graph)
    targets = [v for _, _, variables, _ in self.calls for v in variables]
    _check_variables(self.function.graph, targets)

  def _trace(self, optimizers, **options):
    def trace(*flat):
      batch = batch_message.pack(self._structure, flat)
      with (
        _tracing(**options) as traced,
        _keras_internal.capture_apply(optimizers) as calls,
      ):
        outputs = self._run(batch)
        outputs = () if outputs is None else outputs
        if any(each is None for each in tf.nest.flatten(outputs)):
          raise errors.UnsupportedOptionError(
            f'a step on workers that returns {outputs}',
            'a structure of tensors and numbers, or None alone',
            'leave out what is None',
          )
        # A metric's result may be its variable.
        outputs = tf.nest.map_structure(tf.convert_to_tensor, outputs)
        gradients, tensors = self._gradients(calls, flat, traced)
        added = [
          op
          for op in traced.graph.get_operations()
          if op.type in ('AssignAddVariableOp', 'AssignSubVariableOp')
        ]
      self._reduces = traced.reduces
      self._added = added
      self.outputs = Outputs(tf.nest.map_structure(_spec_of, outputs))
      self.calls = gradients
      self.gradients = [g for _, found, *_ in gradients for g in found if g]
      return tf.nest.flatten(outputs), tensors, list(map(_added_by, added))

    specs = batch_message.BatchLayout(self._structure).specs
    self.function = concrete(trace, *specs)
    graph = self.function.graph
    self._batch = graph.inputs[: len(specs)]
    # The handles inside of the step, by the ids of those that it has captured.
    self._inside = {
      id(external): inside
      for external, inside in graph.captures
      if external.dtype == tf.resource
    }
    self._place = {op.name: i for i, op in enumerate(graph.get_operations())}
    # Its variables with all operations on them, by the ids of handles.
    self._uses = {
      key: (_by_handle[key], list(_uses(graph, inside, graph)))
      for key, inside in self._inside.items()
      if key in _by_handle
    }
    self.writes = [
      self._write(graph, key, variable, written)
      for key, (variable, uses) in self._uses.items()
      if (written := [op for op in uses if op.type not in READS])
    ]
    self.copied = [
      variable
      for variable, uses in self._uses.values()
      # Not only rows that are looked up outside of branches, loops and what XLA
      # compiles.
      if any(op.type not in _LOOKUPS or op.graph is not graph for op in uses)
    ]
    for variable in self.copied:
      if getattr(variable, 'is_part', False):
        raise errors.UnsupportedOptionError(
          'a function that was traced before the step, with '
          f'{variable.name!r}, which servers share',
          'a tf.function, which is traced as a part of the step',
          'call the tf.function, not what its get_concrete_function() returns',
        )

  def _write(
    self, graph, key: int, variable, written: Sequence[tf.Operation]
  ) -> Write:
    is_plain = all(
      op.type in _ASSIGNMENTS and op.graph is graph for op in written
    )
    adds = all(op.type in _ADDITIONS for op in written)
    added = None
    if adds and is_plain:
      added = [i for i, op in enumerate(self._added) if op in written]
    begin = min(
      self._place[op.name]
      for op in self._inside[key].consumers()
      if op.type not in READS
    )
    return Write(variable, adds, is_plain, added, begin)

  def _gradients(self, calls, flat, traced):
    """Returns the calls of `apply` with `Gradient`s, and the tensors of all."""
    found, tensors = [], []
    batch = [t.op.name for t in flat]
    for optimizer, gradients, variables, begin in calls:
      if variables is None:
        variables = _keras_internal.trainable_variables(optimizer)
      takes_sums = row_updates.takes_sums(optimizer, clips=True)
      if takes_sums and not traced.are_rows_known:
        # On the worker, before they are sent.
        gradients = map(row_updates.summed, gradients)
      described = []
      for gradient, variable in zip(gradients, variables, strict=False):
        if gradient is None:
          described.append(None)
          continue
        variable = model_state.value_of(variable)
        if isinstance(gradient, tf.IndexedSlices):
          parts = [gradient.values, gradient.indices]
          specs = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in parts]
          described.append(
            Gradient(
              variable,
              specs,
              is_sparse=True,
              is_of_batch=_depends_on(gradient.indices, batch),
              is_unique=_origin_type(gradient.indices) == 'Unique',
            )
          )
        else:
          parts = [tf.reshape(tf.convert_to_tensor(gradient), variable.shape)]
          described.append(Gradient(variable, [_spec_of(parts[0])]))
        tensors += parts
      found.append((optimizer, described, list(variables), begin))
    return found, tensors

  def _late_optimizers(self) -> list[Any]:
    """Returns optimizers whose updates the step needs itself, or makes in a branch."""
    late = []
    written = {id(w.variable) for w in self.writes}
    for optimizer, found, variables, begin in self.calls:
      state = [*variables, *_keras_internal.state_of(optimizer)]
      # Without gradients: in a branch, a loop or a function. A step may also write a
      # variable of the optimizer, such as the learning rate.
      is_late = not found or any(
        id(model_state.value_of(each)) in written
        for each in (*variables, *optimizer.variables)
      )
      for value in map(model_state.value_of, state):
        is_late |= any(
          self._place[op.name] >= begin
          for each in (
            getattr(value, 'stand_in', value),
            *getattr(value, 'parts', ()),
          )
          if (placeholder := self._inside.get(id(each.handle))) is not None
          for op in placeholder.consumers()
        )
      if is_late:
        late.append(optimizer)
    return late

  def reasons(self, exempt: Sequence[Any]) -> Iterator[str]:
    """Yields why workers cannot share the rows of a batch.

    Args:
      exempt: variables that the step may read when it has written them.
    """
    if self._reduces:
      yield 'a reduction over replicas'
    if not self._are_noted:
      yield 'optimizer.apply in a branch or a loop, or a read of what it has updated'
    if not self.outputs.are_numbers:
      yield 'results that are no numbers'
    leaves = [s for s in tf.nest.flatten(self._structure) if s is not None]
    if not all(isinstance(s, tf.TensorSpec) for s in leaves):
      yield 'batches of ragged or sparse tensors'
    for write in self.writes:
      name = _name_of(write.variable)
      if _keras_internal.is_seed_state(name, write.variable.dtype):
        yield 'random numbers, as of Dropout'
      elif not write.is_plain:
        yield f'{name!r}, which it writes in a branch or a loop, or row by row'
    if not (self.calls or self.writes):
      yield 'a step that changes nothing'
    graph = self.function.graph
    skipped = {id(model_state.value_of(each)) for each in exempt}
    for variable, everywhere in self._uses.values():
      uses = [op for op in everywhere if op.graph is graph]
      written = [self._place[op.name] for op in uses if op.type not in READS]
      read = [self._place[op.name] for op in uses if op.type in READS]
      if (
        written
        and id(variable) not in skipped
        and any(at > min(written) for at in read)
      ):
        yield f'{_name_of(variable)!r}, which it reads when it has written it'

  def powers(self) -> Powers:
    """Returns how to combine what workers compute from their rows.

    Raises:
      NeedsExchangeError: workers cannot share the rows. The message says why.
    """
    graph = self.function.graph
    count = len(self._batch)
    if not all(s.shape.is_fully_defined() for s in self.outputs.specs):
      raise plan.NeedsExchangeError('results that are as long as the batch')
    of_rows = functools.partial(row_sharing.powers, graph, count)
    batch = [t.op.name for t in self._batch]
    results = len(self.outputs.specs)
    returned, tensors = graph.outputs[:results], iter(graph.outputs[results:])
    groups = [
      _lookups([next(tensors) for _ in gradient.specs], batch)
      for gradient in self.gradients
    ]
    written = [
      (variable, op)
      for variable, uses in self._uses.values()
      for op in uses
      if op.type in _ASSIGNMENTS
    ]
    values = [op.inputs[1] for _, op in written]
    try:
      found = iter(of_rows([*itertools.chain(*groups), *returned, *values]))
    except plan.NeedsExchangeError as error:
      for variable, op in written:
        try:
          of_rows([op.inputs[1]])
        except plan.NeedsExchangeError:
          name = _name_of(variable)
          raise plan.NeedsExchangeError(f'{error}, for {name!r}') from None
      raise
    of_gradients = []
    for group in groups:
      of_group = [next(found) for _ in group][: -(-len(group) // 2)]
      if len(set(of_group)) > 1:
        raise plan.NeedsExchangeError('rows of a table are used in two ways')
      of_gradients.append(of_group[0])
    of_outputs = [next(found) for _ in returned]
    writes: dict[int, int] = {}
    for (variable, _), power in zip(written, found, strict=True):
      if writes.setdefault(id(variable), power) != power:
        raise plan.NeedsExchangeError(
          f'{_name_of(variable)!r} gets both sums over rows and other values'
        )
    return Powers(of_gradients, of_outputs, writes)


@dataclasses.dataclass(frozen=True)
class Powers:
  """How to combine what workers compute from their rows: 1: add up; 0: average.

  `gradients` and `outputs` are in their order. `writes` are by the `id` of a variable.
  """

  gradients: list[int]
  outputs: list[int]
  writes: dict[int, int]


def powers_of_rows(
  run: Callable[[Any], Any],
  optimizers: Sequence[Any],
  structure: Any,
  exempt: Callable[[], Sequence[Any]],
) -> Powers:
  """Traces a step on any number of rows, to see how to combine the results of workers.

  Args:
    run: the step, a function of a batch.
    optimizers: the optimizers that it applies.
    structure: structure of a batch with any number of rows.
    exempt: returns variables that the step may read when it has written them.

  Raises:
    NeedsExchangeError: workers cannot share the rows. The message says why.
  """
  try:
    traced = TracedStep(run, optimizers, structure, are_rows_known=True)
  except errors.Error:
    raise
  except (TypeError, ValueError) as e:
    raise plan.NeedsExchangeError(
      f'a step that needs to know how many rows there are ({e})'
    ) from e
  for reason in traced.reasons(exempt()):
    raise plan.NeedsExchangeError(reason)
  return traced.powers()


_LOOKUPS = frozenset(('ResourceGather', 'ResourceGatherNd', 'VariableShape'))
# What does nothing to a variable.
READS = _LOOKUPS | {'ReadVariableOp', 'VarIsInitializedOp'}
_ADDITIONS = frozenset(
  (
    'AssignAddVariableOp',
    'AssignSubVariableOp',
    'ResourceScatterAdd',
    'ResourceScatterSub',
    'ResourceScatterNdAdd',
    'ResourceScatterNdSub',
  )
)
_ASSIGNMENTS = (
  'AssignVariableOp',
  'AssignAddVariableOp',
  'AssignSubVariableOp',
)
_PYTHON = frozenset(('EagerPyFunc', 'PyFunc', 'PyFuncStateless'))


def _uses(graph, tensor, root) -> Iterator[tf.Operation]:
  """Yields the operations that use a handle, also in functions that others call."""
  for op in tensor.consumers():
    functions, _ = _tf_internal.functions_of(root, op, op.node_def.attr)
    # The first input of a branch chooses it.
    first = (
      1 if op.type in ('If', 'StatelessIf', 'Case', 'StatelessCase') else 0
    )
    for i, given in enumerate(op.inputs):
      if given is not tensor:
        continue
      if op.type == 'Identity':
        yield from _uses(graph, op.outputs[0], root)
      elif not functions:
        yield op
      for body in functions.values():
        yield from _uses(body, body.inputs[i - first], root)


def _added_by(op: tf.Operation) -> tf.Tensor:
  """Returns what an operation adds to its variable."""
  value = op.inputs[1]
  return value if 'Add' in op.type else tf.zeros_like(value) - value


def _spec_of(tensor: tf.Tensor) -> tf.TensorSpec:
  return tf.TensorSpec(tensor.shape, tensor.dtype)


def _name_of(variable: tf.Variable) -> str:
  return variable.name.removesuffix(':0')


def _lookups(parts: Sequence[tf.Tensor], batch: Sequence[str]) -> list:
  """The tensors of a gradient; of one of several lookups those of each of them.

  Their rows follow each other, in any order. Not where some are of the batch and
  others, such as positions, of all rows: these would be added up.
  """
  if len(parts) == 1:
    return list(parts)
  values, indices = map(_followed, parts)
  if len(values) == len(indices) and all(
    _depends_on(part, batch) for part in indices
  ):
    return [*values, *indices]
  return list(parts)


def _followed(tensor) -> list[tf.Tensor]:
  """The tensors of which one is a concatenation."""
  while tensor.op.type == 'Identity':
    tensor = tensor.op.inputs[0]
  if tensor.op.type != 'ConcatV2':
    return [tensor]
  return [part for each in tensor.op.inputs[:-1] for part in _followed(each)]


def _depends_on(tensor: tf.Tensor, sources: Sequence[str]) -> bool:
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


def _origin_type(tensor) -> str:
  """The type of the op that made a tensor, whatever reshaped it since."""
  while tensor.op.type in ('Identity', 'Reshape', 'Cast'):
    tensor = tensor.op.inputs[0]
  return tensor.op.type


def _check_python(graph) -> None:
  """Raises an error for an operation that calls this process's Python."""
  definition = graph.as_graph_def()
  nodes = list(definition.node)
  for function in definition.library.function:
    nodes += function.node_def
  for node in nodes:
    if node.op in _PYTHON:
      raise errors.UnsupportedOptionError(
        f'tf.numpy_function or tf.py_function ({node.name!r})',
        "TensorFlow's operations in a step on workers",
        'call it in the tf.data pipeline, or write it with tf or keras.ops. '
        'The function is in this process',
      )


def _check_variables(graph, targets: Sequence[Any]) -> None:
  """Raises an error for a variable of this process that workers would write.

  Workers may read such variables, for example the vocabulary of an adapted layer.
  """
  trained = {id(model_state.value_of(each)) for each in targets}
  for variable in graph.variables:
    if id(variable.handle) in _by_handle or (
      tf.DeviceSpec.from_string(variable.handle.device).job == 'ps'
    ):
      continue
    inside = graph.capture(variable.handle)
    is_written = any(op.type not in READS for op in _uses(graph, inside, graph))
    is_seed = _keras_internal.is_seed_state(variable.name, variable.dtype)
    if not is_seed and (is_written or id(variable) in trained):
      raise errors.ScopeError(
        f'variable {variable.name!r} in a step on workers, made outside of it',
        "variables made in the strategy's scope",
        'make the model, its optimizer, losses and metrics inside '
        '`with strategy.scope():`',
      )
