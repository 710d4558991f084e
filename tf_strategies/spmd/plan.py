"""Decides how replicas hold each tensor of a program, and where they meet.

A rule gets the kinds of an operation's inputs. It decides in which kinds the operation
wants them, and returns the kinds of the outputs. Most rules only name the axes of
inputs and outputs, and `Context.by_axes` follows the rows along them. An operation
without a rule wants all inputs whole. Replicas meet (exchange a tensor) where it is
wanted whole and is not. The level of an operation is the number of meetings before it.
All tensors that are ready at one level travel in one meeting.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import errors
from tf_strategies.spmd import kinds
from tf_strategies.spmd.kinds import (
  AS_IS,
  FIRST,
  HELD,
  SUM,
  WHOLE,
  Dim,
  Listed,
  Part,
  Shard,
  Split,
  Value,
)
from tf_strategies.spmd.program import Node, Program, Tensor

# Longest tensor of integers whose contents are known.
MOST_INTS = 64


class NeedsExchangeError(Exception):
  """Replicas would have to meet where they cannot: in a loop or a branch."""


class UnknownError(Exception):
  """A rule does not know a rank or a number. The inputs become whole."""


def known(value: Any) -> Any:
  """Returns a value that is not None, or raises UnknownError."""
  if value is None:
    raise UnknownError
  return value


@dataclasses.dataclass
class Decision:
  """How each replica runs an operation.

  Attributes:
    wants: kind in which each input is wanted.
    outputs: value of each output.
    emit: builds it, given a site and its inputs; None copies the operation.
    bodies: plans of its branches or loops, by name.
    emit_together: builds it for all sites, given the sites, the inputs of each, and
      an exchange in which they may meet; returns the outputs of each.
  """

  wants: Sequence[Any]
  outputs: Sequence[Value]
  emit: Callable[..., Sequence[tf.Tensor]] | None = None
  bodies: dict[str, Plan] = dataclasses.field(default_factory=dict)
  emit_together: Callable[..., Sequence[Sequence[tf.Tensor]]] | None = None


class Plan:
  """The decisions for a program.

  Attributes:
    values: kinds of the tensors, as far as the plan knows them.
    decisions: how replicas run each node.
    levels: number of meetings before each node runs.
    forced: partial sums that become whole, or shards, as soon as they have been
      computed.
    deferred: writes that wait until every meeting of the step is over.
  """

  def __init__(
    self,
    program: Program,
    arguments: Sequence[Value],
    forced: dict[Tensor, Any],
    memo: dict,
    may_meet: bool,
  ):
    self.program, self.forced = program, forced
    self.values = {
      tensor: self._with_dims(tensor, value)
      for tensor, value in zip(program.inputs, arguments, strict=True)
    }
    self.decisions: dict[Node, Decision] = {}
    self.levels: dict[Node, int] = {}
    self.deferred: set[Node] = set()
    self._memo, self._may_meet = memo, may_meet

  def _with_dims(self, tensor, value):
    dims = static_dims(tensor)
    if value.dims is not None or dims is None or isinstance(value.kind, Listed):
      return value
    if isinstance(value.kind, Split):
      return kinds.split(value.kind.axis, kinds.ROWS, dims)
    return dataclasses.replace(value, dims=dims)

  def decide(self) -> dict[Tensor, Any]:
    """Decides every node; returns the `forced` tensors of the next pass."""
    wanted = {}
    for node in self.program.nodes:
      if node.type == '_Argument':
        self.levels[node] = 0
        continue
      decision = self._decide(node)
      self.decisions[node] = decision
      self.values.update(zip(node.outputs, decision.outputs, strict=True))
      level = max((self.levels[n] for n in node.before), default=0)
      for tensor, want in self.wanted(node):
        kind = self.values[tensor].kind
        if isinstance(kind, Listed):
          _check_list(kind, want, node)
        meets = self.meets(tensor, want)
        if meets and not self._may_meet:
          cause, why = node, 'needs all rows of a batch at once'
          if kind == FIRST:
            cause, why = tensor.node, 'runs once for all replicas'
          raise NeedsExchangeError(f'{cause.type} {cause.name!r} {why}')
        forced = self.forced.get(tensor)
        if meets and isinstance(kind, Part) and forced not in (want, WHOLE):
          if isinstance(want, Shard) and kind == SUM:
            # Others may want shards too; if not, a later pass makes it whole.
            wanted[tensor] = WHOLE if tensor in self.forced else want
          else:
            wanted.setdefault(tensor, WHOLE)
        level = max(level, self.levels[tensor.node] + meets)
      self.levels[node] = level
    return wanted

  def _decide(self, node):
    context = Context(self, node)
    key = (node, tuple(context.inputs)) if node.bodies else None
    if key in self._memo:
      return self._memo[key]
    decision = None
    # An opaque function has no rule, because its operations are unknown.
    kind = None if node.opaque else node.type
    if context.has_shards and kind in SHARD_RULES:
      decision = SHARD_RULES[kind](context)
    if decision is None:
      context.take_whole()
      decision = _of_sums(context)
    if decision is None and kind in RULES:
      with contextlib.suppress(UnknownError):
        decision = RULES[kind](context)
        if isinstance(decision, tuple):
          decision = context.by_axes(*decision)
    if decision is None:
      decision = _default(context)
    if key is not None:
      self._memo[key] = decision
    return decision

  def seen(self, tensor: Tensor) -> Value:
    """Returns the kind of a tensor as its consumers see it."""
    value = self.values[tensor]
    if tensor in self.forced and isinstance(value.kind, Part):
      return value.of(self.forced[tensor])
    return value

  def meets(self, tensor: Tensor, wanted) -> bool:
    """Returns whether replicas meet for a tensor that is wanted so."""
    kind = self.values[tensor].kind
    if wanted == AS_IS or not isinstance(kind, Split | Part | Shard):
      return False
    if isinstance(kind, Part) and tensor in self.forced:
      return True
    return kind != wanted and (kind, wanted) != (SUM, HELD)

  def wanted(self, node: Node) -> Iterable[tuple[Tensor, Any]]:
    """Returns the inputs of a node, each with the kind in which it is wanted."""
    return zip(node.inputs, self.decisions[node].wants, strict=True)

  def resources(self, node: Node) -> list[Any]:
    """Returns the variables and other objects that a node uses."""
    return [r for t in node.inputs if (r := self.values[t].resource)]

  def meet_first(
    self, outputs: Sequence[tuple[Tensor, Any]], defers: bool
  ) -> set[Any]:
    """Moves what no meeting needs behind the last meeting.

    It can then be built as one block. With `defers`, variables are not written before
    the last meeting is over: a step in which one fails has not applied or counted
    itself. Returns the resources that are written earlier all the same.
    """
    uses = itertools.chain(outputs, *map(self.wanted, self.decisions))
    before_meetings = [t.node for t, wanted in uses if self.meets(t, wanted)]
    before_meetings += [n for n, d in self.decisions.items() if d.emit_together]
    early = set()
    if not before_meetings:
      return early
    last = 1 + max(self.levels[n] for n in before_meetings)
    needed = set()
    while before_meetings:
      node = before_meetings.pop()
      if node not in needed:
        needed.add(node)
        before_meetings += [*node.before, *(t.node for t in node.inputs)]
    for node in self.program.nodes:
      written = {r for r in self.resources(node) if node.acts and not r.is_part}
      if node in needed:
        early |= written
        continue
      self.levels[node] = last
      if written and defers:
        self.deferred.add(node)
    return early

  def is_computed(self, tensor: Tensor, wanted) -> bool:
    """Returns whether its contents follow from the number of rows, so are not built."""
    return (
      wanted in (WHOLE, AS_IS)
      and self.values[tensor].lengths is not None
      and tensor.dtype in (tf.int32, tf.int64, tf.float32, tf.float64)
      and tensor.shape.rank in (0, 1)
    )


class Context:
  """An operation and the values of its inputs, for its rule."""

  def __init__(self, plan: Plan, node: Node):
    self.node = node
    values = [plan.seen(t) for t in node.inputs]
    # Everybody needs all of what the first replica alone has.
    self.inputs = [v.of(WHOLE) if v.kind == FIRST else v for v in values]

  @property
  def kinds(self) -> list:
    """Kinds of the inputs."""
    return [value.kind for value in self.inputs]

  @property
  def has_shards(self) -> bool:
    """Returns whether an input is a shard, or a variable of which replicas have shards."""
    return any(
      isinstance(v.kind, Shard) or (v.resource and v.resource.shard)
      for v in self.inputs
    )

  def take_whole(self) -> None:
    """Has whole tensors in place of shards.

    Raises:
      UnsupportedOptionError: a variable of which replicas have shards is used.
    """
    for value in self.inputs:
      if value.resource is not None and value.resource.shard:
        raise errors.UnsupportedOptionError(
          f'{self.node.type} {self.node.name!r} of {value.resource.variable.name!r}, '
          'which shard_optimizer_state=True divides among replicas',
          'an optimizer that reads, assigns and adds to whole variables, '
          'outside of loops',
          'call the step in a Python loop, or leave out shard_optimizer_state',
        )
    self.inputs = [
      v.of(WHOLE) if isinstance(v.kind, Shard) else v for v in self.inputs
    ]

  def dims(self, index: int = 0) -> tuple[Dim, ...] | None:
    """Returns the lengths of an output as far as TensorFlow knows them."""
    return static_dims(self.node.outputs[index])

  def whole(self, **of_output) -> Decision:
    """Returns the decision to run it on whole inputs, given more of output 0."""
    outputs = [
      self.out(WHOLE, i, ints=ints) for i, ints in enumerate(self._folded())
    ]
    if of_output:
      outputs[0] = dataclasses.replace(outputs[0], **of_output)
    return Decision([WHOLE] * len(self.inputs), outputs)

  def _folded(self) -> list[tuple[Dim, ...] | None]:
    """Returns the contents of outputs, where they follow from known integers."""
    found = [None] * len(self.node.outputs)
    fold = FOLDS.get(self.node.type)
    if fold is None or any(k != WHOLE for k in self.kinds):
      return found
    try:
      arrays = fold(self, *map(self.integers, range(len(self.inputs))))
    except UnknownError:
      return found
    for i, array in enumerate(map(np.ravel, arrays)):
      output = self.node.outputs[i]
      is_number = output.dtype.is_floating and self.node.type == 'Cast'
      if (
        (output.dtype.is_integer or is_number)
        and output.shape.rank in (0, 1)
        and array.size <= MOST_INTS
      ):
        found[i] = kinds.ints_of(array, output)
    return found

  def integers(self, index: int) -> np.ndarray:
    """Returns the contents of an input, a small tensor of integers, as lengths.

    Raises:
      UnknownError: it is something else.
    """
    value, tensor = self.inputs[index], self.node.inputs[index]
    elements = tensor.shape.num_elements()
    if value.ints is not None and value.rank is not None:
      ints = value.ints
    elif tensor.dtype.is_integer and value.rank in (0, 1) and elements:
      ints = kinds.ints_of([None] * elements, tensor)
    else:
      raise UnknownError
    array = np.array(ints, object)
    return array if value.rank else array[0]

  def rank(self, index: int = 0) -> int:
    """Returns the number of axes of an input.

    Raises:
      UnknownError: it is unknown.
    """
    return len(known(self.inputs[index].dims))

  def numbers(self, index: int) -> tuple[int, ...]:
    """Returns the contents of an input.

    Raises:
      UnknownError: they are unknown.
    """
    return known(self.inputs[index].numbers)

  def names(self, index: int = 0, mixed: Sequence[int] = ()) -> list:
    """Returns a name for each axis of an input; None for the axes in `mixed`."""
    rank = self.rank(index)
    mixed = {axis % rank for axis in mixed}
    return [None if axis in mixed else axis for axis in range(rank)]

  def by_axes(
    self,
    inputs: Sequence[Sequence],
    outputs: Sequence[Sequence],
    op: str | None = None,
    shape: int | None = None,
    emit: Callable | None = None,
    dims: tuple[Dim, ...] | None = None,
  ) -> Decision:
    """Returns the decision for an operation that computes row by row.

    Args:
      inputs: for each input the names of its axes. Axes with one name belong
        together. The operation needs all of an axis without a name (None). The
        last inputs may be left out.
      outputs: the same for the outputs; the last axes may be left out.
      op: how rows are combined along an axis that no output has. None if the
        operation needs all of them.
      shape: index of the input that holds the shape of the output. If it has the
        number of rows, so has the output.
      emit: see `Decision`.
      dims: the lengths of output 0, if more is known than TensorFlow and the names
        say.

    Raises:
      UnknownError: a rank is unknown.
    """
    named, lengths, rows = self._named_axes(inputs)
    ints = None if shape is None else self.inputs[shape].ints
    if ints and outputs[0]:
      given = dict(zip(outputs[0], ints, strict=False))
      lengths.update((name, {dim}) for name, dim in given.items())
      made = [pair for pair in given.items() if pair[1].has_batch]
      if rows is None and len(made) == 1 and made[0][0] is not None:
        [rows] = made
    lengths[None] = set()

    def dims_of(i, names):
      if i == 0 and dims is not None:
        return dims
      found = list(known(self.dims(i)))
      for axis, name in enumerate(names):
        own = lengths.get(name, ())
        if not found[axis].is_number and len(own) == 1:
          [found[axis]] = own
      return tuple(found)

    dims_of_all = [dims_of(i, names) for i, names in enumerate(outputs)]
    if rows is None:
      return self.whole(dims=dims_of_all[0])
    name, length = rows
    is_kept = any(name in names for names in outputs)
    if not (is_kept or op):
      return self.whole(dims=dims_of_all[0])
    wants: list[Any] = [WHOLE] * len(self.inputs)
    for i, names in enumerate(named):
      if name in names:
        axis = names.index(name)
        wants[i] = Split(axis)
        if is_kept and not _is_long(self.inputs[i], axis, length):
          wants[i] = kinds.SplitIfLong(axis)
    results = []
    for names, each in zip(outputs, dims_of_all, strict=True):
      if is_kept:
        at = names.index(name)
        results.append(kinds.split(at, length, each))
        if shape is not None:
          emit = self.with_own_shape(shape, at)
      else:
        results.append(Value(Part(op), each))
    return Decision(wants, results, emit)

  def _named_axes(self, inputs):
    """Returns the names of the axes of each input, lengths by name, and the rows.

    The rows are the name and the length of the axis along which an input is split;
    None if there is none.
    """
    named, lengths, rows = [], {}, None
    for i, names in enumerate(inputs):
      pairs = []
      if names:
        self.rank(i)  # It must be known.
        value = self.inputs[i]
        # An axis of length 1 belongs to all rows.
        pairs = [
          (None if dim == kinds.ONE else name, dim)
          for name, dim in zip(names, value.dims, strict=True)
        ]
        for name, dim in pairs:
          lengths.setdefault(name, set()).add(dim)
        if rows is None and isinstance(value.kind, Split):
          name, dim = pairs[value.kind.axis]
          rows = None if name is None else (name, dim)
      named.append([name for name, _ in pairs])
    return named, lengths, rows

  def first(self, kind) -> list[Any]:
    """Returns wants: input 0 in this kind, and all others whole."""
    return [kind, *[WHOLE] * (len(self.inputs) - 1)]

  def out(self, kind, index: int = 0, **options) -> Value:
    """Returns an output for which TensorFlow's static lengths are right."""
    return Value(kind, self.dims(index), **options)

  def summed(self, wants=None) -> Decision:
    """Returns the decision in which outputs are sums, by default of input 0."""
    wants = wants or self.first(self.kinds[0])
    kind = HELD if HELD in self.kinds else SUM
    outputs = [self.out(kind, i) for i in range(len(self.node.outputs))]
    return Decision([kind if is_sum(w) else w for w in wants], outputs)

  def with_own_shape(self, index: int, axis: int) -> Callable:
    """Returns an `emit` that passes a replica's own shape as input `index`."""
    lengths = self.inputs[index].lengths

    def emit(site, inputs):
      inputs = list(inputs)
      inputs[index] = site.own_shape(inputs[index], axis, lengths)
      return site.op(self.node, inputs)

    return emit


