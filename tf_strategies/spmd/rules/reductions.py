"""Sums, means, extrema along axes, and what belongs to their gradients."""

from __future__ import annotations

import tensorflow as tf

from tf_strategies.spmd.kinds import (
  AS_IS,
  ONE,
  SUM,
  WHOLE,
  Dim,
  Part,
  product,
)
from tf_strategies.spmd.plan import Decision, UnknownError, is_sum, rule

OPS = {
  'Sum': 'sum',
  'Mean': 'sum',
  'Max': 'max',
  'Min': 'min',
  'Prod': 'prod',
  'All': 'all',
  'Any': 'any',
}


@rule(*OPS)
def _reduction(context):
  value = context.inputs[0]
  node, op = context.node, OPS[context.node.type]
  is_mean = node.type == 'Mean'
  is_floating = node.outputs[0].dtype.is_floating
  if is_sum(value.kind) and is_mean and is_floating:
    return context.summed()
  if isinstance(value.kind, Part) and value.kind.op == op != 'sum':
    return Decision([value.kind, WHOLE], [context.out(value.kind)])
  reduced = _reduced_axes(context)
  is_unknown = None in reduced
  keeps = bool(node.attr('keep_dims'))
  before = []
  for axis, is_reduced in enumerate(reduced):
    # Nobody knows where an axis is behind one that may be gone.
    is_lost = not is_reduced and not keeps and None in reduced[:axis]
    before.append(None if is_lost or is_reduced is None else axis)
  after = [
    None if is_reduced else axis
    for axis, is_reduced in zip(before, reduced, strict=True)
    if keeps or not (is_reduced or axis is None)
  ]
  dims = None
  if context.dims() is None and not is_unknown:
    pairs = zip(value.dims, reduced, strict=True)
    dims = tuple(ONE if r else d for d, r in pairs if keeps or not r)
  decision = context.by_axes([before], [after], op, dims=dims)
  if is_mean and decision.outputs[0].kind == SUM:
    if is_unknown or not is_floating:
      return None
    decision.emit = _mean(context, reduced, keeps)
  return decision


def _mean(context, reduced, keeps):
  """Returns an `emit` that divides by the number of elements of all rows."""
  dtype = context.node.outputs[0].dtype
  axes_to_count = [i for i, is_reduced in enumerate(reduced) if is_reduced]
  counted = product(context.inputs[0].dims[i] for i in axes_to_count)

  def emit(site, inputs):
    tensor, axes = inputs
    wide = tf.float32 if dtype.size < 4 else dtype
    total = tf.reduce_sum(tf.cast(tensor, wide), axes, keepdims=keeps)
    with tf.device('CPU:0'):
      if counted.is_of_rows:
        count = site.lengths([counted], wide, 0)
      else:
        lengths = tf.gather(tf.shape(tensor), axes_to_count)
        count = site.whole_length(tf.reduce_prod(lengths))
    return [tf.cast(total / tf.cast(count, wide), dtype)]

  return emit


def _reduced_axes(context) -> list[bool | None]:
  """Returns, for each axis of input 0, whether input 1 contains it."""
  rank, axes = context.rank(), context.inputs[1].axes
  if axes is None:
    numbers = {number % rank for number in context.numbers(1)}
    axes = [axis in numbers for axis in range(rank)]
  if len(axes) > rank:
    raise UnknownError
  # Products of matrices broadcast all axes but the last two.
  return [*axes, *[False] * (rank - len(axes))]


@rule('BroadcastGradientArgs')
def _broadcast_gradient_args(context):
  """Returns the axes along which each of two operands was repeated."""
  shapes = list(map(context.integers, range(2)))
  rank = max(map(len, shapes))
  first, second = ([*[ONE] * (rank - len(ints)), *ints] for ints in shapes)
  decision = context.whole()
  for i, (mine, others) in enumerate(((first, second), (second, first))):
    axes = tuple(map(_is_repeated, mine, others))
    ints = None
    if None not in axes:
      ints = tuple(Dim(j) for j, a in enumerate(axes) if a)
    decision.outputs[i] = context.out(WHOLE, i, ints=ints, axes=axes)
  return decision


def _is_repeated(mine, other) -> bool | None:
  """Returns whether an axis was repeated, or has one element; None: unknown."""
  if mine == ONE:
    return True  # TensorFlow reduces along axes of one element too.
  if other in (mine, ONE) or (mine.has_batch and other.has_batch):
    return False
  return None  # One of them may be 1.


@rule('L2Loss')
def _l2_loss(context):
  return [context.names()], [[]], 'sum'


@rule('BiasAddGrad')
def _bias_add_grad(context):
  names = context.names()
  channel = names[1 if context.node.attr('data_format') == b'NCHW' else -1]
  return [names], [[channel]], 'sum'


_SEGMENTS = {
  'UnsortedSegmentSum': 'sum',
  'UnsortedSegmentMax': 'max',
  'UnsortedSegmentMin': 'min',
  'UnsortedSegmentProd': 'prod',
}


@rule(*_SEGMENTS)
def _segments(context):
  data, ids = context.names(), context.names(1)
  dims, count = context.dims(), context.inputs[2]
  if dims is not None and count.numbers:
    dims = (count.ints[0], *dims[1:])  # More than TensorFlow knows.
  return context.by_axes(
    [data, ids],
    [[None, *data[len(ids) :]]],
    _SEGMENTS[context.node.type],
    dims=dims,
  )


def _scattered(context, at: int) -> list[list]:
  """Returns the names of the axes of indices and updates, inputs from `at` on."""
  indices = context.names(at, [-1])
  updates = context.names(at + 1)
  batch = len(indices) - 1
  return [indices, [*updates[:batch], *[None] * (len(updates) - batch)]]


@rule('ScatterNd')
def _scatter_nd(context):
  op = 'any' if context.node.outputs[0].dtype == tf.bool else 'sum'
  return _scattered(context, 0), [[]], op


@rule('TensorScatterAdd', 'TensorScatterSub')
def _scatter_add(context):
  decision = context.by_axes([[], *_scattered(context, 1)], [[]], 'sum')
  if decision.outputs[0].kind != SUM:
    return None
  return Decision([SUM, *decision.wants[1:]], decision.outputs)


@rule('Assert')
def _assert(context):
  """A condition on all rows holds if it holds for each replica's."""
  local = [
    AS_IS if kind == Part('all') else WHOLE for kind in context.kinds[:1]
  ]
  others = [WHOLE if kind == WHOLE else AS_IS for kind in context.kinds[1:]]
  return Decision([*local, *others], [])
