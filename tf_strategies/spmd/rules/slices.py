"""Operations that take parts of tensors, or put them together."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tf_strategies.spmd.kinds import WHOLE, Dim, Split, Value
from tf_strategies.spmd.plan import Context, Decision, rule
from tf_strategies.spmd.rules.shapes import const_ints

# Longer than any axis.
_LONG = 1 << 40


@rule('StridedSlice')
def _strided_slice(context: Context) -> Decision | None:
  value, *bounds = context.inputs
  index, is_known = _index(context.node, bounds)
  if value.dims is None or index is None:
    return None
  if value.ints is not None and value.rank == 1:
    ints = None
    if is_known:
      ints = tuple(np.ravel(np.array(value.ints, object)[index]))
    return context.whole(ints=ints)
  if not isinstance(value.kind, Split):
    return None
  at = _axis_after(index, value.rank, value.kind.axis)
  return None if at is None else context.along(at)


def _index(node, bounds) -> tuple[tuple | None, bool]:
  """Returns a slice as an index of NumPy, and whether all bounds are known.

  A slice with an unknown bound takes one element. The index is None if even the
  number of its entries is unknown.
  """
  count = next((v.dims[0].number for v in bounds if v.dims), None)
  if count is None:
    return None, False
  numbers = [
    [None if n is None or not n.is_number else n.number for n in v.ints]
    if v.ints
    else [None] * count
    for v in bounds
  ]
  index, is_known = [], True
  for i, (begin, end, step) in enumerate(zip(*numbers, strict=True)):
    masks = {
      mask
      for mask in ('begin', 'end', 'ellipsis', 'new_axis', 'shrink_axis')
      if node.attr(f'{mask}_mask') >> i & 1
    }
    if 'ellipsis' in masks:
      index.append(Ellipsis)
    elif 'new_axis' in masks:
      index.append(None)
    elif 'shrink_axis' in masks:
      is_known &= begin is not None
      index.append(begin or 0)
    else:
      given = [
        n for n, mask in ((begin, 'begin'), (end, 'end')) if mask not in masks
      ]
      if None in (step, *given):
        is_known, begin, end = False, 0, 1
      else:
        begin = None if 'begin' in masks else begin
        end = None if 'end' in masks else end
      index.append(slice(begin, end, step))
  return tuple(index), is_known


def _axis_after(index, rank, axis) -> int | None:
  """Returns where an axis is after a slice; None if not all of it is taken."""
  lengths, strides = [1] * rank, [0] * rank
  lengths[axis], strides[axis] = _LONG, 1
  # Nobody reads its elements.
  tensor = np.lib.stride_tricks.as_strided(np.int8([0]), lengths, strides)
  taken = tensor[tuple(0 if isinstance(i, int) else i for i in index)]
  found = zip(taken.shape, taken.strides, strict=True)
  return next((at for at, got in enumerate(found) if got == (_LONG, 1)), None)


@rule('StridedSliceGrad')
def _strided_slice_grad(context: Context) -> Decision | None:
  shape, *bounds, value = context.inputs
  index, _ = _index(context.node, bounds)
  if None in (shape.ints, index) or not isinstance(value.kind, Split):
    return None
  for axis, dim in enumerate(shape.ints):
    at = _axis_after(index, len(shape.ints), axis)
    if at == value.kind.axis and dim == value.dims[at]:
      dims = tuple(
        d if s is None else s
        for d, s in zip(context.dims(), shape.ints, strict=True)
      )
      return Decision(
        [WHOLE] * 4 + [value.kind],
        [Value(Split(axis), dims)],
        context.with_own_shape(0, axis),
      )
  return None


@rule('Slice')
def _slice(context: Context) -> Decision | None:
  value, begin, size = context.inputs
  if value.ints and begin.numbers and size.numbers and value.rank == 1:
    first, count = begin.numbers[0], size.numbers[0]
    last = None if count == -1 else first + count
    return context.whole(ints=value.ints[first:last])
  if not isinstance(value.kind, Split) or not begin.ints or not size.ints:
    return None
  axis = value.kind.axis
  if begin.ints[axis] != Dim(0):
    return None
  if size.ints[axis] not in (Dim(-1), value.dims[axis]):
    return None
  node = context.node

  def emit(site, inputs):
    tensor, begin, size = inputs
    with tf.device('CPU:0'):
      all_of_it = tf.constant([-1], size.dtype)
      size = tf.concat([size[:axis], all_of_it, size[axis + 1 :]], 0)
    return site.op(node, [tensor, begin, size])

  return context.along(emit=emit)


@rule('Pad', 'PadV2', 'MirrorPad', 'MirrorPadGrad')
def _pad(context: Context) -> Decision | None:
  value = context.inputs[0]
  if not isinstance(value.kind, Split):
    return None
  paddings = const_ints(context.node.inputs[1])
  is_padded = paddings is None or paddings[value.kind.axis].any()
  return None if is_padded else context.along()


@rule('GatherV2', 'Gather')
def _gather(context: Context) -> Decision | None:
  params, indices = context.inputs[:2]
  batch_dims, axis = 0, 0
  if context.node.type == 'GatherV2':
    if context.inputs[2].numbers is None or params.dims is None:
      return None
    batch_dims = context.node.attr('batch_dims')
    axis = context.inputs[2].numbers[0] % len(params.dims)
  is_shape = params.ints is not None and params.rank == 1
  if is_shape and indices.numbers is not None:
    return context.whole(ints=tuple(params.ints[i] for i in indices.numbers))
  if params.dims is None or indices.dims is None:
    return None
  batch_dims %= len(indices.dims) + 1
  rest = [WHOLE] * (len(context.inputs) - 2)

  def result(wanted_params, wanted_indices, at, length):
    return Decision(
      [wanted_params, wanted_indices, *rest], [context.split(at, length)]
    )

  if isinstance(params.kind, Split) and params.kind.axis != axis:
    at = params.kind.axis
    length = params.dims[at]
    if at < batch_dims:
      return result(params.kind, Split(at), at, length)
    if isinstance(indices.kind, Split):
      return None
    if at > axis:
      at += len(indices.dims) - batch_dims - 1
    return result(params.kind, WHOLE, at, length)
  if isinstance(indices.kind, Split):
    at = indices.kind.axis
    length = indices.dims[at]
    if at < batch_dims:
      return result(Split(at), indices.kind, at, length)
    return result(WHOLE, indices.kind, axis + at - batch_dims, length)
  return None


@rule('GatherNd')
def _gather_nd(context: Context) -> Decision | None:
  _, indices = context.inputs
  if (
    isinstance(indices.kind, Split)
    and indices.kind.axis < len(indices.dims) - 1
  ):
    at = indices.kind.axis
    return Decision(
      [WHOLE, indices.kind], [context.split(at, indices.dims[at])]
    )
  return None


@rule('OneHot')
def _one_hot(context: Context) -> Decision | None:
  value = context.inputs[0]
  if not isinstance(value.kind, Split):
    return None
  at = value.kind.axis
  axis = context.node.attr('axis')
  new = len(value.dims) if axis == -1 else axis
  return context.along(at + (new <= at))


@rule('ReverseV2', 'Roll')
def _moved(context: Context) -> Decision | None:
  value, *_, axes = context.inputs
  if not isinstance(value.kind, Split) or axes.numbers is None:
    return None
  moved = [a % len(value.dims) for a in axes.numbers]
  return None if value.kind.axis in moved else context.along()
