"""Variables and tables whose rows are spread over several parameter servers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_strategies import _keras_internal, _tf_internal, errors
from tf_strategies.checkpoint import model_state
from tf_strategies.keras.tables import (
  dynamic_embedding,
  row_table,
  row_updates,
)
from tf_strategies.strategies.parameter_server import (
  traced_step,
  variables,
)

_VALUE_KEY = 'VARIABLE_VALUE'

# Tables of this size are cut by default, if they have this many times more rows
# than columns. Such tables are not matrices to multiply with.
_LARGE_BYTES = 64 << 20
_TALL = 16


def large_tables(num_servers: int) -> Callable[..., list[int]]:
  """Returns the default partitioner: it cuts large tables, one part a server.

  >>> partitioner = large_tables(3)
  >>> partitioner(tf.TensorShape([1_000_000, 64]), tf.float32)
  [3, 1]
  >>> partitioner(tf.TensorShape([10_000, 64]), tf.float32)
  [1, 1]
  """

  def partition(shape, dtype):
    rows, inner = shape[0], shape[1:].num_elements()
    is_large = rows * inner * dtype.size >= _LARGE_BYTES
    is_table = shape.rank > 1 and rows >= _TALL * inner
    parts = num_servers if is_large and is_table else 1
    return [parts] + [1] * (shape.rank - 1)

  return partition


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
  """Returns the first row of each part.

  >>> offsets((3, 3, 2))
  (0, 3, 6)
  """
  return tuple(itertools.accumulate(sizes[:-1], initial=0))


def initial_values(
  value: tf.Tensor | Callable,
  shape: Sequence[int],
  dtype: tf.DType,
  sizes: Sequence[int],
) -> list[tf.Tensor | Callable[[], tf.Tensor]]:
  """Returns the initial value of each part of a variable of `shape`, or a function.

  An initializer of Keras's that makes each element by itself makes the rows of a part
  where that is, so that nobody holds a large table whole.
  """
  rows_of_keras = callable(value) and _keras_internal.initial_rows(
    value, shape, dtype
  )
  if rows_of_keras:
    return [
      functools.partial(rows_of_keras, rows, first)
      for rows, first in zip(sizes, offsets(sizes), strict=True)
    ]
  whole = value() if callable(value) else value
  whole = _tf_internal.unwrap_checkpoint_value(whole)
  return tf.split(tf.convert_to_tensor(whole, dtype), sizes)


def _is_whole() -> bool:
  """Returns whether a variable in parts is one variable in the graph being traced."""
  return _tf_internal.traces_to_save() or traced_step.current() is not None


class PartitionedVariable(
  variables.OnServers, _tf_internal.BaseResourceVariable
):
  """One variable to Keras and to checkpoints, several on the servers.

  It is cut along its first axis. Checkpoints and `numpy()` have it whole, so
  that it can be loaded onto another number of servers.

  TensorFlow's own `ShardedVariable` has no handle, and Keras 3 fails on it.
  The parts, in order of rows, are not trainable: gradients are of the whole.
  """

  def __init__(
    self, parts: Sequence[variables.ServerVariable], name: str, **kwargs
  ):
    self.parts = tuple(parts)
    self.sizes = tuple(int(p.shape[0]) for p in parts)
    self.offsets = offsets(self.sizes)
    super().__init__(
      shape=[sum(self.sizes), *parts[0].shape[1:]],
      dtype=parts[0].dtype,
      # What tapes and functions know the variable by.
      handle=parts[0].handle,
      handle_name=name,
      name=name,
      unique_id=f'{parts[0]._unique_id}/parts',  # pylint: disable=protected-access
      **kwargs,
    )
    # Stands for this variable in a SavedModel, and in steps that are traced: they have
    # it whole. Has no value.
    with tf.init_scope(), tf.device('/device:CPU:0'):
      self.stand_in = _tf_internal.UninitializedVariable(
        shape=self.shape, dtype=self.dtype, trainable=False
      )
    traced_step.register(self, self.stand_in.handle)
    for part in parts:
      part.is_part = True
      # An optimizer updates a part as it would the whole: its slots are in parts too.
      part._unique_id = self._unique_id  # pylint: disable=protected-access

  @classmethod
  def _variable_call(cls, *args, **kwargs):
    """Returns None, so that TensorFlow makes no other kind of variable."""
    del cls, args, kwargs

  @property
  def handle(self):
    """Returns the handle by which tapes and functions know the variable."""
    if _is_whole():
      return self.stand_in.handle
    return self.parts[0].handle

  @property
  def device(self):
    """Returns the device of the first part."""
    return self.parts[0].device

  def is_initialized(self, name=None):
    """Returns whether every part is."""
    return tf.reduce_all([p.is_initialized() for p in self.parts])

  def _read_variable_op(self, no_copy=False):
    if _is_whole():
      return super()._read_variable_op(no_copy)
    with _tf_internal.stop_recording():
      value = self._read(self.read_directly)
    _tf_internal.record_read(self, value, lambda dy: dy)
    return value

  # Keras exports what a function tracks, so no part is read as a variable.

  def read_directly(self) -> tf.Tensor:
    """Reads on the servers, now."""
    return tf.concat([part.read_directly() for part in self.parts], 0)

  def rows_directly(self, numbers: tf.Tensor) -> tf.Tensor:
    """Reads each row on the server that has it."""
    owner, numbers = self._places(numbers)
    reads = [part.rows_directly for part in self.parts]
    return row_updates.gather(numbers, owner, reads)

  def _write(self, method: str, value, *args, **kwargs):
    """Writes a variable that is whole, or each part with its rows of `value`."""
    if _is_whole():
      if method == 'assign':
        method, value = variables.write_of(self, value)
      return getattr(super(), method)(value, *args, **kwargs)
    value = tf.convert_to_tensor(value, self.dtype)
    value = tf.broadcast_to(value, self.shape)
    for part, rows in zip(self.parts, tf.split(value, self.sizes), strict=True):
      getattr(part, method)(rows)
    return self

  # As those of `tf.Variable`; additions are atomic on a server.
  assign = functools.partialmethod(_write, 'assign')
  assign_add = functools.partialmethod(_write, 'assign_add')
  assign_sub = functools.partialmethod(_write, 'assign_sub')

  def _places(self, rows):
    """Returns the part of each row, and its number there."""
    starts = tf.constant(self.offsets, rows.dtype)
    owner = tf.cast(tf.searchsorted(starts, rows, side='right'), tf.int32) - 1
    return owner, rows - tf.gather(starts, owner)

  def gather_nd(self, indices, name=None):
    """Returns elements as `tf.gather_nd`; reads all parts."""
    return tf.gather_nd(self.read_value(), indices, name=name)

  def split(self, value: Any) -> Sequence[Any]:
    """Returns an argument of an update for each part, by rows if it has the same."""
    if hasattr(value, 'by_part'):
      return value.by_part
    whole = model_state.value_of(value)
    if isinstance(whole, PartitionedVariable):
      return whole.parts
    if isinstance(value, tf.IndexedSlices):
      owner, numbers = self._places(value.indices)
      count = len(self.parts)
      divided = row_updates.divide(owner, count, numbers, value.values)
      return [
        tf.IndexedSlices(
          values, rows, tf.constant(part.shape.as_list(), rows.dtype)
        )
        for part, (rows, values) in zip(self.parts, divided, strict=True)
      ]
    if tf.is_tensor(value) and tuple(value.shape) == tuple(self.shape):
      return tf.split(value, self.sizes)
    return [value] * len(self.parts)

  def join(self, by_part: Sequence[Any]) -> Any:
    """Returns the gradient that `split` splits into these gradients of parts.

    Nothing is copied between servers unless the whole gradient is used, for example
    to clip it.
    """
    if isinstance(by_part[0], tf.IndexedSlices):
      rows = [
        each.indices + tf.cast(offset, each.indices.dtype)
        for each, offset in zip(by_part, self.offsets, strict=True)
      ]
      whole = tf.IndexedSlices(
        tf.concat([each.values for each in by_part], 0),
        tf.concat(rows, 0),
        tf.constant(self.shape.as_list(), rows[0].dtype),
      )
    else:
      whole = tf.concat(by_part, 0)
    whole.by_part = by_part
    return whole

  def __getattribute__(self, name):
    if name.startswith(('scatter_', 'batch_scatter_')) and not _is_whole():
      raise errors.UnsupportedOptionError(
        f'{name}',
        f'assign of partitioned variable {self.name!r}',
        'use assign, or do not partition this variable',
      )
    return super().__getattribute__(name)

  def _serialize_to_tensors(self):
    return {_VALUE_KEY: self.read_value()}

  def _restore_from_tensors(self, restored_tensors):
    self.assign(restored_tensors[_VALUE_KEY])
    return self


class ServerShard(row_table.TableShard):
  """Some rows, on one server; `Recovery` treats a shard like a variable."""

  is_counter = False
  old_handles = ()  # Of no function.

  def __init__(
    self,
    server: int,
    name: str,
    width: int,
    initial_rows: dynamic_embedding.InitialRows,
  ):
    super().__init__(width, initial_rows, variables.server_device(server))
    self.server = server
    self.name = name

  def recreate_if_dead(self) -> None:
    """Makes an empty shard if the server was restarted."""
    try:
      self.size()
    except tf.errors.OpError:
      self._make()
      self.is_lost = True

  check_is_whole = variables.ServerVariable.check_is_whole

  def read(self, ids: tf.Tensor) -> tf.Tensor:
    """Returns rows of ids; see `TableShard.read`.

    Raises:
      DataError: if the rows were lost with their server.
    """
    self.check_is_whole()
    return super().read(ids)


class ServerTable(row_table.RowTable, tf.__internal__.tracking.Trackable):
  """A table without a vocabulary, with a shard on each server.

  A step reads the rows of its batch on the servers that hold them. They are updated
  there, as variables are. A lock of each server keeps two updates from overwriting
  each other.

  Args:
    variable: see `RowTable`.
    initial_rows: makes rows from ids.
    num_servers: on which rows are.
    drained: calls a function when all steps are done.
  """

  def __init__(
    self,
    variable: keras.Variable,
    initial_rows: dynamic_embedding.InitialRows,
    num_servers: int,
    drained: Callable[[Callable], Any],
  ):
    shards = [
      ServerShard(i, variable.path, variable.shape[1], initial_rows)
      for i in range(num_servers)
    ]
    super().__init__(variable, shards, drained)
    variable.value.stays_zero = True

  def _serialize_to_tensors(self):
    raise errors.UnsupportedOptionError(
      'tf.train.Checkpoint',
      f'a checkpoint of dynamic table {self.variable.path!r} from all servers',
      'use checkpoint_dir of the strategy, or model.save. A file loads onto '
      'one device, which can export the model',
    )

  def _trackable_children(self, save_type='checkpoint', **kwargs):
    if save_type == 'savedmodel':
      raise errors.UnsupportedOptionError(
        f'model.export with dynamic table {self.variable.path!r} on parameter servers',
        'a model whose rows are in one process',
        "call model.save('model.keras'), and in a process without this "
        "strategy keras.models.load_model('model.keras').export(path)",
      )
    return super()._trackable_children(save_type, **kwargs)

  def _value_of_new(self, slot):
    # Nothing writes the variable: no step must be waited for, and none sends it.
    with tf.init_scope():
      return tf.raw_ops.ReadVariableOp(
        resource=slot.value.handle, dtype=tf.float32
      ).numpy()

  def read(self, ids):
    """Returns the rows of ids."""
    trace = traced_step.current()
    if trace is None or not trace.are_rows_known:
      return super().read(ids)
    # The check whether workers may share rows needs operations that it knows. In
    # these each row follows from its id alone.
    zeros = tf.zeros([self._width])
    return row_updates.look_up(
      self.variable.value,
      ids,
      lambda ids: tf.expand_dims(tf.cast(ids, tf.float32), -1) * zeros,
      is_once=False,
    )

  def update(self, optimizer, gradient, learning_rate):
    """Updates rows as `RowTable.update`; not in a step on a worker."""
    if traced_step.current() is not None:
      raise errors.UnsupportedOptionError(
        'an optimizer that the step does not know, or does not apply last',
        f'an optimizer of dynamic table {self.variable.path!r} that is '
        'applied at the end of the step',
        'pass the optimizer to strategy.step, and apply it last',
      )
    super().update(optimizer, gradient, learning_rate)
