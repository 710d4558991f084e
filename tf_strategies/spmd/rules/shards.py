"""Operations on shards: what an optimizer does with pieces of flat tensors."""

from __future__ import annotations

import functools

import tensorflow as tf

from tf_strategies.spmd import pieces
from tf_strategies.spmd.kinds import (
  WHOLE,
  Dim,
  Part,
  Shard,
)
from tf_strategies.spmd.plan import RULES, SHARD_RULES, Decision, make, rule
from tf_strategies.spmd.rules import control, elementwise, reductions

_rule = functools.partial(rule, rules=SHARD_RULES)


def _shapes(context) -> list[tf.TensorShape]:
  """Returns the static shapes of the inputs."""
  return [
    t.shape.merge_with(v.static_shape)
    for t, v in zip(context.node.inputs, context.inputs, strict=True)
  ]


@_rule(*elementwise.ELEMENTWISE, *elementwise.SUMS, 'Cast', 'ZerosLike')
def _elementwise(context):
  """Computes element by element on the same piece of each input."""
  node, shape = context.node, context.node.outputs[0].shape
  shard = next((k for k in context.kinds if isinstance(k, Shard)), None)
  if shard is None or not shape.is_fully_defined():
    return None
  wants, spreads = [], []
  for own, value in zip(_shapes(context), context.inputs, strict=True):
    is_equal = own == shape
    # A shard cannot be repeated.
    is_apart = isinstance(value.kind, Shard) or node.type == 'Select'
    if not own.is_fully_defined() or (is_apart and not is_equal):
      return None
    wants.append(shard if is_equal else WHOLE)
    spreads.append(not is_equal and own.num_elements() > 1)

  def emit(site, inputs):
    parts = []
    for part, want, spread in zip(inputs, wants, spreads, strict=True):
      if spread:
        part = tf.broadcast_to(part, shape)
        part = pieces.cut(part, shard, site.rows.place)
      elif want == WHOLE:
        part = tf.reshape(part, [])
      parts.append(part)
    return site.op(node, parts)

  return Decision(wants, [context.out(shard)], emit)


# The package has imported the modules of these rules before.
for _name in (
  'AssignAddVariableOp',
  'AssignSubVariableOp',
  'AssignVariableOp',
  'Identity',
  'IdentityN',
  'PreventGradient',
  'ReadVariableOp',
  'Shape',
  'ShapeN',
  'StopGradient',
  'VarIsInitializedOp',
):
  _rule(_name)(RULES[_name])


@_rule('VariableShape')
def _variable_shape(context):
  shape = context.inputs[0].resource.variable.shape
  return context.whole(ints=tuple(map(Dim, shape)))


@_rule('Reshape', 'ExpandDims', 'Squeeze')
def _reshape(context):
  """The same elements in the same order."""
  if not context.node.outputs[0].shape.is_fully_defined():
    return None
  kind = context.kinds[0]
  return Decision(
    context.first(kind),
    [context.out(kind)],
    lambda site, inputs: [tf.identity(inputs[0])],
  )


@_rule(*reductions.OPS, 'L2Loss')
def _reduction(context):
  """Reduces all elements of a shard. Along some axes only, the whole is needed."""
  node, shard, shape = context.node, context.kinds[0], _shapes(context)[0]
  result = node.outputs[0].shape
  if not (
    isinstance(shard, Shard)
    and shape.is_fully_defined()
    and result.num_elements() == 1
  ):
    return None
  op, elements = reductions.OPS.get(node.type, 'sum'), shape.num_elements()
  is_mean = node.type == 'Mean'
  if is_mean and not node.inputs[0].dtype.is_floating:
    return None

  def emit(site, inputs):
    own = pieces.counted(inputs[0], shard, elements, site.rows.place, op)
    if node.type == 'L2Loss':
      return [tf.nn.l2_loss(own)]
    total = pieces.REDUCE[op](own)
    if is_mean:
      total /= tf.cast(elements, total.dtype)
    return [tf.reshape(total, result)]

  out = context.out(Part(op, is_held=True))
  return Decision(context.first(shard), [out], emit)


@_rule('If', 'StatelessIf')
def _branches(context):
  """A branch that all replicas take, in which they may meet.

  So it is built once for all of them: meetings of branches that were built apart
  would wait for each other.
  """
  node, outputs = context.node, context.whole().outputs
  plans = {
    name: make(body, context.inputs[1:]) for name, body in node.bodies.items()
  }
  return Decision(
    [WHOLE, *context.kinds[1:]],
    outputs,
    bodies=plans,
    emit_together=functools.partial(
      control.build_branches, node, plans, outputs
    ),
  )
