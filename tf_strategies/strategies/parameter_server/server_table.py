"""The rows of a table without a vocabulary, spread over the servers.

A step reads the rows of its batch on the servers that hold them. They are updated there,
as variables are. A lock of each server keeps two updates from overwriting each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_strategies import errors
from tf_strategies.keras.tables import row_initializers, row_table, row_updates
from tf_strategies.strategies.parameter_server import (
  traced_step,
  variables,
)


class ServerShard(row_table.TableShard):
  """Some rows, on one server; `Recovery` treats a shard like a variable."""

  is_counter = False
  old_handles = ()  # Of no function.

  def __init__(
    self,
    server: int,
    name: str,
    width: int,
    initial_rows: row_initializers.InitialRows,
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

  def check_is_whole(self) -> None:
    """Raises an error if its rows were lost with their server."""
    if self.is_lost:
      raise errors.DataError(
        f'Expected rows of {self.name!r} in a checkpoint, got none: they were '
        f'lost with parameter server {self.server}. Fix: before training, '
        'pass their owner to strategy.track(name=owner).'
      )

  def read(self, ids: tf.Tensor) -> tf.Tensor:
    """Returns rows of ids; see `TableShard.read`.

    Raises:
      DataError: if the rows were lost with their server.
    """
    self.check_is_whole()
    return super().read(ids)


class ServerTable(row_table.RowTable, tf.__internal__.tracking.Trackable):
  """A table with a shard on each server.

  Args:
    variable: see `RowTable`.
    initial_rows: makes rows from ids.
    num_servers: on which rows are.
    drained: calls a function when all steps are done.
  """

  def __init__(
    self,
    variable: keras.Variable,
    initial_rows: row_initializers.InitialRows,
    num_servers: int,
    drained: Callable[[Callable], Any],
  ):
    shards = [
      ServerShard(i, variable.path, variable.shape[1], initial_rows)
      for i in range(num_servers)
    ]
    super().__init__(variable, shards)
    variable.value.stays_zero = True
    self._when_drained = drained

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

  def _drained(self, action):
    return self._when_drained(action)

  def _value_of_new(self, slot):
    # Nothing writes the variable: no step must be waited for, and none sends it.
    with tf.init_scope():
      return tf.raw_ops.ReadVariableOp(
        resource=slot.value.handle, dtype=tf.float32
      ).numpy()

  def stored(self, ids, column=row_table.ROWS):
    """Returns a column of some rows, as `RowTable.stored` does."""
    num_bytes = 4 * len(ids) * self._width
    row_updates.warn_of_whole_read(self.variable.path, num_bytes)
    return super().stored(ids, column)

  def _read_shards(self, ids):
    trace = traced_step.current()
    if trace is not None and trace.are_rows_known:
      # The check whether workers may share rows needs operations that it knows. In
      # these each row follows from its id alone.
      return tf.cast(ids, tf.float32)[:, None] * tf.zeros([1, self._width])
    return super()._read_shards(ids)

  def update(self, optimizer, gradient, learning_rate):
    """Updates rows as `RowTable.update`; not in a step on a worker."""
    if traced_step.current() is not None:
      raise errors.UnsupportedOptionError(
        'one that a step on workers does not know, or uses in a branch, in a '
        'loop or before it reads what the optimizer has updated',
        f'an optimizer of dynamic table {self.variable.path!r} that is '
        'applied at the end of the step',
        'pass the optimizer to strategy.step, and apply it last',
      )
    super().update(optimizer, gradient, learning_rate)
