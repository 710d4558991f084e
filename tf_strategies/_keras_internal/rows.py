"""Rows of large tables: Keras's lookups, and optimizers' updates, by rows.

A variable with an attribute `row_table` represents the rows of that table. The
indices of its gradient are ids. Keras clips its gradients like all others. The
table makes the update: it calls the optimizer's own rule with the rows of the
gradient and with the optimizer's state of these rows, in place of variables.

Also nested optimizers, and what a strategy changes in those of its scope.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state, stateless_scope
from keras.src.backend.tensorflow import numpy
from keras.src.optimizers import base_optimizer
from keras.src.utils import tracking

from tf_strategies import _tf_internal, errors

_IDS = (tf.int32, tf.int64)


def _look_up_rows(take):
  """Looks up rows in a table that says `gives_rows`. Keras would read all of it."""

  def take_rows(x, indices, axis=None):
    """Does the same as `keras.ops.take`."""
    is_keras = isinstance(x, keras.Variable)
    table = x._value if is_keras else x
    if (
      axis != 0
      or not getattr(table, 'gives_rows', False)
      or stateless_scope.in_stateless_scope()
    ):
      return take(x, indices, axis)
    found = rows_of(
      indices,
      lambda ids: _from_start(ids, table),
      lambda ids: tf.gather(table, ids),
    )
    return x._maybe_autocast(found) if is_keras else found

  return take_rows


def rows_of(
  indices: Any,
  to_ids: Callable[[tf.Tensor], tf.Tensor],
  read: Callable[[tf.Tensor], tf.Tensor],
) -> Any:
  """Returns the rows as Keras's `take` does, without a tensor of the whole table.

  Args:
    indices: dense, ragged or sparse indices.
    to_ids: converts a dense tensor of indices to ids of rows.
    read: returns the rows of a dense tensor of ids, with one more dimension.
  """
  if not isinstance(indices, tf.SparseTensor):
    return tf.ragged.map_flat_values(
      lambda flat: read(to_ids(tf.convert_to_tensor(flat))), indices
    )
  # A missing entry means row 0, as in Keras.
  ids = to_ids(indices.values)
  is_missing = tf.size(ids, tf.int64) < tf.reduce_prod(indices.dense_shape)
  zeros = tf.zeros([tf.cast(is_missing, tf.int32)], ids.dtype)
  found, places = tf.unique(tf.concat([zeros, ids], 0))
  places = indices.with_values(places[tf.size(zeros) :])
  return numpy.take(read(found), places, 0)


def _from_start(ids, table):
  """Returns ids with negative ones, which count from the end, made positive."""
  if ids.dtype not in _IDS:
    ids = tf.cast(ids, tf.int64)
  return tf.where(ids < 0, ids + tf.cast(table.shape[0], ids.dtype), ids)


_tf_internal.change(
  numpy,
  'take(x, indices, axis)',
  _look_up_rows,
  'an Embedding on parameter servers reads the rows of its batch',
)


class _Rows:
  """Some rows that an update uses like a variable. Subclasses define where they are."""

  def __tf_tensor__(self, dtype=None, name=None):
    return tf.convert_to_tensor(self._value(), dtype, name=name)


def _operator(name: str):
  def operate(self, *others):
    return getattr(self._value(), name)(*others)

  return operate


for _name in tf.Tensor.OVERLOADABLE_OPERATORS:
  setattr(_Rows, _name, _operator(_name))


class Rows(_Rows):
  """Some rows of a variable. Adding to them adds to the variable.

  Each row occurs once, unless an update only adds to the rows.
  """

  def __init__(self, variable: tf.Variable, rows: tf.Tensor):
    self._variable, self._rows = variable, rows
    self.dtype = variable.dtype
    self.shape = rows.shape.concatenate(variable.shape[1:])

  def _value(self):
    return tf.gather(self._variable, self._rows)

  def assign(self, value):
    """Replaces the rows."""
    self._variable.scatter_update(self._slices(value))

  def assign_add(self, delta):
    """Adds to the rows."""
    self._variable.scatter_add(self._slices(delta))

  def assign_sub(self, delta):
    """Subtracts from the rows."""
    self._variable.scatter_sub(self._slices(delta))

  def _slices(self, value):
    value = tf.convert_to_tensor(value, self.dtype)
    return tf.IndexedSlices(value, self._rows)


class RowValues(_Rows):
  """Rows that are not in a variable. An update changes `tensor`."""

  def __init__(self, tensor: tf.Tensor):
    self.tensor = tensor
    self.dtype, self.shape = tensor.dtype, tensor.shape

  def _value(self):
    return self.tensor

  def assign(self, value):
    """Replaces the rows."""
    value = tf.cast(value, self.dtype)
    self.tensor = tf.reshape(value, tf.shape(self.tensor))

  def assign_add(self, delta):
    """Adds to the rows."""
    self.assign(self.tensor + tf.convert_to_tensor(delta))

  def assign_sub(self, delta):
    """Subtracts from the rows."""
    self.assign(self.tensor - tf.convert_to_tensor(delta))

  scatter_add, scatter_sub = assign_add, assign_sub


def slots_of(
  optimizer: keras.optimizers.Optimizer, variable: tf.Variable
) -> dict[str, keras.Variable]:
  """Returns an optimizer's state of a variable, by the attribute that lists it."""
  index = optimizer._get_variable_index(variable)
  count = len(optimizer._trainable_variables)
  own = {id(each) for each in optimizer.variables}
  return {
    name: each[index]
    for name, each in vars(optimizer).items()
    if isinstance(each, list)
    and len(each) == count
    and name != '_variables'
    and id(each[index]) in own
  }


