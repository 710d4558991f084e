"""Rules for lists of tensors, in which loops keep the results of their turns."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tf_strategies.spmd.kinds import AS_IS, WHOLE, Listed, Split, Value, split
from tf_strategies.spmd.plan import Decision, UnknownError, rule


def _list(context) -> Value:
  """Returns input 0, which is a list.

  Raises:
    UnknownError: what makes the list has no rule.
  """
  if not isinstance(context.kinds[0], Listed):
    raise UnknownError
  return context.inputs[0]


def _with_element_shape(context, position):
  """Returns an `emit` that passes the shape of a list's elements on this replica."""
  ints = context.inputs[position].ints or ()
  axes = [i for i, dim in enumerate(ints) if dim.has_batch]
  return context.with_own_shape(position, axes[0]) if axes else None


@rule('TensorListReserve', 'EmptyTensorList')
def _new(context):
  return Decision(
    [WHOLE, WHOLE],
    [Value(Listed(), ())],
    _with_element_shape(context, 0),
  )


@rule('TensorListFromTensor', 'TensorListScatterV2')
def _from_tensor(context):
  context.rank()  # It must be known.
  value = context.inputs[0]
  elements, wanted = value.dims[1:], value.kind
  axes = [i for i, dim in enumerate(elements) if dim.has_batch]
  if wanted == WHOLE and axes:
    # Such as zeros, the gradients of elements that nobody used: a loop adds
    # rows to them, and a list cannot be cut later.
    wanted = Split(axes[0] + 1)
  kind = _shifted(wanted, -1)
  are_numbers = all(dim.is_number for dim in elements)
  if kind == WHOLE and are_numbers and is_zero(context.node.inputs[0]):
    kind = None  # Parts of a sum may be added to them.
  position = 1 if context.node.type == 'TensorListFromTensor' else 2
  return Decision(
    context.first(wanted),
    [Value(Listed(kind), elements)],
    _with_element_shape(context, position),
  )


def _shifted(kind, by: int):
  """Returns the kind of a tensor with more or fewer axes before its rows.

  Raises:
    UnknownError: its rows lie along an axis that is gone.
  """
  if not isinstance(kind, Split):
    return kind
  if kind.axis + by < 0:
    raise UnknownError
  return Split(kind.axis + by)


def is_zero(tensor):
  """Returns whether all elements are zero, as far as the program says it."""
  node = tensor.node
  if node.type in ('Identity', 'Reshape', 'BroadcastTo'):
    return is_zero(node.inputs[0])
  if node.type == 'Fill':
    return is_zero(node.inputs[1])
  if node.type == 'Const' and tensor.dtype.is_floating:
    return not tf.make_ndarray(node.attrs['value'].tensor).any()
  return node.type == 'ZerosLike'


def _kind_of(value):
  """Returns the kind of the elements of a list."""
  return WHOLE if value.kind.kind is None else value.kind.kind


def _out(value, kind, dims) -> Value:
  """Returns an output with rows of the elements of a list, of the given kind."""
  if not isinstance(kind, Split):
    return Value(kind, dims)
  axis = _kind_of(value).axis
  if dims is None or value.dims is None or len(value.dims) <= axis:
    raise UnknownError
  return split(kind.axis, value.dims[axis], dims)


@rule('TensorListGetItem', 'TensorListPopBack')
def _element(context):
  value, wants = _list(context), context.first(AS_IS)
  rest = [value] if context.node.type == 'TensorListPopBack' else []
  kind, index = _kind_of(value), len(rest)
  dims = context.dims(index)
  out = _out(value, kind, value.dims if dims is None else dims)
  ints = value.ints if kind == WHOLE else None
  return Decision(
    wants,
    [*rest, dataclasses.replace(out, ints=ints)],
    _with_element_shape(context, len(wants) - 1),
  )


# The inputs that become elements of a list.
_ITEMS = {
  'TensorListPushBack': 1,
  'TensorListScatterIntoExistingList': 1,
  'TensorListSetItem': 2,
}


@rule(*_ITEMS)
def _add(context):
  """Returns a list with more elements, of the kind that its elements are of."""
  value, at, shift = _list(context), _ITEMS[context.node.type], 0
  item = context.inputs[at]
  if context.node.type == 'TensorListScatterIntoExistingList':
    context.rank(at)  # It must be known.
    item, shift = Value(_shifted(item.kind, -1), item.dims[1:]), 1
  kind = item.kind if value.kind.kind is None else value.kind.kind
  if isinstance(kind, Split) and item.dims is None:
    raise UnknownError
  wants = context.first(AS_IS)
  wants[at] = _shifted(kind, shift)
  dims = value.dims if item.dims is None else item.dims
  # What every element is, if all of them are the same.
  is_same = value.kind.kind is None or value.ints == item.ints
  ints = item.ints if is_same else None
  return Decision(wants, [Value(Listed(kind), dims, ints)])


@rule('TensorListStack', 'TensorListGather', 'TensorListConcatV2')
def _stack(context):
  value, kind = _list(context), _kind_of(_list(context))
  wants = context.first(AS_IS)
  if context.node.type == 'TensorListConcatV2':
    # The elements follow each other along their first axis.
    _shifted(kind, -1)
    outputs = [_out(value, kind, context.dims()), context.out(WHOLE, 1)]
    return Decision(wants, outputs, _with_element_shape(context, 1))
  # The shape of the elements comes last.
  emit = _with_element_shape(context, len(wants) - 1)
  out = _out(value, _shifted(kind, 1), context.dims())
  return Decision(wants, [out], emit)


@rule('TensorListLength')
def _length(context):
  return Decision([AS_IS], context.whole().outputs)


@rule('TensorListElementShape')
def _element_shape(context):
  value = _list(context)
  kind, node = value.kind.kind, context.node
  outputs = [context.out(WHOLE, ints=value.dims)]
  if not isinstance(kind, Split):
    return Decision([AS_IS], outputs)

  def emit(site, inputs):
    shape = site.op(node, inputs)[0]

    def of_all_rows():
      return tf.where(shape < 0, shape, site.whole_shape(shape, kind.axis))

    with tf.device('CPU:0'):
      # A list whose elements may have any rank says -1, a scalar.
      return [tf.cond(tf.equal(tf.rank(shape), 0), lambda: shape, of_all_rows)]

  return Decision([AS_IS], outputs, emit)


# Gradients of lists are accumulated in lists of all elements.
@rule('TensorListConcatLists', 'TensorListResize')
def _same_list(context):
  wants = [AS_IS if isinstance(k, Listed) else WHOLE for k in context.kinds]
  return Decision(wants, [_list(context)])
