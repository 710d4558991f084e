"""Rules for lists of tensors, in which loops keep the results of their turns."""

from __future__ import annotations

import tensorflow as tf

from tf_strategies.spmd.kinds import AS_IS, SUM, WHOLE, Listed, Split, Value
from tf_strategies.spmd.plan import Context, Decision, rule


def _own_element_shape(context, position, site, inputs):
  """Returns the shape of a list's elements on this replica."""
  shape, value = inputs[position], context.inputs[position]
  axes = [i for i, d in enumerate(value.ints or ()) if d and d.has_batch]
  if shape.shape.rank != 1 or not axes:
    return shape
  own = site.own_shape(shape, axes[0], value, context.node.inputs[position])
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
  are_numbers = all(d is not None and d.is_number for d in elements)
  if kind == WHOLE and are_numbers and is_zero(context.node.inputs[0]):
    kind = None  # Parts of a sum may be added to them.
  if isinstance(wanted, Split):
    if wanted.axis == 0:
      return None
    kind = Split(wanted.axis - 1)
  return Decision(
    [wanted, WHOLE],
    [Value(Listed(kind), elements)],
    _with_element_shape(context, 1),
  )


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


def _elements_of(value):
  """Returns the elements of a list that a tensor is cut into; None if unknown."""
  if value.dims is None:
    return None
  kind, elements = value.kind, value.dims[1:]
  if isinstance(kind, Split):
    return None if kind.axis == 0 else Value(Split(kind.axis - 1), elements)
  return Value(kind, elements) if kind in (WHOLE, SUM) else None


@rule('TensorListScatterV2')
def _scatter(context: Context) -> Decision | None:
  element = _elements_of(context.inputs[0])
  if element is None:
    return None
  return Decision(
    [context.inputs[0].kind, WHOLE, WHOLE, WHOLE],
    [Value(Listed(element.kind), element.dims)],
    _with_element_shape(context, 2),
  )


@rule('TensorListScatterIntoExistingList')
def _scatter_into(context: Context) -> Decision | None:
  value, tensor, _ = context.inputs
  element = _elements_of(tensor)
  if not isinstance(value.kind, Listed) or element is None:
    return None
  decision = _added(context, value, element, [AS_IS, None, WHOLE], 1)
  if decision is not None and isinstance(decision.wants[1], Split):
    decision.wants[1] = Split(decision.wants[1].axis + 1)
  return decision


@rule('TensorListStack', 'TensorListGather')
def _stack(context: Context) -> Decision | None:
  value, *others = context.inputs
  if not isinstance(value.kind, Listed):
    return None
  wants = [AS_IS, *[WHOLE for _ in others]]
  kind = WHOLE if value.kind.kind is None else value.kind.kind
  # The shape of the elements comes last.
  emit = _with_element_shape(context, len(others))
  if not isinstance(kind, Split):
    return Decision(wants, [context.out(kind)], emit)
  if value.dims is None or context.dims() is None:
    return None
  length = value.dims[kind.axis]
  return Decision(wants, [context.split(kind.axis + 1, length)], emit)


@rule('TensorListConcatV2')
def _concat(context: Context) -> Decision | None:
  """The elements one after the other, along their first axis."""
  value = context.inputs[0]
  if not isinstance(value.kind, Listed):
    return None
  kind = WHOLE if value.kind.kind is None else value.kind.kind
  wants, lengths = [AS_IS, WHOLE, WHOLE], context.out(WHOLE, 1)
  emit = _with_element_shape(context, 1)
  if not isinstance(kind, Split):
    return Decision(wants, [context.out(kind), lengths], emit)
  if kind.axis == 0 or value.dims is None or context.dims() is None:
    return None
  split = context.split(kind.axis, value.dims[kind.axis])
  return Decision(wants, [split, lengths], emit)


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

    def of_all_rows():
      axis = kind.axis
      length = site.whole_length(shape[axis])
      length = tf.where(shape[axis] < 0, shape[axis], length)
      return tf.concat([shape[:axis], length[None], shape[axis + 1 :]], 0)

    with tf.device('CPU:0'):
      # A list whose elements may have any rank says -1, a scalar.
      return [tf.cond(tf.equal(tf.rank(shape), 0), lambda: shape, of_all_rows)]

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
