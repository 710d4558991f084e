"""Rows with 64-bit ids, without a vocabulary.

A row is stored when it is first updated. Before that, it is computed from its
id (`dynamic_embedding`), so reading stores nothing. The table also stores the
number of updates and the last update of each row, and the optimizer's state of
the row. A hash of the ids divides a table into shards. Each shard is in the
memory of one process.
"""

from __future__ import annotations

import functools
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_strategies import _keras_internal, _tf_internal, errors
from tf_strategies.keras.tables import dynamic_embedding, row_updates

# Columns beside a row: the number of steps that updated it, and the optimizer's step of the last one.
# As float32 they stop counting above 16 million.
_USES, _STEP = 0, 1
_USAGE = 2
# Keys of the columns of a table, besides its slots.
IDS, ROWS = 'ids', 'rows'

# Updates rows and slots, by column, with the gradient of the rows.
_Rule = Callable[[dict[str, Any], tf.IndexedSlices], None]


class TableShard:
  """Some rows of a table, in the memory of one device.

  A server that dies loses its rows (`is_lost`) until rows are loaded again.

  Args:
    width: the length of a row.
    initial_rows: makes rows from ids.
    device: the device that holds the rows.
  """

  def __init__(
    self,
    width: int,
    initial_rows: dynamic_embedding.InitialRows,
    device: str = '/device:CPU:0',
  ):
    self.device = device
    self.is_lost = False
    self._width = width
    self._initial_rows = initial_rows
    # A hash table for the rows, and one for each slot.
    self._columns: dict[str, Any] = {ROWS: None}
    self._make()

  def _make(self) -> None:
    self.key = f'rows_{uuid.uuid4().hex}'  # Name of its lock.
    self._columns = {name: self._new(name) for name in self._columns}
    with tf.device(self.device):
      self._mutex = tf.raw_ops.MutexV2(container='', shared_name=self.key)

  def _new(self, column: str) -> tf.lookup.experimental.MutableHashTable:
    with tf.init_scope(), tf.device(self.device):
      return tf.lookup.experimental.MutableHashTable(
        *(tf.int64, tf.float32, tf.zeros([self._length(column)])),
        experimental_is_anonymous=True,
      )

  def _length(self, column: str) -> int:
    # Beside a row is its usage, and beside its slot whether it was ever updated.
    return self._width + (_USAGE if column == ROWS else 1)

  def make_slots(self, names: Sequence[str]) -> None:
    """Keeps these slots beside the rows, and drops all others."""
    self._columns = {
      n: self._columns.get(n) or self._new(n) for n in (ROWS, *names)
    }

  def read(self, ids: tf.Tensor) -> tf.Tensor:
    """Returns rows [n, width] of ids [n]; stores nothing."""
    with tf.device(self.device):
      rows, _ = self._find(ids)
    return rows

  def _find(self, ids):
    """Returns rows and their usage, which is zero for rows that are not stored."""
    rows, usage = self._lookup(ROWS, ids)
    missing = tf.where(tf.equal(usage[:, _USES], 0))
    initial = self._initial_rows(tf.gather(ids, missing[:, 0]))
    return tf.tensor_scatter_nd_update(rows, missing, initial), usage

  def _lookup(self, column, ids):
    """Returns a column's values for ids, and the values beside them; zeros for new ids."""
    found = self._columns[column].lookup(ids)
    found = tf.ensure_shape(found, [None, self._length(column)])
    return found[:, : self._width], found[:, self._width :]

  def update(
    self,
    ids: tf.Tensor,
    gradients: tf.Tensor,
    step: tf.Tensor,
    rule: _Rule,
    initial_slots: dict[str, tf.Tensor],
  ) -> None:
    """Applies gradients [n, width] to the rows of ids [n], which may repeat."""
    with tf.device(self.device):
      lock = tf.raw_ops.MutexLock(mutex=self._mutex)
      with tf.control_dependencies([lock]):
        ids, places = tf.unique(ids, tf.int64)
        rows, usage = self._find(ids)
        uses = usage[:, _USES] + 1.0
        beside = {ROWS: tf.stack([uses, tf.fill(tf.shape(uses), step)], 1)}
        state = {ROWS: _keras_internal.RowValues(rows)}
        for name, initial in initial_slots.items():
          values, is_there = self._lookup(name, ids)
          values = tf.where(is_there > 0, values, initial)
          state[name] = _keras_internal.RowValues(values)
          beside[name] = tf.ones_like(is_there)
        shape = tf.stack([tf.size(ids, tf.int64), self._width])
        rule(state, tf.IndexedSlices(gradients, places, shape))
        values = {
          name: tf.concat([each.tensor, beside[name]], 1)
          for name, each in state.items()
        }
        written = self.store(ids, values)
      with tf.control_dependencies(written):
        tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)

  @property
  def tracked(self) -> Any:
    """Returns the resources that TensorFlow saves with a function that reads rows."""
    return self._columns[ROWS]

  def size(self) -> int:
    """Returns the number of stored rows."""
    with tf.device(self.device):
      return int(self._columns[ROWS].size())

  def stored(self) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns all ids, in any order, and their rows with usage, on the device."""
    with tf.device(self.device):
      return self._columns[ROWS].export()

  def stored_of(self, ids: tf.Tensor, column: str = ROWS) -> tf.Tensor:
    """Returns rows with usage, or a slot of rows and whether it was ever updated."""
    with tf.device(self.device):
      return self._columns[column].lookup(ids)

  def clear(self) -> None:
    """Removes all rows and their slots."""
    with tf.device(self.device):
      for column, table in self._columns.items():
        tf.raw_ops.LookupTableImportV2(
          table_handle=table.resource_handle,
          keys=tf.zeros([0], tf.int64),
          values=tf.zeros([0, self._length(column)]),
        )

  def store(
    self, ids: tf.Tensor, values: dict[str, tf.Tensor]
  ) -> list[tf.Operation]:
    """Stores rows or slots, and returns the operations that store them.

    Args:
      ids: ids without repetition.
      values: values by column, as `stored_of` returns them.
    """
    with tf.device(self.device):
      return [self._columns[c].insert(ids, v) for c, v in values.items()]

  def newest_step(self) -> float:
    """Returns the step of the newest update."""
    with tf.device(self.device):
      _, values = self.stored()
      steps = values[:, self._width + _STEP]
      return float(tf.reduce_max(tf.concat([steps, [0.0]], 0)))

  def remove(self, min_uses: float, since: float) -> int:
    """Removes rows with fewer uses and no use since a step. Returns their number."""
    with tf.device(self.device):
      ids, values = self.stored()
      is_rare = values[:, self._width + _USES] < min_uses
      is_old = values[:, self._width + _STEP] < since
      gone = tf.boolean_mask(ids, is_rare & is_old)
      for table in self._columns.values():
        table.remove(gone)
      return int(tf.size(gone))


class Column:
  """A part of a table's state, which is saved and loaded like a variable.

  Args:
    table: the table.
    key: `IDS`, `ROWS` or a slot.
    width: the length of a row of this part; None for numbers.
  """

  def __init__(self, table: RowTable, key: str, width: int | None):
    self.table, self.key = table, key
    self.path = f'{table.variable.path}/{key}'
    self.shape = (None,) if width is None else (None, width)
    self.dtype = 'int64' if width is None else 'float32'

  def numpy(self) -> np.ndarray:
    """Returns the part of all rows, sorted by ids."""
    ids = self.table.ids()
    return ids if self.key == IDS else self.table.stored(ids, self.key)

  def assign(self, values: np.ndarray) -> None:
    """Assigns the value that `numpy` returned. The ids must be assigned first."""
    ids = self.table.loaded
    if self.key == IDS:
      self.table.load_ids(values)
      return
    if len(ids) != len(values):
      raise errors.CheckpointMismatchError(
        f'Expected as many rows of {self.path!r} as ids, got '
        f'{len(values)} rows and {len(ids)} ids. Fix: load what was saved '
        'together.'
      )
    self.table.load(values, self.key)


class RowTable:
  """The rows that a variable represents.

  The variable is trainable and has the shape of one row. Keras therefore
  computes gradients for it. Optimizers create state for it, whose value is the
  state of a new row.

  Args:
    variable: the variable that represents the rows.
    shards: the parts of the table.
    drained: calls a function when no step is running.
  """

  def __init__(
    self,
    variable: keras.Variable,
    shards: Sequence[TableShard],
    drained: Callable[[Callable[[], Any]], Any] = lambda action: action(),
  ):
    self.variable = variable
    self.shards = tuple(shards)
    self._drained = drained
    self.expired = 0
    self.slots: tuple[str, ...] = ()
    self._width = variable.shape[1]
    # The optimizer that owns the slots; None for slots that were loaded.
    self._optimizer: weakref.ref | None = None
    self.earlier = weakref.WeakSet()  # Optimizers that owned slots before.
    self.loaded = np.zeros([0], np.int64)

  def _value_of_new(self, slot: keras.Variable) -> tf.Tensor:
    """Returns the value of a slot for a new row, which the slot's variable keeps."""
    return keras.ops.convert_to_tensor(slot)

  # Steps.

  def read(self, ids: tf.Tensor) -> tf.Tensor:
    """Returns the rows of ids. Gradient tapes record a read of the variable."""
    return row_updates.look_up(self.variable.value, ids, self._read)

  def _read(self, ids):
    reads = [shard.read for shard in self.shards]
    gather = functools.partial(row_updates.gather, ids, self.owner(ids), reads)
    return self._drained(gather) if tf.executing_eagerly() else gather()

  def owner(self, ids: tf.Tensor) -> tf.Tensor:
    """Returns the number of the shard of each id."""
    return dynamic_embedding.owner(ids, len(self.shards))

  def update(
    self,
    optimizer: keras.optimizers.Optimizer,
    gradient: tf.IndexedSlices,
    learning_rate: Any,
  ) -> None:
    """Updates rows by an optimizer's rule, on the devices that hold them.

    Args:
      optimizer: the optimizer.
      gradient: its indices are ids.
      learning_rate: the learning rate of this step.
    """
    slots = _keras_internal.slots_of(optimizer, self.variable)
    self.adopt(optimizer, slots)
    names = {a: row_updates.slot_name(optimizer, a) for a in slots}
    initial = {names[a]: self._value_of_new(v) for a, v in slots.items()}

    def rule(state, gradient):
      if row_updates.is_lazy(optimizer):
        # The rule gets exactly the rows of the gradient.
        gradient = tf.convert_to_tensor(gradient)
      rows = state[ROWS]
      own = {attribute: state[name] for attribute, name in names.items()}
      with _keras_internal.in_place_of(self.variable, optimizer, rows, own):
        optimizer.update_step(gradient, rows, learning_rate)

    if row_updates.takes_sums(optimizer):
      # Sums equal rows before they are sent.
      gradient = row_updates.summed(gradient)
    ids, values = gradient.indices, gradient.values
    divided = row_updates.divide(self.owner(ids), len(self.shards), ids, values)
    step = keras.ops.cast(optimizer.iterations, 'float32')
    for shard, (ids, values) in zip(self.shards, divided, strict=True):
      shard.update(ids, values, step, rule, initial)

  def adopt(self, optimizer: keras.optimizers.Optimizer, slots) -> None:
    """Creates the slots of an optimizer, and drops the slots of an earlier one."""
    before = self._optimizer and self._optimizer()
    if self._optimizer is not None and before is not optimizer:
      if optimizer in self.earlier:
        raise errors.UnsupportedOptionError(
          f'{optimizer.name!r} after another one',
          f'one optimizer for the rows of {self.variable.path!r}',
          'train the table by one optimizer, or go on with a new one. The state '
          'of the first is gone',
        )
      self.earlier |= {before} - {None}
      self._make_slots(())
    self._optimizer = weakref.ref(optimizer)
    self._make_slots([row_updates.slot_name(optimizer, a) for a in slots])

  def _make_slots(self, names) -> None:
    self.slots = tuple(names)
    for shard in self.shards:
      shard.make_slots(names)

  # Operations on the whole table.

  def report(self) -> dict[str, Any]:
    """Returns the number of rows, in total and by shard, and of expired rows."""
    rows = self._drained(lambda: [s.size() for s in self.shards])
    return {'rows': sum(rows), 'by_shard': rows, 'expired': self.expired}

  def usage(self) -> dict[str, np.ndarray]:
    """See `DynamicEmbedding.usage`."""
    ids = self.ids()
    usage = self.stored(ids)[:, self._width :].astype(np.int64)
    return {'ids': ids, 'uses': usage[:, _USES], 'steps': usage[:, _STEP]}

  def expire(self, max_age: int | None, min_uses: int | None) -> int:
    """See `DynamicEmbedding.expire`."""

    def remove():
      since = np.inf
      if max_age is not None:
        since = max(s.newest_step() for s in self.shards) - max_age
      uses = np.inf if min_uses is None else min_uses
      return sum(s.remove(uses, since) for s in self.shards)

    expired = self._drained(remove)
    self.expired += expired
    return expired

  def columns(self) -> list[Column]:
    """Returns the columns of the table without the slots, in the order to load."""
    return [Column(self, IDS, None), Column(self, ROWS, self._width + _USAGE)]

  def slot_columns(self) -> list[Column]:
    """Returns the optimizer's state of the rows, which is loaded after `columns`."""
    return [Column(self, slot, self._width + 1) for slot in self.slots]

  def load_slots(self, names: Sequence[str]) -> list[Column]:
    """Creates slots that were saved, and returns their columns."""
    self._optimizer = None
    self.earlier.clear()
    self._make_slots(names)
    return self.slot_columns()

  def ids(self) -> np.ndarray:
    """Returns the ids of all stored rows, sorted."""
    ids = self._drained(lambda: [s.stored()[0].numpy() for s in self.shards])
    return np.sort(np.concatenate(ids))

  def stored(self, ids: np.ndarray, column: str = ROWS) -> np.ndarray:
    """Returns a column of the rows of some ids."""
    usage = _USAGE if column == ROWS else 1
    found = np.zeros([len(ids), self._width + usage], np.float32)

    def read():
      for shard, mine in self.shares(ids):
        found[mine] = shard.stored_of(tf.constant(ids[mine]), column).numpy()

    self._drained(read)
    return found

  def load_ids(self, ids: np.ndarray) -> None:
    """Clears the table; the rows that are loaded next belong to these ids."""
    self.loaded = np.asarray(ids, np.int64)

    def clear():
      for shard in self.shards:
        shard.clear()
        shard.is_lost = False

    self._drained(clear)

  def load(self, values: np.ndarray, column: str, first: int = 0) -> None:
    """Stores some rows of a column, from row `first` on, by the ids loaded last."""
    values = np.asarray(values, np.float32)
    ids = self.loaded[first : first + len(values)]

    def write():
      for shard, mine in self.shares(ids):
        some_ids, some = _tf_internal.on_host(ids[mine], values[mine])
        shard.store(some_ids, {column: some})

    self._drained(write)

  def shares(self, ids: np.ndarray) -> list[tuple[TableShard, np.ndarray]]:
    """Returns each shard, with a mask of the ids that belong to it."""
    owner = self.owner(tf.constant(ids, tf.int64)).numpy()
    return [(s, owner == i) for i, s in enumerate(self.shards)]
