"""Operations that take parts of tensors, or put them together."""

from __future__ import annotations

import tensorflow as tf

from tf_strategies.spmd.kinds import Dim
from tf_strategies.spmd.plan import Context, Decision, UnknownError, rule
from tf_strategies.spmd.rules.shapes import const_ints

_ALL = slice(None, None, 1)


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
def _strided_slice(context: Context) -> Decision:
  before, after = _names(index_of(context), context.rank())
  return context.by_axes([before], [after])


@rule('StridedSliceGrad')
def _strided_slice_grad(context: Context) -> Decision:
  rank = len(context.integers(0))
  before, after = _names(index_of(context), rank)
  return context.by_axes([[], [], [], [], after], [before], shape=0)


@rule('Slice')
def _slice(context: Context) -> Decision:
  bounds = zip(
    context.integers(1),
    context.integers(2),
    context.inputs[0].dims,
    strict=True,
  )
  is_all = [
    begin == Dim(0) and size in (Dim(-1), dim) for begin, size, dim in bounds
  ]
  names = context.names(0, [i for i, each in enumerate(is_all) if not each])
  node = context.node

  def emit(site, inputs):
    tensor, begin, size = inputs
    with tf.device('CPU:0'):
      size = tf.where(is_all, tf.constant(-1, size.dtype), size)
    return site.op(node, [tensor, begin, size])

  return context.by_axes([names], [names], emit=emit)


@rule('Pad', 'PadV2', 'MirrorPad', 'MirrorPadGrad')
def _pad(context: Context) -> Decision:
  paddings = const_ints(context.node.inputs[1])
  if paddings is None:
    raise UnknownError
  names = context.names(0, paddings.any(1).nonzero()[0])
  return context.by_axes([names], [names])


@rule('GatherV2')
def _gather(context: Context) -> Decision:
  indices, rank = context.names(1), context.rank()
  axis = context.numbers(2)[0] % rank
  batch_dims = context.node.attr('batch_dims') % (len(indices) + 1)
  params = [i if i < batch_dims else i + len(indices) for i in range(rank)]
  params[axis] = None
  result = [*params[:axis], *indices[batch_dims:], *params[axis + 1 :]]
  return context.by_axes([params, indices], [result])


@rule('ResourceGather')
def _resource_gather(context: Context) -> Decision | None:
  indices = context.names(1)
  if context.node.attr('batch_dims'):
    return None
  return context.by_axes([[], indices], [indices])


@rule('GatherNd')
def _gather_nd(context: Context) -> Decision:
  indices = context.names(1, [-1])
  return context.by_axes([[], indices], [indices[:-1]])


@rule('OneHot')
def _one_hot(context: Context) -> Decision:
  names, axis = context.names(), context.node.attr('axis')
  at = len(names) if axis == -1 else axis
  return context.by_axes([names], [[*names[:at], None, *names[at:]]])
