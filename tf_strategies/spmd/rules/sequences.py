"""Lists of tensors, in which loops keep what they compute in each turn."""

from __future__ import annotations

import tensorflow as tf

from tf_strategies.spmd.kinds import AS_IS, SUM, WHOLE, Listed, Split, Value
from tf_strategies.spmd.plan import Context, Decision, rule


def _own_element_shape(context, position, site, inputs):
  """The shape of a list's elements, as those that a replica holds."""
  shape, value = inputs[position], context.inputs[position]
  axes = [i for i, d in enumerate(value.ints or ()) if d and d.has_batch]
  if shape.shape.rank != 1 or not axes:
    return shape
  own = context.own_shape(site, inputs, position, axes[0])
  return tf.where(shape < 0, shape, own)


def _with_element_shape(context, position):
  node = context.node

  def emit(site, inputs):
    inputs = list(inputs)
    inputs[position] = _own_element_shape(context, position, site, inputs)
    return site.op(node, inputs)

  return emit


@rule('TensorListReserve', 'EmptyTensorList')
def _new(context: Context) -> Decision:
  return Decision(
    [WHOLE, WHOLE],
    [Value(Listed(), ())],
    _with_element_shape(context, 0),
  )


@rule('TensorListFromTensor')
def _from_tensor(context: Context) -> Decision | None:
  value, _ = context.inputs
  if value.dims is None:
    return None
  elements, wanted = value.dims[1:], value.kind
  axes = [i for i, d in enumerate(elements) if d is not None and d.has_batch]
  if wanted == WHOLE and axes:
    # Such as zeros, the gradients of elements that nobody used: a loop adds
    # rows to them, and a list cannot be cut later.
    wanted = Split(axes[0] + 1)
  kind = wanted
  if isinstance(wanted, Split):
    if wanted.axis == 0:
      return None
    kind = Split(wanted.axis - 1)
  return Decision(
    [wanted, WHOLE],
    [Value(Listed(kind), elements)],
    _with_element_shape(context, 1),
  )


def _element(context, value, index, wants, position, others=()):
  kind = WHOLE if value.kind.kind is None else value.kind.kind
  dims = context.dims(index)
  if dims is None:
    dims = value.dims
  if isinstance(kind, Split):
    if dims is None or value.dims is None or len(value.dims) <= kind.axis:
      return None
    axis = kind.axis
    dims = (*dims[:axis], value.dims[axis], *dims[axis + 1 :])
  ints = value.ints if kind == WHOLE else None
  outputs = [*others, Value(kind, dims, ints)]
  return Decision(wants, outputs, _with_element_shape(context, position))


@rule('TensorListGetItem')
def _get_item(context: Context) -> Decision | None:
  value = context.inputs[0]
  if not isinstance(value.kind, Listed):
    return None
  return _element(context, value, 0, [AS_IS, WHOLE, WHOLE], 2)


@rule('TensorListPopBack')
def _pop_back(context: Context) -> Decision | None:
  value = context.inputs[0]
  if not isinstance(value.kind, Listed):
    return None
  return _element(context, value, 1, [AS_IS, WHOLE], 1, [value])


def _added(context, value, item, wants, position):
  """A list with one more element, of the kind that its elements are of."""
  kind = item.kind if value.kind.kind is None else value.kind.kind
  if isinstance(kind, Split) and item.dims is None:
    return None
  if kind == WHOLE and item.kind != WHOLE:
    kind = item.kind if item.kind == SUM else kind
  wants[position] = kind
  dims = item.dims if item.dims is not None else value.dims
  # What every element is, if all of them are the same.
  ints = item.ints
  if value.kind.kind is not None and value.ints != ints:
    ints = None
  return Decision(wants, [Value(Listed(kind), dims, ints)])


@rule('TensorListSetItem')
def _set_item(context: Context) -> Decision | None:
  value, _, item = context.inputs
  if not isinstance(value.kind, Listed):
    return None
  return _added(context, value, item, [AS_IS, WHOLE, None], 2)


@rule('TensorListPushBack')
def _push_back(context: Context) -> Decision | None:
  value, item = context.inputs
  if not isinstance(value.kind, Listed):
    return None
  return _added(context, value, item, [AS_IS, None], 1)


@rule('TensorListStack')
def _stack(context: Context) -> Decision | None:
  value = context.inputs[0]
  if not isinstance(value.kind, Listed):
    return None
  kind = WHOLE if value.kind.kind is None else value.kind.kind
  emit = _with_element_shape(context, 1)
  if not isinstance(kind, Split):
    return Decision([AS_IS, WHOLE], [context.out(kind)], emit)
  if value.dims is None or context.dims() is None:
    return None
  length = value.dims[kind.axis]
  return Decision([AS_IS, WHOLE], [context.split(kind.axis + 1, length)], emit)


@rule('TensorListLength')
def _length(context: Context) -> Decision:
  decision = context.whole()
  decision.wants = [AS_IS]
  return decision


@rule('TensorListElementShape')
def _element_shape(context: Context) -> Decision | None:
  value = context.inputs[0]
  if not isinstance(value.kind, Listed):
    return None
  kind = value.kind.kind
  if not isinstance(kind, Split):
    return Decision([AS_IS], [context.out(WHOLE, ints=value.dims)])
  dims = value.dims
  node = context.node

  def emit(site, inputs):
    shape = site.op(node, inputs)[0]
    with tf.device('CPU:0'):
      axis = kind.axis
      length = site.whole_length(shape[axis])
      length = tf.where(shape[axis] < 0, shape[axis], length)
      return [tf.concat([shape[:axis], length[None], shape[axis + 1 :]], 0)]

  return Decision([AS_IS], [context.out(WHOLE, ints=dims)], emit)


@rule('TensorListResize')
def _resize(context: Context) -> Decision:
  return Decision([AS_IS, WHOLE], [context.inputs[0]])


# Accumulated gradients of lists.
@rule('TensorListConcatLists')
def _lists(context: Context) -> Decision | None:
  if not all(isinstance(v.kind, Listed) for v in context.inputs):
    return None
  return Decision([AS_IS, AS_IS], [context.inputs[0]])
