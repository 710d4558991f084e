"""Rules for branches and loops, which each replica runs on its own values, for
variables, and for what draws random numbers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tf_strategies import errors
from tf_strategies.spmd.emit import run_body
from tf_strategies.spmd.exchange import Exchange
from tf_strategies.spmd.kinds import (
  HELD,
  SUM,
  WHOLE,
  Dim,
  Listed,
  Split,
  Value,
  one_list,
)
from tf_strategies.spmd.plan import (
  Context,
  Decision,
  NeedsExchangeError,
  Plan,
  UnknownError,
  is_sum,
  make,
  rule,
)
from tf_strategies.spmd.program import Node
from tf_strategies.spmd.site import Site

_MAX_TURNS = 10


@rule('If', 'StatelessIf', 'Case', 'StatelessCase')
def _branches(context):

  def decide(arguments):
    """Returns the decision for arguments of these kinds."""
    node = context.node
    plans = {
      name: make(body, arguments, may_meet=False)
      for name, body in node.bodies.items()
    }
    outputs = [
      _join(
        [p.seen(p.program.outputs[i]) for p in plans.values()], context.dims(i)
      )
      for i in range(len(node.outputs))
    ]

    def emit(site, inputs):
      [results] = build_branches(node, plans, outputs, [site], [inputs])
      return results

    wants = [WHOLE, *(v.kind for v in arguments)]
    return Decision(wants, outputs, emit, bodies=plans)

  return _without_meetings(context, context.inputs[1:], decide)


def _without_meetings(context, values, decide) -> Decision:
  """Returns the first decision in which replicas need not meet inside."""
  reason = None
  for arguments in _attempts(values):
    try:
      return decide(arguments)
    except NeedsExchangeError as error:
      reason = reason or error
  raise errors.UnsupportedOptionError(
    f'{context.node.type} {context.node.name!r}, in which replicas would have to '
    f'meet ({reason})',
    'a loop or branch that computes row by row, or with variables that each '
    'replica has a copy of',
    'move what it computes of all rows of the batch out of it',
  )


def _attempts(values):
  """Yields arguments to try: the values themselves, then more and more of them whole."""

  def others_whole(are_kept, whole):
    return [
      v if isinstance(v.kind, are_kept) or v.resource is not None else whole(v)
      for v in values
    ]

  yield list(values)
  yield others_whole(Split | Listed, lambda v: v.of(WHOLE))
  # Without known lengths, so that copies of them are whole.
  yield others_whole(Listed, lambda v: Value(WHOLE))


def _join(found, dims):
  """Returns the value of an output that is one of those in `found`."""
  kinds = [v.kind for v in found]
  split = next((v for v in found if isinstance(v.kind, Split)), None)
  if all(isinstance(k, Listed) for k in kinds):
    if (value := one_list(found)) is not None:
      return value
  elif all(k == WHOLE or is_sum(k) for k in kinds):
    return Value(next((k for k in (HELD, SUM) if k in kinds), WHOLE), dims)
  elif split is not None and dims is not None:
    axis = split.kind.axis
    length = split.dims[axis]
    if all(
      v.dims is not None
      and len(v.dims) > axis
      and (v.kind == WHOLE or (v.kind, v.dims[axis]) == (split.kind, length))
      for v in found
    ):
      return split.like(dims)
  raise NeedsExchangeError(f'its results are {found}')


def build_branches(
  node: Node,
  plans: Mapping[str, Plan],
  outputs: Sequence[Value],
  sites: Sequence[Site],
  inputs: Sequence[Sequence[tf.Tensor]],
  exchange: Exchange | None = None,
) -> list[list[tf.Tensor]]:
  """Builds one branch for all of `sites`, which may meet in it in `exchange`.

  Returns the outputs of each site.
  """
  chosen = inputs[0][0]
  arguments = [row[1:] for row in inputs]

  def build(plan):
    kinds = [v.kind for v in outputs]
    rows = run_body(plan, sites, arguments, kinds, exchange)
    # A branch has to have a result.
    return [
      [tf.identity(r) if r.dtype != tf.variant else r for r in row]
      or [tf.constant(0)]
      for row in rows
    ]

  calls = {name: functools.partial(build, plan) for name, plan in plans.items()}
  if node.type.endswith('If'):
    names = 'then_branch', 'else_branch'
    return tf.cond(tf.cast(chosen, tf.bool), *(calls[name] for name in names))
  return tf.switch_case(chosen, list(calls.values()))


@rule('While', 'StatelessWhile')
def _loop(context):
  body = context.node.bodies['body']
  constant = [
    given is returned
    for given, returned in zip(body.inputs, body.outputs, strict=True)
  ]

  def decide(start):
    variables, plans = _settled(context, start, constant)
    return _loop_decision(context, variables, plans, constant)

  return _without_meetings(context, context.inputs, decide)


def _settled(context, start, constant):
  """The kinds of the loop's variables that hold in every turn."""
  variables = [
    v if c else _variable(v) for v, c in zip(start, constant, strict=True)
  ]
  bodies = context.node.bodies
  for _ in range(_MAX_TURNS):
    plan = make(bodies['body'], variables, may_meet=False)
    new = []
    for i, value in enumerate(variables):
      if constant[i]:
        new.append(value)
        continue
      found = plan.seen(plan.program.outputs[i])
      joined = _join([value, found], context.dims(i) or value.dims)
      new.append(_variable(joined))
    if [(v.kind, v.ints) for v in new] == [(v.kind, v.ints) for v in variables]:
      test = make(bodies['cond'], variables, may_meet=False)
      if test.seen(test.program.outputs[0]).kind != WHOLE:
        raise NeedsExchangeError('its condition is not whole')
      return variables, {'body': plan, 'cond': test}
    variables = new
  raise NeedsExchangeError('its variables do not settle')


