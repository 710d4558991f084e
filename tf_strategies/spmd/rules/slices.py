"""Operations that take parts of tensors, or put them together."""

from __future__ import annotations

import tensorflow as tf

from tf_strategies.spmd.kinds import SUM, WHOLE, Dim, Split, Value
from tf_strategies.spmd.plan import Context, Decision, rule
from tf_strategies.spmd.rules.shapes import const_ints


@rule('StridedSlice')
def _strided_slice(context: Context) -> Decision | None:
  value, begin, end, strides = context.inputs
  if value.dims is None:
    return None
  taken = _slices(context.node, len(value.dims), begin, end, strides)
  if taken is None:
    return None
  if value.ints is not None and len(value.dims) == 1:
    return _slice_of_shape(context, value, taken)
  if value.kind == SUM:
    return context.summed()
  if not isinstance(value.kind, Split):
    return None
  at = _kept_axis(taken, value.kind.axis)
  return None if at is None else context.along(at)


def _slices(node, rank, begin, end, strides) -> list | None:
  """Returns the parts of a slice: 'new', or an axis with 'all', 'one' or a slice."""
  count = next(
    (v.dims[0].number for v in (begin, end, strides) if v.dims), None
  )
  if count is None:
    return None
  masks = {
    name: node.attr(f'{name}_mask')
    for name in ('begin', 'end', 'ellipsis', 'new_axis', 'shrink_axis')
  }

  def number(value, i):
    if value.ints is None or i >= len(value.ints) or value.ints[i] is None:
      return None
    return value.ints[i].number if value.ints[i].is_number else None

  taken, axis = [], 0
  for i in range(count):
    if masks['ellipsis'] >> i & 1:
      rest = count - i - 1
      rest_new = sum(
        bool(masks['new_axis'] >> j & 1) for j in range(i + 1, count)
      )
      left = rank - axis - (rest - rest_new)
      taken += [(axis + j, 'all') for j in range(left)]
      axis += left
    elif masks['new_axis'] >> i & 1:
      taken.append('new')
    else:
      step = number(strides, i)
      first, last = number(begin, i), number(end, i)
      if masks['shrink_axis'] >> i & 1:
        taken.append((axis, 'one', first))
      elif masks['begin'] >> i & 1 and masks['end'] >> i & 1 and step == 1:
        taken.append((axis, 'all'))
      else:
        first = None if masks['begin'] >> i & 1 else (first, 'at')
        last = None if masks['end'] >> i & 1 else (last, 'at')
        taken.append((axis, 'some', first, last, step))
      axis += 1
  return taken + [(a, 'all') for a in range(axis, rank)]


def _kept_axis(taken, axis) -> int | None:
  """Where an axis is after a slice, if all of it is taken."""
  at = 0
  for item in taken:
    if item == 'new':
      at += 1
      continue
    if item[0] == axis:
      return at if item[1] == 'all' else None
    at += item[1] != 'one'
  return None


def _slice_of_shape(context, value, taken):
  item = next(i for i in taken if i != 'new')
  ints = None
  if item[1] == 'one' and item[2] is not None:
    ints = (value.ints[item[2]],)
  elif item[1] == 'all':
    ints = value.ints
  elif item[1] == 'some':
    bounds = [None if b is None else b[0] for b in item[2:4]]
    known = all(b is None or b[0] is not None for b in item[2:4])
    if known and item[4] is not None:
      ints = value.ints[bounds[0] : bounds[1] : item[4]]
  return context.whole(ints=ints)


@rule('StridedSliceGrad')
def _strided_slice_grad(context: Context) -> Decision | None:
  shape, begin, end, strides, value = context.inputs
  if shape.ints is None or not isinstance(value.kind, Split):
    has_batch = shape.ints is None or any(
      d is None or d.has_batch for d in shape.ints
    )
    if value.kind == SUM and not has_batch:
      return Decision([WHOLE] * 4 + [SUM], [context.out(SUM)])
    return None
  taken = _slices(context.node, len(shape.ints), begin, end, strides)
  if taken is None:
    return None
  for axis, dim in enumerate(shape.ints):
    at = _kept_axis(taken, axis)
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
  if value.kind == SUM:
    return context.summed()
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
  if value.kind == SUM and context.node.type == 'Pad':
    return context.summed()
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
  if indices.numbers is not None and params.kind == SUM:
    return context.summed()
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
  if value.kind == SUM:
    return context.summed()
  if not isinstance(value.kind, Split) or axes.numbers is None:
    return None
  moved = [a % len(value.dims) for a in axes.numbers]
  return None if value.kind.axis in moved else context.along()