@contextlib.contextmanager
def seen_as_part(slots: Sequence[keras.Variable], part: int) -> Iterator[None]:
  """Replaces the values of slots in `parts` by one of these."""
  wholes = [slot._value for slot in slots]
  try:
    for slot in slots:
      slot._value = slot._value.parts[part]
    yield
  finally:
    for slot, whole in zip(slots, wholes, strict=True):
      slot._value = whole


@contextlib.contextmanager
def in_place_of(
  variable: tf.Variable,
  optimizer: keras.optimizers.Optimizer,
  rows: _Rows,
  slots: Mapping[str, _Rows],
) -> Iterator[None]:
  """Makes an optimizer take rows for a variable, and for its slots, by attribute."""
  rows._unique_id = optimizer._var_key(variable)  # By which it finds its slots.
  index = optimizer._get_variable_index(variable)
  attributes = vars(optimizer)  # Keras would track what is set otherwise.
  before = {name: attributes[name] for name in slots}
  for name, found in slots.items():
    all_slots = before[name]
    attributes[name] = [*all_slots[:index], found, *all_slots[index + 1 :]]
  try:
    yield
  finally:
    attributes.update(before)


@contextlib.contextmanager
def seen_as_rows(
  updating: keras.optimizers.Optimizer, variable: tf.Variable, rows: tf.Tensor
) -> Iterator[Rows]:
  """Makes an optimizer see only some rows of slots, and yields the variable's rows."""
  slots = {
    name: Rows(slot.value, rows)
    for name, slot in slots_of(updating, variable).items()
    if slot.value.shape == variable.shape
  }
  seen = Rows(variable, rows)
  with in_place_of(variable, updating, seen, slots):
    yield seen


# Optimizers that update each element from that element and its state alone.
_KINDS = (
  'SGD',
  'RMSprop',
  'Adagrad',
  'Adadelta',
  'Adam',
  'AdamW',
  'Adamax',
  'Nadam',
  'Ftrl',
  'Lion',
)
_RULES = [getattr(keras.optimizers, kind).update_step for kind in _KINDS]
# Options that must touch each row in each step, or need dense gradients.
_REFUSED = (
  'use_ema',
  'gradient_accumulation_steps',
  'loss_scale_factor',
  'clipvalue',
  'global_clipnorm',
)


def table_of(variable: Any) -> Any:
  """Returns the table of rows that a variable represents, or None."""
  return getattr(variable, 'row_table', None)


