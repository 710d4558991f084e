"""Operations that move elements, and those that compute with shapes."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tf_strategies.spmd import kinds as kinds_lib
from tf_strategies.spmd.kinds import (
  AS_IS,
  ONE,
  SUM,
  WHOLE,
  Dim,
  Part,
  Split,
  Value,
)
from tf_strategies.spmd.plan import Context, Decision, rule
from tf_strategies.spmd.program import Tensor

# Of longer tensors of integers the contents do not matter.
_MOST_INTS = 64


def const_ints(tensor: Tensor) -> np.ndarray | None:
  """The contents of a small constant of integers."""
  if tensor.node.type != 'Const' or not tensor.dtype.is_integer:
    return None
  elements = tensor.shape.num_elements()
  if elements is None or elements > _MOST_INTS:
    return None
  return tf.make_ndarray(tensor.node.attrs['value'].tensor)


@rule('Const')
def _const(context: Context) -> Decision:
  array = const_ints(context.node.outputs[0])
  ints = None
  if array is not None and array.ndim <= 1:
    ints = tuple(Dim(int(i)) for i in array.reshape(-1))
  return context.whole(ints=ints)


# Rules for shapes. They hold the lengths of the whole tensors.


@rule('Shape', 'ShapeN')
def _shape(context: Context) -> Decision:
  wants, outputs = [], []
  for i, value in enumerate(context.inputs):
    outputs.append(context.out(WHOLE, i, ints=value.dims))
    is_local = isinstance(value.kind, Split) or (
      isinstance(value.kind, Part) and value.kind != kinds_lib.FIRST
    )
    wants.append(AS_IS if is_local and value.dims is not None else WHOLE)

  def emit(site, inputs):
    shapes = []
    for tensor, value, output in zip(
      inputs, context.inputs, context.node.outputs, strict=True
    ):
      with tf.device('CPU:0'):
        shape = tf.shape(tensor, output.dtype)
        if isinstance(value.kind, Split) and value.dims is not None:
          axis = value.kind.axis
          whole = site.whole_length(shape[axis])
          shape = tf.concat([shape[:axis], whole[None], shape[axis + 1 :]], 0)
        shapes.append(shape)
    return shapes

  return Decision(wants, outputs, emit)


@rule('ConcatOffset')
def _concat_offset(context: Context) -> Decision | None:
  axis, *shapes = context.inputs
  if axis.numbers is None or any(s.ints is None for s in shapes):
    return None
  decision, start = context.whole(), Dim(0)
  at = axis.numbers[0] % len(shapes[0].ints)
  for i, shape in enumerate(shapes):
    ints = [start if j == at else Dim(0) for j in range(len(shape.ints))]
    decision.outputs[i] = context.out(WHOLE, i, ints=tuple(ints))
    length = shape.ints[at]
    is_known = start and length and start.is_number and length.is_number
    start = Dim(start.number + length.number) if is_known else None
  return decision


@rule('Size')
def _size(context: Context) -> Decision:
  value = context.inputs[0]
  if value.dims is None:
    return context.whole()
  dim = kinds_lib.product(value.dims)
  decision = context.whole(ints=(dim,))
  if isinstance(value.kind, Split):
    dtype = context.node.outputs[0].dtype
    decision.wants = [AS_IS]
    decision.emit = lambda site, inputs: [
      tf.cast(site.whole_length(tf.size(inputs[0])), dtype)
    ]
  return decision


@rule('Rank')
def _rank(context: Context) -> Decision:
  rank = context.inputs[0].rank
  if rank is None:
    return context.whole()
  decision = context.whole(ints=(Dim(rank),))
  decision.wants = [AS_IS]
  decision.emit = lambda site, inputs: [tf.constant(rank)]
  return decision


@rule('Pack')
def _pack(context: Context) -> Decision | None:
  axis, values = context.node.attr('axis'), context.inputs
  rank = None if context.dims() is None else len(context.dims())
  if rank == 1 and all(k == WHOLE for k in context.kinds):
    ints = [v.ints[0] if v.ints else None for v in values]
    return context.whole(ints=_named(context, ints))
  if rank is None:
    return None
  axis %= rank
  split = next((v for v in values if isinstance(v.kind, Split)), None)
  if split is not None:
    at = split.kind.axis
    length = split.dims[at]
    return Decision(
      [split.kind] * len(values), [context.split(at + (axis <= at), length)]
    )
  # Of a whole, all replicas' is the same.
  for op in ('all', 'any', 'max', 'min'):
    if Part(op) in context.kinds and {Part(op), WHOLE} >= set(context.kinds):
      return Decision([Part(op)] * len(values), [context.out(Part(op))])
  return None


def _named(context, ints) -> tuple[Dim, ...]:
  """Returns the contents of a shape, with symbols for lengths known at run time."""
  shape = context.node.outputs[0]
  return tuple(
    kinds_lib.symbol('value', shape, i) if n is None else n
    for i, n in enumerate(ints)
  )


@rule('ConcatV2')
def _concat(context: Context) -> Decision | None:
  *values, axis = context.inputs
  dims = context.dims()
  if axis.numbers is None or dims is None:
    return None
  axis = axis.numbers[0] % len(dims)
  if all(k == WHOLE for k in context.kinds):
    if len(dims) == 1 and all(v.ints for v in values):
      return context.whole(ints=tuple(i for v in values for i in v.ints))
    return None
  split = next((v for v in values if isinstance(v.kind, Split)), None)
  if split is not None:
    at = split.kind.axis
    if at == axis:
      return None
    wants = [split.kind] * len(values) + [WHOLE]
    return Decision(wants, [context.split(at, split.dims[at])])
  return None


@rule('Range', 'InvertPermutation', 'DynamicStitch')
def _index_arithmetic(context: Context) -> Decision | None:
  """Folds constants. A stitched shape is folded element by element."""
  node = context.node
  if node.type == 'DynamicStitch':
    half = len(context.inputs) // 2
    indices, parts = context.inputs[:half], context.inputs[half:]
    if all(i.numbers is not None for i in indices):
      ints = {}
      for index, part in zip(indices, parts, strict=True):
        for i, at in enumerate(index.numbers):
          ints[at] = part.ints[i] if part.ints else None
      length = max(ints, default=-1) + 1
      return context.whole(ints=_named(context, map(ints.get, range(length))))
    return None
  numbers = [v.numbers for v in context.inputs]
  if any(n is None for n in numbers):
    return None
  if node.type == 'Range':
    ints = range(*(n[0] for n in numbers))
  else:
    ints = np.argsort(numbers[0])
  if len(ints) > _MOST_INTS:
    return None
  return context.whole(ints=tuple(Dim(int(i)) for i in ints))


# Axes that come, go and change places.


@rule('ExpandDims')
def _expand_dims(context: Context) -> Decision | None:
  value, axis = context.inputs
  if value.dims is None or axis.numbers is None:
    return None
  at = axis.numbers[0] % (len(value.dims) + 1)
  dims = (*value.dims[:at], ONE, *value.dims[at:])
  kind = value.kind
  if isinstance(kind, Split):
    kind = Split(kind.axis + (at <= kind.axis))
  else:
    return context.whole(dims=dims, ints=value.ints if at == 0 else None)
  return Decision([value.kind, WHOLE], [Value(kind, dims)])


@rule('Squeeze')
def _squeeze(context: Context) -> Decision | None:
  value = context.inputs[0]
  if value.dims is None:
    return None
  rank = len(value.dims)
  axes = [i % rank for i in context.node.attr('squeeze_dims')]
  if not axes:
    # Without axes it would squeeze the batch of a replica with one row.
    axes = [i for i, d in enumerate(value.dims) if d == ONE]
    if any(not d.is_number and not d.has_batch for d in value.dims):
      return None
  dims = tuple(d for i, d in enumerate(value.dims) if i not in axes)
  kind = value.kind
  if isinstance(kind, Split):
    if kind.axis in axes:
      return None
    kind = Split(kind.axis - sum(i < kind.axis for i in axes))
  else:
    return context.whole(ints=value.ints)
  node = context.node
  attr = tf.compat.v1.AttrValue()
  attr.list.i.extend(axes)
  return Decision(
    [value.kind],
    [Value(kind, dims)],
    lambda site, inputs: site.op(node, inputs, {'squeeze_dims': attr}),
  )


@rule('Transpose', 'ConjugateTranspose')
def _transpose(context: Context) -> Decision | None:
  value, order = context.inputs
  if value.dims is None or order.numbers is None:
    return None
  dims = tuple(value.dims[i] for i in order.numbers)
  kind = value.kind
  if isinstance(kind, Split):
    kind = Split(order.numbers.index(kind.axis))
  else:
    return context.whole(dims=dims)
  return Decision([value.kind, WHOLE], [Value(kind, dims)])


@rule('Reshape')
def _reshape(context: Context) -> Decision | None:
  value, shape = context.inputs
  if value.kind in (WHOLE, SUM):
    wanted = shape.ints if shape.ints else ()
    ints = value.ints if len(wanted) <= 1 else None
    dims = context.dims()
    solved = _solve(value, shape)
    return Decision(
      [value.kind, WHOLE],
      [Value(value.kind, dims if solved is None else solved, ints)],
    )
  if not isinstance(value.kind, Split):
    return None
  dims = _solve(value, shape)
  if dims is None:
    return None
  axis = _axis_after(value, dims)
  if axis is None:
    return None
  is_given = shape.ints[axis] != Dim(-1)
  emit = context.with_own_shape(1, axis) if is_given else None
  return Decision([value.kind, WHOLE], [Value(Split(axis), dims)], emit)


def _axis_after(value, dims) -> int | None:
  """The axis of `dims` along which the rows of a split tensor lie."""
  before = kinds_lib.product(value.dims[: value.kind.axis])
  prefix = ONE
  for axis, dim in enumerate(dims):
    if prefix == before and dim.has_batch:
      return axis
    prefix = prefix.times(dim)
  return None


def _solve(value, shape) -> tuple[Dim, ...] | None:
  """The lengths of a reshaped tensor, with -1 filled in; None if unknown."""
  if shape.ints is None or value.dims is None:
    return None
  if any(i is None for i in shape.ints):
    return None
  unknown = [i for i, d in enumerate(shape.ints) if d == Dim(-1)]
  if not unknown:
    return tuple(shape.ints)
  others = kinds_lib.product(d for d in shape.ints if d != Dim(-1))
  rest = kinds_lib.product(value.dims).over(others)
  if rest is None:
    return None
  dims = list(shape.ints)
  dims[unknown[0]] = rest
  return tuple(dims)


@rule('Unpack')
def _unpack(context: Context) -> Decision | None:
  value = context.inputs[0]
  if value.dims is None:
    return None
  axis = context.node.attr('axis') % len(value.dims)
  count = len(context.node.outputs)
  if isinstance(value.kind, Split):
    at = value.kind.axis
    if at == axis:
      return None
    return context.along(at - (axis < at))
  decision = context.whole()
  if value.ints and len(value.dims) == 1:
    decision.outputs = [Value(WHOLE, (), (n,)) for n in value.ints[:count]]
  return decision


@rule('Split', 'SplitV')
def _split(context: Context) -> Decision | None:
  is_plain = context.node.type == 'Split'
  axis, value = (
    context.inputs if is_plain else (context.inputs[2], context.inputs[0])
  )
  if axis.numbers is None or value.dims is None:
    return None
  count = len(context.node.outputs)
  if isinstance(value.kind, Split):
    at = value.kind.axis
    if axis.numbers[0] % len(value.dims) == at:
      return None
    outputs = [context.split(at, value.dims[at], i) for i in range(count)]
  else:
    return None
  wants = [WHOLE, value.kind] if is_plain else [value.kind, WHOLE, WHOLE]
  return Decision(wants, outputs)


@rule('Tile')
def _tile(context: Context) -> Decision | None:
  value, multiples = context.inputs
  if not multiples.ints or value.dims is None:
    return None
  if isinstance(value.kind, Split):
    axis = value.kind.axis
    if multiples.ints[axis] != ONE:
      return None
    return context.along()
  axes = [i for i, d in enumerate(multiples.ints) if d and d.has_batch]
  # A tensor that is repeated once for each row is split like the rows.
  if value.kind != WHOLE or len(axes) != 1 or value.dims[axes[0]] != ONE:
    return None
  return _own_shape(context, WHOLE, axes[0], multiples)


@rule('BroadcastTo')
def _broadcast_to(context: Context) -> Decision | None:
  value, shape = context.inputs
  if not shape.ints or value.dims is None:
    return None
  rank = len(shape.ints)
  if isinstance(value.kind, Split):
    axis = value.kind.axis + rank - len(value.dims)
    if shape.ints[axis] != value.dims[value.kind.axis]:
      return None
    return _own_shape(context, value.kind, axis, shape)
  axes = [i for i, d in enumerate(shape.ints) if d and d.has_batch]
  if len(axes) != 1:
    if value.kind == SUM and not axes and None not in shape.ints:
      return context.summed()
    return None
  at = axes[0] - (rank - len(value.dims))
  if value.kind not in (WHOLE, SUM):
    return None
  if at >= 0 and value.dims[at] != ONE:
    if value.dims[at] != shape.ints[axes[0]]:
      return None
    return _own_shape(context, Split(at), axes[0], shape)
  return _own_shape(context, WHOLE, axes[0], shape)


def _own_shape(context, wanted, axis, shape) -> Decision:
  """An operation of a tensor and a shape, of which this replica takes its own."""
  return Decision(
    [wanted, WHOLE],
    [context.split(axis, shape.ints[axis])],
    context.with_own_shape(1, axis),
  )


@rule('Fill')
def _fill(context: Context) -> Decision | None:
  shape, value = context.inputs
  if value.kind != WHOLE or not shape.ints:
    return None
  axes = [i for i, d in enumerate(shape.ints) if d and d.has_batch]
  if len(axes) != 1:
    is_vector = len(shape.ints) == 1 and shape.numbers and value.ints
    if is_vector and shape.numbers[0] <= _MOST_INTS:
      return context.whole(ints=value.ints * shape.numbers[0])
    return None
  axis = axes[0]
  return Decision(
    [WHOLE, WHOLE],
    [context.split(axis, shape.ints[axis])],
    context.with_own_shape(0, axis),
  )