def _is_long(value: Value, axis: int, length: Dim) -> bool:
  """Returns whether an axis that is paired with rows is never 1 long."""
  dim = value.dims[axis]
  return (
    value.kind == Split(axis) or dim == length or dim.is_number or dim.has_batch
  )


# Returns a decision, or the names of axes that `Context.by_axes` takes. None asks for
# the whole.
Rule = Callable[[Context], Decision | tuple | None]
RULES: dict[str, Rule] = {}
# The contents of the outputs of operations on small tensors of integers.
FOLDS: dict[str, Callable[..., Sequence[Any]]] = {}
# The inputs in each of which an operation is linear, and those that it adds up or puts
# side by side.
FACTORS: dict[str, tuple[int, ...]] = {}
TERMS: dict[str, slice] = {}
# Of operations on shards; one without a rule gets whole tensors in place of them.
SHARD_RULES: dict[str, Rule] = {}


def rule(*types: str, rules: dict[str, Rule] = RULES):
  """Registers a rule for operations."""

  def register(function: Rule) -> Rule:
    for name in types:
      if name in rules:
        raise ValueError(f'two rules for {name}')
      rules[name] = function
    return function

  return register


def make(
  program: Program,
  arguments: Sequence[Value],
  may_meet: bool = True,
) -> Plan:
  """Plans a program whose inputs are `arguments`.

  Raises:
    NeedsExchangeError: replicas would have to meet and may not.
  """
  # A gradient travels as such, not what a linear update makes of it.
  forced = {
    tensor: WHOLE if node.gradient[1] < 2 else Shard(node.gradient[1])
    for node in program.nodes
    if may_meet and node.gradient is not None
    for tensor in node.outputs
  }
  memo: dict = {}
  while True:
    plan = Plan(program, arguments, forced, memo, may_meet)
    wanted = plan.decide()
    if not wanted:
      return plan
    # It ends: each part is forced at most twice, to be shards and then to be whole.
    forced = {**forced, **wanted}