def check_row_optimizer(
  optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> None:
  """Rejects an optimizer that cannot update some rows of a table.

  Raises:
    UnsupportedOptionError: names the optimizer, and those that can.
  """
  kind, name = type(optimizer).__name__, variable.path
  if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
    raise errors.UnsupportedOptionError(
      f'LossScaleOptimizer with dynamic table {name!r}',
      'an optimizer without loss scaling',
      'use the policy mixed_bfloat16, or compile with auto_scale_loss=False',
    )
  if getattr(optimizer, 'inner_optimizer', None) is not None:
    return  # The inner optimizer is checked too.
  if type(optimizer).update_step not in _RULES:
    raise errors.UnsupportedOptionError(
      f'{kind} with dynamic table {name!r}',
      f'one of {", ".join(_KINDS)}',
      'use one of these: they can update single rows',
    )
  for option in _REFUSED:
    value = getattr(optimizer, option, None)
    if value:
      raise errors.UnsupportedOptionError(
        f'{kind}({option}={value!r}) with dynamic table {name!r}',
        'options that change no rows outside of the batch',
        f'leave out {option}',
      )
  # pylint: disable-next=protected-access
  if optimizer.weight_decay and optimizer._use_weight_decay(variable):
    raise errors.UnsupportedOptionError(
      f'{kind}(weight_decay={optimizer.weight_decay!r}) with dynamic table {name!r}',
      'an optimizer that does not decay the rows',
      'call optimizer.exclude_from_weight_decay(var_list=layer.trainable_variables) '
      'before it is built',
    )


def _update_tables_apart(self, grads, trainable_variables, learning_rate):
  """Updates variables as Keras does, and the rows of tables by their ids."""
  pairs = list(zip(grads, trainable_variables, strict=True))
  others = [pair for pair in pairs if table_of(pair[1]) is None]
  if others:
    update = type(self)._backend_update_step
    update(self, *map(list, zip(*others, strict=True)), learning_rate)
  for gradient, variable in pairs:
    table = table_of(variable)
    if table is not None:
      table.update(self, gradient, learning_rate)


def _build_for_tables(build):
  """Changes the updates of optimizers that have a table, and of no others."""

  def build_for_tables(self, variables):
    build(self, variables)
    represented = [v for v in variables if table_of(v) is not None]
    for variable in represented:
      check_row_optimizer(self, variable)
    if represented:
      update = functools.partial(_update_tables_apart, self)
      vars(self)['_backend_update_step'] = update

  return build_for_tables


_tf_internal.change(
  base_optimizer.BaseOptimizer,
  'build(variables)',
  _build_for_tables,
  'the rows of a DynamicEmbedding are in no variable',
)


def chain(optimizer) -> Iterator[keras.optimizers.Optimizer]:
  """Yields an optimizer and the optimizers that it wraps, from outside to inside."""
  while optimizer is not None:
    yield optimizer
    optimizer = getattr(optimizer, 'inner_optimizer', None)


def see_gradients(apply: Callable[..., None]) -> None:
  """Has the optimizer that makes a variable now call `apply(optimizer, ...)`.

  A strategy calls it for each variable in its scope. An optimizer makes its first
  variable when it is made, so each optimizer of the scope is found. Its `apply`
  becomes the strategy's, which reduces gradients before Keras clips, accumulates and
  unscales them. So Keras need not reduce them later.
  """
  scopes = global_state.get_global_attribute('name_scope_stack')
  optimizer = scopes[-1].caller if scopes else None
  if isinstance(optimizer, keras.optimizers.Optimizer) and 'apply' not in vars(
    optimizer
  ):
    changes = {'apply': apply}
    kind = keras.optimizers.LossScaleOptimizer
    if isinstance(optimizer, kind):
      changes.update(build=_build_with_scale, scale_loss=_scale_by_variable)
    for name, change in changes.items():
      vars(optimizer)[name] = functools.partial(change, optimizer)
    vars(optimizer)['_all_reduce_sum_gradients'] = list


@tracking.no_automatic_dependency_tracking
def _make_scale(optimizer):
  """Makes the variables of a loss scale, unless they exist."""
  if hasattr(optimizer, 'dynamic_scale'):
    return
  for name, dtype, value in (
    ('step_counter', 'int', 0),
    ('dynamic_scale', 'float32', optimizer.initial_scale),
  ):
    variable = optimizer.add_variable(
      shape=(),
      dtype=dtype,
      initializer=keras.initializers.Constant(value),
      aggregation='none',
      name=name,
    )
    setattr(optimizer, name, variable)


def _build_with_scale(optimizer, var_list):
  """Builds an optimizer whose loss scale may already exist because of a step."""
  _make_scale(optimizer)
  optimizer.inner_optimizer.build(var_list)
  super(keras.optimizers.LossScaleOptimizer, optimizer).build(var_list)


def _scale_by_variable(optimizer, loss):
  """Scales the loss by a variable in a traced step.

  Keras scales by a number before it builds the optimizer. The number would stay
  in the step, because our steps are not traced again after they have created
  variables.
  """
  if not optimizer.built and not tf.executing_eagerly():
    with keras.name_scope(optimizer.name, caller=optimizer):
      _make_scale(optimizer)
    return keras.ops.multiply(loss, optimizer.dynamic_scale)
  return type(optimizer).scale_loss(optimizer, loss)
