"""Rules for lists of tensors, in which loops keep the results of their turns."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tf_strategies.spmd.kinds import AS_IS, WHOLE, Listed, Split, Value
from tf_strategies.spmd.plan import Context, Decision, UnknownError, rule


def _list(context: Context, index: int = 0) -> Value:
  """Returns an input that is a list.

  Raises:
    UnknownError: what makes the list has no rule.
  """
  if not isinstance(context.kinds[index], Listed):
    raise UnknownError
  return context.inputs[index]


def _with_element_shape(context, position):
  """Returns an `emit` that passes the shape of a list's elements on this replica."""
  node, value = context.node, context.inputs[position]
  axes = [i for i, dim in enumerate(value.ints or ()) if dim.has_batch]

  def emit(site, inputs):
    inputs = list(inputs)
    shape = inputs[position]
    if shape.shape.rank == 1 and axes:
      own = site.own_shape(shape, axes[0], value, node.inputs[position])
      inputs[position] = tf.where(shape < 0, shape, own)
    return site.op(node, inputs)

  return emit


@rule('TensorListReserve', 'EmptyTensorList')
def _new(context: Context) -> Decision:
  return Decision(
    [WHOLE, WHOLE],
    [Value(Listed(), ())],
    _with_element_shape(context, 0),
  )


@rule('TensorListFromTensor', 'TensorListScatterV2')
def _from_tensor(context: Context) -> Decision | None:
  context.rank()  # It must be known.
  value, *others = context.inputs
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
    [wanted, *[WHOLE] * len(others)],
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


def _out(context, value, kind, index=0, **known) -> Value:
  """Returns an output with rows of the elements of a list, of the given kind."""
  if not isinstance(kind, Split):
    return context.out(kind, index, **known)
  axis = _kind_of(value).axis
  if value.dims is None or len(value.dims) <= axis:
    raise UnknownError
  return context.split(kind.axis, value.dims[axis], index, **known)


@rule('TensorListGetItem', 'TensorListPopBack')
def _element(context: Context) -> Decision:
  value, *others = context.inputs
  rest = [_list(context)] if context.node.type == 'TensorListPopBack' else []
  kind, index = _kind_of(_list(context)), len(rest)
  dims = context.dims(index)
  out = _out(
    context, value, kind, index, dims=value.dims if dims is None else dims
  )
  ints = value.ints if kind == WHOLE else None
  return Decision(
    [AS_IS, *[WHOLE] * len(others)],
    [*rest, dataclasses.replace(out, ints=ints)],
    _with_element_shape(context, len(others)),
  )


def _added(context, item, wants, shift=0) -> Decision:
  """A list with one more element, of the kind that its elements are of."""
  value = _list(context)
  kind = item.kind if value.kind.kind is None else value.kind.kind
  if isinstance(kind, Split) and item.dims is None:
    raise UnknownError
  wants[wants.index(None)] = _shifted(kind, shift)
  dims = value.dims if item.dims is None else item.dims
  # What every element is, if all of them are the same.
  is_same = value.kind.kind is None or value.ints == item.ints
  ints = item.ints if is_same else None
  return Decision(wants, [Value(Listed(kind), dims, ints)])


@rule('TensorListSetItem')
def _set_item(context: Context) -> Decision:
  return _added(context, context.inputs[2], [AS_IS, WHOLE, None])


@rule('TensorListPushBack')
def _push_back(context: Context) -> Decision:
  return _added(context, context.inputs[1], [AS_IS, None])


@rule('TensorListScatterIntoExistingList')
def _scatter_into(context: Context) -> Decision:
  context.rank(1)  # It must be known.
  tensor = context.inputs[1]
  item = Value(_shifted(tensor.kind, -1), tensor.dims[1:])
  return _added(context, item, [AS_IS, None, WHOLE], 1)


@rule('TensorListStack', 'TensorListGather', 'TensorListConcatV2')
def _stack(context: Context) -> Decision:
  value, kind = _list(context), _kind_of(_list(context))
  wants = [AS_IS, *[WHOLE] * (len(context.inputs) - 1)]
  if context.node.type == 'TensorListConcatV2':
    # The elements follow each other along their first axis.
    _shifted(kind, -1)
    outputs = [_out(context, value, kind), context.out(WHOLE, 1)]
    return Decision(wants, outputs, _with_element_shape(context, 1))
  # The shape of the elements comes last.
  emit = _with_element_shape(context, len(wants) - 1)
  return Decision(wants, [_out(context, value, _shifted(kind, 1))], emit)


@rule('TensorListLength')
def _length(context: Context) -> Decision:
  decision = context.whole()
  decision.wants = [AS_IS]
  return decision


@rule('TensorListElementShape')
def _element_shape(context: Context) -> Decision:
  value = _list(context)
  kind, node = value.kind.kind, context.node
  outputs = [context.out(WHOLE, ints=value.dims)]
  if not isinstance(kind, Split):
    return Decision([AS_IS], outputs)

  def emit(site, inputs):
    shape = site.op(node, inputs)[0]

    def of_all_rows():
      axis = kind.axis
      length = site.whole_length(shape[axis])
      length = tf.where(shape[axis] < 0, shape[axis], length)
      return tf.concat([shape[:axis], length[None], shape[axis + 1 :]], 0)

    with tf.device('CPU:0'):
      # A list whose elements may have any rank says -1, a scalar.
      return [tf.cond(tf.equal(tf.rank(shape), 0), lambda: shape, of_all_rows)]

  return Decision([AS_IS], outputs, emit)


@rule('TensorListResize')
def _resize(context: Context) -> Decision:
  return Decision([AS_IS, WHOLE], [context.inputs[0]])


# Accumulated gradients of lists.
@rule('TensorListConcatLists')
def _lists(context: Context) -> Decision:
  _list(context, 1)
  return Decision([AS_IS, AS_IS], [_list(context)])
