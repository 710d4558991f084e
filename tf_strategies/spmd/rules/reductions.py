"""Sums, means, extrema along axes, and what belongs to their gradients."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tf_strategies.spmd import kinds as kinds_lib
from tf_strategies.spmd.kinds import SUM, WHOLE, Part, Split, Value
from tf_strategies.spmd.plan import Context, Decision, rule

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
def _reduction(context: Context) -> Decision | None:
  value, axes = context.inputs
  op = context.node.type
  if (
    value.kind == SUM
    and op == 'Mean'
    and (context.node.inputs[0].dtype.is_floating)
  ):
    return context.summed()
  if value.kind == Part(OPS[op]) != SUM:
    return Decision([value.kind, WHOLE], [context.out(value.kind)])
  if not isinstance(value.kind, Split):
    return _with_ints(context)
  rank, axis = len(value.dims), value.kind.axis
  reduced = reduced_axes(axes, rank)
  if reduced is None or reduced[axis] is None:
    return None
  keeps = bool(context.node.attr('keep_dims'))
  dims = context.dims()
  if dims is None and None in reduced:
    return None
  if dims is None:
    pairs = zip(value.dims, reduced, strict=True)
    dims = [kinds_lib.ONE if r else d for d, r in pairs if keeps or not r]
  if not reduced[axis]:
    before = reduced[:axis]
    if not keeps and None in before:
      return None
    at = axis if keeps else axis - sum(before)
    return context.along(at, dims=dims)
  dims = tuple(dims)
  if op != 'Mean':
    return Decision([value.kind, WHOLE], [Value(Part(OPS[op]), dims)])
  dtype = context.node.outputs[0].dtype
  if None in reduced or not dtype.is_floating:
    return None
  axes_to_count = [i for i, is_reduced in enumerate(reduced) if is_reduced]
  counted = kinds_lib.product(value.dims[i] for i in axes_to_count)
  if not counted.is_of_rows:
    counted = None

  def mean(site, inputs):
    tensor, axes = inputs
    wide = tf.float32 if dtype.size < 4 else dtype
    total = tf.reduce_sum(tf.cast(tensor, wide), axes, keepdims=keeps)
    with tf.device('CPU:0'):
      count = counted
      if count is None:
        lengths = tf.gather(tf.shape(tensor), axes_to_count)
        count = site.whole_length(tf.reduce_prod(lengths))
      else:
        count = site.length(count, site.rows.total)
    return [tf.cast(total / tf.cast(count, wide), dtype)]

  return Decision([value.kind, WHOLE], [Value(SUM, dims)], mean)


def _with_ints(context):
  """Returns the product of a shape, which is the number of elements."""
  value = context.inputs[0]
  is_product = context.node.type == 'Prod' and context.dims() == ()
  if is_product and value.rank == 1 and value.ints and None not in value.ints:
    return context.whole(ints=(kinds_lib.product(value.ints),))
  return None


def reduced_axes(axes: Value, rank: int) -> list[bool | None] | None:
  """Returns, for each axis of a tensor, whether `axes` contains it."""
  if axes.axes is not None:
    # Products of matrices broadcast all axes but the last two.
    rest = rank - len(axes.axes)
    return [*axes.axes, *[False] * rest] if rest >= 0 else None
  if axes.numbers is None:
    return None
  reduced = [False] * rank
  for number in axes.numbers:
    reduced[number % rank] = True
  return reduced


@rule('BroadcastGradientArgs')
def _broadcast_gradient_args(context: Context) -> Decision | None:
  """Returns the axes along which each of two operands was repeated."""
  shapes = [v.ints for v in context.inputs]
  if None in shapes:
    return None
  rank = max(map(len, shapes))
  first, second = (
    [kinds_lib.ONE] * (rank - len(ints)) + list(ints) for ints in shapes
  )
  decision = context.whole()
  for i, (mine, others) in enumerate(((first, second), (second, first))):
    axes = tuple(map(_is_repeated, mine, others))
    ints = None
    if None not in axes:
      ints = tuple(kinds_lib.Dim(j) for j, a in enumerate(axes) if a)
    decision.outputs[i] = dataclasses.replace(
      decision.outputs[i], ints=ints, axes=axes
    )
  return decision


def _is_repeated(mine, other) -> bool | None:
  """Returns whether an axis was repeated, or has one element; None: unknown."""
  if None in (mine, other):
    return None
  if mine == kinds_lib.ONE:
    return True  # TensorFlow reduces along axes of one element too.
  if other in (mine, kinds_lib.ONE) or (mine.has_batch and other.has_batch):
    return False
  return None  # One of them may be 1.


@rule('L2Loss')
def _l2_loss(context: Context) -> Decision | None:
  return context.summed() if isinstance(context.kinds[0], Split) else None


@rule('BiasAddGrad')
def _bias_add_grad(context: Context) -> Decision | None:
  value = context.inputs[0]
  is_channels_first = context.node.attr('data_format') == b'NCHW'
  channel = 1 if is_channels_first else (value.rank or 0) - 1
  is_split = isinstance(value.kind, Split) and value.kind.axis != channel
  return context.summed() if is_split else None


@rule('ArgMax', 'ArgMin')
def _arg_max(context: Context) -> Decision | None:
  value, axis = context.inputs
  if not isinstance(value.kind, Split) or axis.numbers is None:
    return None
  at, split = axis.numbers[0] % len(value.dims), value.kind.axis
  return None if at == split else context.along(split - (at < split))


@rule('Cumsum', 'Cumprod', 'CumulativeLogsumexp')
def _cumulative(context: Context) -> Decision | None:
  value, axis = context.inputs
  if not isinstance(value.kind, Split) or axis.numbers is None:
    return None
  is_along = axis.numbers[0] % len(value.dims) == value.kind.axis
  return None if is_along else context.along()


_SEGMENTS = {
  'UnsortedSegmentSum': 'sum',
  'UnsortedSegmentMax': 'max',
  'UnsortedSegmentMin': 'min',
  'UnsortedSegmentProd': 'prod',
}


@rule(*_SEGMENTS)
def _segments(context: Context) -> Decision | None:
  data, ids, count = context.inputs
  for value in (data, ids):
    if isinstance(value.kind, Split) and ids.dims is not None:
      axis = value.kind.axis
      if axis < len(ids.dims) and count.kind == WHOLE:
        op, dims = _SEGMENTS[context.node.type], context.dims()
        if dims is not None and count.numbers:
          dims = (count.ints[0], *dims[1:])  # More than TensorFlow knows.
        return Decision(
          [Split(axis), Split(axis), WHOLE], [Value(Part(op), dims)]
        )
      if value is data and ids.kind == WHOLE:
        at = axis - len(ids.dims) + 1
        return Decision(
          [Split(axis), WHOLE, WHOLE], [context.split(at, data.dims[axis])]
        )
  return None


@rule('ScatterNd')
def _scatter_nd(context: Context) -> Decision | None:
  indices, updates, shape = context.inputs
  if shape.kind != WHOLE:
    return None
  is_bool = context.node.outputs[0].dtype == tf.bool
  kind = Part('any') if is_bool else SUM
  for value in (indices, updates):
    if isinstance(value.kind, Split) and indices.dims is not None:
      axis = value.kind.axis
      if axis < len(indices.dims) - 1:
        return Decision([Split(axis), Split(axis), WHOLE], [context.out(kind)])
  return None


@rule('TensorScatterAdd', 'TensorScatterSub')
def _scatter_add(context: Context) -> Decision | None:
  tensor, indices, updates = context.inputs
  if tensor.kind not in (WHOLE, SUM) or indices.dims is None:
    return None
  for value in (indices, updates):
    if (
      isinstance(value.kind, Split) and value.kind.axis < len(indices.dims) - 1
    ):
      return Decision([SUM, value.kind, value.kind], [context.out(SUM)])
  return None


@rule('Assert')
def _assert(context: Context) -> Decision:
  """A condition on all rows holds if it holds for each replica's."""
  wants = [
    kinds_lib.AS_IS if kind in (Part('all'), WHOLE) else WHOLE
    for kind in context.kinds[:1]
  ]
  wants += [
    WHOLE if kind == kinds_lib.FIRST else kinds_lib.AS_IS
    for kind in context.kinds[1:]
  ]
  return Decision(wants, [])