def _variable(value):
  """Returns the value of a loop variable: its contents change from turn to turn."""
  if isinstance(value.kind, Listed):
    return _lasting(value)
  return dataclasses.replace(value, ints=None, axes=None)


# Unique numbers for unknown lengths.
_elements = itertools.count()


def _lasting(value):
  """Returns a list after a turn: of its lengths only numbers and rows are known."""
  dims, ints = value.dims, value.ints
  if dims is not None:
    dims = tuple(
      d if d.is_of_rows else Dim(1, (f'element:{next(_elements)}',))
      for d in dims
    )
  if not all(i.is_of_rows for i in ints or ()):
    ints = None
  return dataclasses.replace(value, dims=dims, ints=ints)


def _loop_decision(context, variables, plans, constant):
  node = context.node
  changing = [i for i, c in enumerate(constant) if not c]

  def emit(site, inputs):
    """Builds the loop for a site; only values that change are loop variables."""

    def arguments(values):
      all_of_them = list(inputs)
      for i, value in zip(changing, values, strict=True):
        all_of_them[i] = value
      return all_of_them

    def run(name, kinds, values):
      given = [arguments(values)]
      [results] = run_body(plans[name], [site], given, kinds)
      return results

    def test(*values):
      return run('cond', [WHOLE], values)[0]

    def turn(*values):
      results = run('body', [v.kind for v in variables], values)
      return [results[i] for i in changing]

    results = tf.while_loop(
      test,
      turn,
      [inputs[i] for i in changing],
      shape_invariants=[
        # Operations on shapes of a replica's own tell less of lengths.
        tf.TensorShape([None] * t.shape.rank) if t.shape.rank else t.shape
        for t in (inputs[i] for i in changing)
      ],
      parallel_iterations=node.attr('parallel_iterations') or 10,
    )
    return arguments(tf.nest.flatten(results))

  def output(i, value):
    if constant[i] or isinstance(value.kind, Listed):
      return value
    dims = context.dims(i)
    if dims is None and isinstance(value.kind, Split):
      raise UnknownError
    return value.like(dims)

  return Decision(
    [v.kind if v.resource is None else WHOLE for v in variables],
    [output(i, value) for i, value in enumerate(variables)],
    emit,
    bodies=plans,
  )


def _held(context):
  """Returns the kind in which replicas hold the variable that input 0 stands for."""
  resource = context.inputs[0].resource
  if resource is None:
    return WHOLE
  return resource.shard or (HELD if resource.is_part else WHOLE)


@rule('ReadVariableOp')
def _read(context):
  return Decision([WHOLE], [context.out(_held(context))])


@rule('AssignVariableOp', 'AssignAddVariableOp', 'AssignSubVariableOp')
def _assign(context):
  kind = _held(context)
  if kind == WHOLE and isinstance(context.kinds[1], Split):
    # As of a stateful RNN: its batches are as long as the variable, which other
    # operations may rely on too.
    raise errors.UnsupportedOptionError(
      f'{context.node.type} {context.node.name!r} of a variable that holds the '
      'rows of a batch',
      'variables without an axis of the batch',
      'leave it out, such as stateful=True of an RNN, to share out the rows',
    )
  return Decision([WHOLE, kind], [])


# TensorFlow calls them stateful, but they have no effect.
rule('StatelessRandomGetAlg', 'VarIsInitializedOp', 'VariableShape')(
  Context.whole
)


@rule('NoOp', 'ControlTrigger')
def _nothing(context):
  del context
  return Decision([], [], lambda site, inputs: [])


@rule('VarHandleOp', 'MutableHashTableV2', 'HashTableV2')
def _handles(context):
  return Decision([], [Value(WHOLE, ())])
