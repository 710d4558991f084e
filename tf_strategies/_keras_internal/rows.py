"""Rows of large tables: lookups of Keras, and optimizers' updates, by rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf
from keras.src.backend.common import stateless_scope
from keras.src.backend.tensorflow import core, numpy, optimizer
from keras.src.optimizers import base_optimizer

from tf_strategies import _requirements
from tf_strategies._keras_internal import steps

_IDS = (tf.int32, tf.int64)


def _look_up_rows(take):
  """Asks a table that says `gives_rows` for rows: Keras reads all of it first."""

  @functools.wraps(take)
  def take_rows(x, indices, axis=None):
    is_keras = isinstance(x, keras.Variable)
    table = x._value if is_keras else x
    if (
      axis != 0
      or not getattr(table, 'gives_rows', False)
      or stateless_scope.in_stateless_scope()
    ):
      return take(x, indices, axis)
    found = _rows_of(table, indices, take)
    return x._maybe_autocast(found) if is_keras else found

  return take_rows


def _rows_of(table, indices, take):
  if isinstance(indices, tf.RaggedTensor):
    return tf.ragged.map_flat_values(
      lambda ids: _rows_of(table, ids, take), indices
    )
  if isinstance(indices, tf.SparseTensor):
    # An entry that is missing means row 0, as to Keras.
    ids = _from_start(indices.values, table)
    is_missing = tf.size(ids, tf.int64) < tf.reduce_prod(indices.dense_shape)
    zeros = tf.zeros([tf.cast(is_missing, tf.int32)], ids.dtype)
    found, places = tf.unique(tf.concat([zeros, ids], 0))
    places = indices.with_values(places[tf.size(zeros) :])
    return take(tf.gather(table, found), places, 0)
  return tf.gather(table, _from_start(tf.convert_to_tensor(indices), table))


def _from_start(ids, table):
  """Ids of which negative ones counted from the end."""
  if ids.dtype not in _IDS:
    ids = tf.cast(ids, tf.int64)
  return tf.where(ids < 0, ids + tf.cast(table.shape[0], ids.dtype), ids)


steps.change(
  numpy,
  'take(x, indices, axis)',
  _look_up_rows,
  'an Embedding on parameter servers reads the rows of its batch',
)


class Rows:
  """Some rows of a variable, each once, as an update sees a variable."""

  def __init__(self, variable: tf.Variable, rows: tf.Tensor, key: str = ''):
    self._variable, self._rows = variable, rows
    self._unique_id = key  # By which an optimizer finds its slots.

  @property
  def dtype(self) -> tf.DType:
    """Of the variable."""
    return self._variable.dtype

  @property
  def shape(self) -> tf.TensorShape:
    """Of these rows."""
    return self._rows.shape.concatenate(self._variable.shape[1:])

  def __tf_tensor__(self, dtype=None, name=None):
    value = tf.gather(self._variable, self._rows)
    return tf.convert_to_tensor(value, dtype, name=name)

  def assign(self, value):
    """As of a variable of these rows."""
    self._variable.scatter_update(self._slices(value))

  def assign_add(self, delta):
    """As of a variable of these rows."""
    self._variable.scatter_add(self._slices(delta))

  def assign_sub(self, delta):
    """As of a variable of these rows."""
    self._variable.scatter_sub(self._slices(delta))

  def scatter_add(self, slices):
    """As of a variable of these rows."""
    self._variable.scatter_add(self._in_whole(slices))

  def scatter_sub(self, slices):
    """As of a variable of these rows."""
    self._variable.scatter_sub(self._in_whole(slices))

  def scatter_update(self, slices):
    """As of a variable of these rows."""
    self._variable.scatter_update(self._in_whole(slices))

  def _slices(self, value):
    value = tf.convert_to_tensor(value, self.dtype)
    return tf.IndexedSlices(value, self._rows)

  def _in_whole(self, slices):
    rows = tf.gather(self._rows, slices.indices)
    return tf.IndexedSlices(slices.values, rows)


def _operator(name: str):
  def operate(self, *others):
    return getattr(tf.convert_to_tensor(self), name)(*others)

  return operate


for _name in ('add', 'sub', 'mul', 'truediv', 'pow'):
  for _prefix in ('', 'r'):
    _operator_name = f'__{_prefix}{_name}__'
    setattr(Rows, _operator_name, _operator(_operator_name))


@contextlib.contextmanager
def seen_as_rows(
  updating: keras.optimizers.Optimizer, variable: tf.Variable, rows: tf.Tensor
) -> Iterator[Rows]:
  """Makes an optimizer see those rows of a variable's slots; yields the variable's."""
  index = updating._get_variable_index(variable)
  count = len(updating._trainable_variables)
  before = {}
  for name, slots in list(vars(updating).items()):
    is_of_slots = isinstance(slots, list) and len(slots) == count
    if not is_of_slots or name in ('_trainable_variables', '_variables'):
      continue
    slot = getattr(slots[index], 'value', None)
    if slot is not None and slot.shape == variable.shape:
      before[name] = slots
      mine = [*slots[:index], Rows(slot, rows), *slots[index + 1 :]]
      object.__setattr__(updating, name, mine)
  try:
    yield Rows(variable, rows, updating._var_key(variable))
  finally:
    for name, slots in before.items():
      object.__setattr__(updating, name, slots)


def replace_update(
  of: keras.optimizers.Optimizer, update: Callable[..., None]
) -> None:
  """Has an optimizer call `update(optimizer, gradient, variable, learning_rate)`."""
  object.__setattr__(of, 'update_step', functools.partial(update, of))


def replaced_update(of: keras.optimizers.Optimizer) -> Callable | None:
  """What `replace_update` was given for an optimizer."""
  return getattr(vars(of).get('update_step'), 'func', None)


def check() -> None:
  """Raises UnsupportedVersionError for what the functions above would miss."""
  why = 'an optimizer updates the rows of a batch'
  base = base_optimizer.BaseOptimizer
  _requirements.method(base, '_get_variable_index(variable)', why)
  _requirements.method(optimizer.TFOptimizer, '_var_key(variable)', why)
  _requirements.mention(optimizer.TFOptimizer._var_key, ['_unique_id'], why)
  for name in ('assign', 'assign_add', 'assign_sub'):
    method = getattr(optimizer.TFOptimizer, name)
    _requirements.mention(method, ['value', 'IndexedSlices'], why)
  why = 'an Embedding on parameter servers reads the rows of its batch'
  _requirements.method(core.Variable, '_maybe_autocast(value)', why)
  _requirements.mention(core.Variable._initialize, ['_value'], why)
