"""Operations that move, take or join elements, and those that compute with shapes."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tf_strategies.spmd.kinds import (
  AS_IS,
  ONE,
  WHOLE,
  Dim,
  Part,
  Split,
  Value,
  product,
)
from tf_strategies.spmd.plan import (
  MOST_INTS,
  Context,
  Decision,
  is_sum,
  known,
  rule,
)
from tf_strategies.spmd.program import Tensor

_ALL = slice(None, None, 1)


def const_ints(tensor: Tensor) -> np.ndarray | None:
  """The contents of a small constant of integers."""
  if tensor.node.type != 'Const' or not tensor.dtype.is_integer:
    return None
  elements = tensor.shape.num_elements()
  if elements is None or elements > MOST_INTS:
    return None
  return tf.make_ndarray(tensor.node.attrs['value'].tensor)


# Rules for shapes. They hold the lengths of the whole tensors.


@rule('Shape', 'ShapeN', 'Size')
def _shape(context):
  wants, outputs = [], []
  is_size = context.node.type == 'Size'
  for i, value in enumerate(context.inputs):
    ints = value.dims
    # The shape of a shard is known, so nobody needs a tensor for it.
    wants.append(WHOLE if ints is None or value.kind == WHOLE else AS_IS)
    if is_size and ints is not None:
      ints = (product(ints),)
    outputs.append(context.out(WHOLE, i, ints=ints))

  def emit(site, inputs):
    shapes = []
    for tensor, value, output in zip(
      inputs, context.inputs, context.node.outputs, strict=True
    ):
      with tf.device('CPU:0'):
        shape = tf.shape(tensor, output.dtype)
        if isinstance(value.kind, Split) and value.dims is not None:
          shape = site.whole_shape(shape, value.kind.axis)
        shapes.append(tf.reduce_prod(shape) if is_size else shape)
    return shapes

  return Decision(wants, outputs, emit)


@rule('Rank')
def _rank(context):
  ints = (Dim(context.rank()),)
  return Decision([AS_IS], [context.out(WHOLE, ints=ints)])


@rule('Pack')
def _pack(context):
  # Of a whole, all replicas' is the same.
  for op in ('all', 'any', 'max', 'min'):
    if Part(op) in context.kinds and {Part(op), WHOLE} >= set(context.kinds):
      return Decision([Part(op)] * len(context.inputs), [context.out(Part(op))])
  names = context.names()
  at = context.node.attr('axis') % (len(names) + 1)
  packed = [*names[:at], None, *names[at:]]
  return [names] * len(context.inputs), [packed]


# Operations along axes: the input that has them, and the one that says which.
_ALONG_AXES = {
  **dict.fromkeys(
    [
      'ConcatV2',
      'Cumprod',
      'Cumsum',
      'CumulativeLogsumexp',
      'ReverseV2',
      'Roll',
    ],
    (0, -1),
  ),
  'Split': (1, 0),
  'SplitV': (0, 2),
}


@rule(*_ALONG_AXES)
def _along_axes(context):
  node, (at, axes) = context.node, _ALONG_AXES[context.node.type]
  names = context.names(at, context.numbers(axes))
  inputs = [*[[]] * at, names]
  if node.type == 'ConcatV2':
    inputs = [names] * (len(context.inputs) - 1)
  return inputs, [names] * len(node.outputs)


# Axes that come, go and change places.


@rule('ExpandDims')
def _expand_dims(context):
  names, dims = context.names(), context.inputs[0].dims
  at = context.numbers(1)[0] % (len(names) + 1)
  return context.by_axes(
    [names],
    [[*names[:at], None, *names[at:]]],
    dims=(*dims[:at], ONE, *dims[at:]),
  )


@rule('Squeeze')
def _squeeze(context):
  names, dims = context.names(), context.inputs[0].dims
  axes = [i % len(names) for i in context.node.attr('squeeze_dims')]
  if not axes:
    # Without axes it would squeeze the batch of a replica with one row.
    axes = [i for i, d in enumerate(dims) if d == ONE]
    if any(not d.is_number and not d.has_batch for d in dims):
      return None
  before = [None if axis in axes else axis for axis in names]
  return context.by_axes(
    [before],
    [[axis for axis in names if axis not in axes]],
    emit=lambda site, inputs: [tf.squeeze(inputs[0], axes)] if axes else inputs,
    dims=tuple(d for axis, d in enumerate(dims) if axis not in axes),
  )


@rule('Transpose', 'ConjugateTranspose')
def _transpose(context):
  order, names = context.numbers(1), context.names()
  dims = tuple(context.inputs[0].dims[axis] for axis in order)
  return context.by_axes([names], [order], dims=dims)


@rule('Reshape')
def _reshape(context):
  value, shape = context.inputs
  dims = _solve(value, shape)
  if value.kind == WHOLE or is_sum(value.kind):
    lengths = {} if dims is None else {'dims': dims}
    outputs = context.whole(kind=value.kind, **lengths).outputs
    return Decision([value.kind, WHOLE], outputs)
  if not isinstance(value.kind, Split) or dims is None:
    return None
  axis = _axis_after(value, dims)
  if axis is None:
    return None
  is_given = shape.ints[axis] != Dim(-1)
  emit = context.with_own_shape(1, axis) if is_given else None
  return Decision([value.kind, WHOLE], [Value(Split(axis), dims)], emit)


def _axis_after(value, dims) -> int | None:
  """The axis of `dims` along which the rows of a split tensor lie."""
  before = product(value.dims[: value.kind.axis])
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
  others = product(d for d in shape.ints if d != Dim(-1))
  rest = product(value.dims).over(others)
  if rest is None and Dim(-1) in shape.ints:
    return None
  return tuple(rest if d == Dim(-1) else d for d in shape.ints)


@rule('ArgMax', 'ArgMin', 'Unpack')
def _without_axis(context):
  axis = context.node.attr('axis')
  names = context.names(0, context.numbers(1) if axis is None else [axis])
  rest = [axis for axis in names if axis is not None]
  return [names], [rest] * len(context.node.outputs)


@rule('Tile')
def _tile(context):
  axes, before = context.names(), context.inputs[0].dims
  times = context.integers(1)
  names = [
    axis if ONE in pair else None
    for axis, *pair in zip(axes, before, times, strict=True)
  ]
  # A tensor that is repeated once for each row is split like the rows.
  is_split = isinstance(context.kinds[0], Split)
  return context.by_axes(
    [names],
    [names],
    shape=None if is_split else 1,
    dims=tuple(map(Dim.times, before, times)),
  )


@rule('BroadcastTo')
def _broadcast_to(context):
  rank = len(context.integers(1))
  names = range(rank - context.rank(), rank)
  has_rows = any(dim.has_batch for dim in context.integers(1))
  if is_sum(context.kinds[0]) and not has_rows:
    return context.summed()
  return context.by_axes([names], [range(rank)], shape=1)


@rule('Fill')
def _fill(context):
  return context.by_axes([], [range(len(context.integers(0)))], shape=0)


def index_of(context: Context) -> list:
  """Returns a strided slice as an index of NumPy, with a `Dim` for unknown bounds."""
  index = []
  bounds = zip(*map(context.integers, (1, 2, 3)), strict=True)
  for i, dims in enumerate(bounds):
    begin, end, step = (d.number if d.is_number else d for d in dims)
    masks = {
      mask
      for mask in ('begin', 'end', 'ellipsis', 'new_axis', 'shrink_axis')
      if context.node.attr(f'{mask}_mask') >> i & 1
    }
    if 'ellipsis' in masks:
      index.append(Ellipsis)
    elif 'new_axis' in masks:
      index.append(None)
    elif 'shrink_axis' in masks:
      index.append(begin)
    else:
      begin = None if 'begin' in masks else begin
      index.append(slice(begin, None if 'end' in masks else end, step))
  return index


def _names(index, rank) -> tuple[list, list]:
  """Returns the names of the axes before and after a slice."""
  if Ellipsis not in index:
    index = [*index, Ellipsis]
  at = index.index(Ellipsis)
  others = sum(entry is not None for entry in index) - 1
  before, after = [], []
  for entry in (*index[:at], *[_ALL] * (rank - others), *index[at + 1 :]):
    if entry is None:
      after.append(None)
      continue
    is_all = entry in (_ALL, slice(0, None, 1))
    before.append(len(before) if is_all else None)
    if isinstance(entry, slice):
      after.append(before[-1])
  return before, after


@rule('StridedSlice')
def _strided_slice(context):
  before, after = _names(index_of(context), context.rank())
  return [before], [after]


@rule('StridedSliceGrad')
def _strided_slice_grad(context):
  rank = len(context.integers(0))
  before, after = _names(index_of(context), rank)
  return context.by_axes([[], [], [], [], after], [before], shape=0)


@rule('Slice')
def _slice(context):
  axes, dims = context.names(), context.inputs[0].dims
  bounds = zip(*map(context.integers, (1, 2)), dims, strict=True)
  is_all = [
    begin == Dim(0) and size in (Dim(-1), dim) for begin, size, dim in bounds
  ]
  names = [i if each else None for i, each in zip(axes, is_all, strict=True)]
  node = context.node

  def emit(site, inputs):
    tensor, begin, size = inputs
    with tf.device('CPU:0'):
      size = tf.where(is_all, tf.constant(-1, size.dtype), size)
    return site.op(node, [tensor, begin, size])

  return context.by_axes([names], [names], emit=emit)


@rule('Pad', 'PadV2', 'MirrorPad', 'MirrorPadGrad')
def _pad(context):
  paddings = known(const_ints(context.node.inputs[1]))
  names = context.names(0, paddings.any(1).nonzero()[0])
  return [names], [names]


@rule('GatherV2')
def _gather(context):
  indices, rank = context.names(1), context.rank()
  axis = context.numbers(2)[0] % rank
  batch_dims = context.node.attr('batch_dims') % (len(indices) + 1)
  params = [i if i < batch_dims else i + len(indices) for i in range(rank)]
  params[axis] = None
  result = [*params[:axis], *indices[batch_dims:], *params[axis + 1 :]]
  return [params, indices], [result]


@rule('ResourceGather')
def _resource_gather(context):
  indices = context.names(1)
  if context.node.attr('batch_dims'):
    return None
  return [[], indices], [indices]


@rule('GatherNd', 'ResourceGatherNd')
def _gather_nd(context):
  indices = context.names(1, [-1])
  return [[], indices], [indices[:-1]]


@rule('OneHot')
def _one_hot(context):
  names, axis = context.names(), context.node.attr('axis')
  at = len(names) if axis == -1 else axis
  return [names], [[*names[:at], None, *names[at:]]]