def static_dims(tensor: Tensor) -> tuple[Dim, ...] | None:
  """Returns the lengths of a tensor as far as TensorFlow knows them."""
  if tensor.shape.rank is None:
    return None
  return tuple(
    Dim(n) if n is not None else kinds.symbol('dim', tensor, axis)
    for axis, n in enumerate(tensor.shape)
  )


def is_sum(kind) -> bool:
  """Returns whether it is a sum over replicas."""
  return kind in (SUM, HELD)


def _check_list(kind, want, node) -> None:
  """Raises an error if an operation wants a list whole, which cannot be given."""
  is_taken = want == AS_IS or isinstance(want, Listed)
  if not is_taken and kind.kind not in (None, WHOLE):
    raise errors.UnsupportedOptionError(
      f'{node.type} {node.name!r} of a list that is split among replicas '
      '(such as a tf.TensorArray)',
      'a list that is read, written, stacked or gathered',
      'take tf.stack or tf.concat of a Python list of the tensors',
    )


def _of_sums(context) -> Decision | None:
  """Returns sums, where an operation is linear in those that it gets."""
  held, node = context.kinds, context.node
  sums = [i for i, kind in enumerate(held) if is_sum(kind)]
  if not sums or any(kind != WHOLE and not is_sum(kind) for kind in held):
    return None
  if len(sums) == 1 and sums[0] in FACTORS.get(node.type, ()):
    return context.summed(held)
  terms = range(len(held))[TERMS.get(node.type, slice(0))]
  if not set(sums) <= set(terms):
    return None
  return context.summed(
    [SUM if i in terms else WHOLE for i in range(len(held))]
  )


def _default(context) -> Decision:
  node = context.node
  resources = [v.resource for v in context.inputs if v.resource is not None]
  if not node.opaque and any(r.is_part for r in resources):
    raise errors.UnsupportedOptionError(
      f'{node.type} {node.name!r}',
      'assign, assign_add or assign_sub of a variable that is summed over '
      'replicas, such as a metric has',
      'write the whole variable: v.assign_add(tf.scatter_nd(...))',
    )
  if node.is_stateful:
    # Its effect is unknown, so it runs once, as on one device.
    outputs = [Value(FIRST, context.dims(i)) for i in range(len(node.outputs))]
    return Decision([WHOLE] * len(context.inputs), outputs)
  return context.whole()
