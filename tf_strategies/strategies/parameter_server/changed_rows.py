"""Which rows of a table have been written since they were saved as a whole.

A mark is set in the call that writes the row, so it costs no message.
"""

from __future__ import annotations

import math

import tensorflow as tf

from tf_strategies import _tf_internal


class ChangedRows:
  """Marks of the rows of one variable, on its server.

  After the marks of rows comes one that means all of them.
  """

  def __init__(self, rows: int, device: str):
    self._rows = rows
    self._device = device
    with tf.init_scope(), tf.device(device), _tf_internal.no_colocation():
      # Nobody has saved it.
      self._marks = _tf_internal.ResourceVariable(
        tf.ones([rows + 1], tf.bool), trainable=False, dtype=tf.bool
      )

  def note(self, rows: tf.Tensor | None) -> None:
    """On the server: these rows are written, or all."""
    self._scatter(self._rows if rows is None else tf.reshape(rows, [-1]), True)

  def _scatter(self, rows, value: bool) -> None:
    tf.raw_ops.ResourceScatterUpdate(
      resource=self._marks.handle, indices=rows, updates=tf.constant(value)
    )

  def count(self) -> int:
    """Returns how many rows were written."""
    with tf.device(self._device):
      marks = self._marks.read_value()
      return int(tf.math.count_nonzero(marks[:-1] | marks[-1]))

  def numbers(self) -> tf.Tensor:
    """The numbers of the rows that were written, on the server, in order."""
    with tf.device(self._device):
      marks = self._marks.read_value()
      return tf.where(marks[:-1] | marks[-1])[:, 0]

  def forget(self) -> None:
    """All rows were saved."""
    with tf.device(self._device):
      self._marks.assign(tf.zeros([self._rows + 1], tf.bool), read_value=False)


class ChangedIds:
  """Marks of the rows of a table without a vocabulary, on one server.

  Nothing is marked before all rows were saved, since all are to be: so the ids
  cost memory only where they save writing the others.
  """

  def __init__(self, device: str):
    self._device = device
    with tf.init_scope(), tf.device(device), _tf_internal.no_colocation():
      # 1 once all rows were saved, and 0 before.
      self._are_noted = _tf_internal.ResourceVariable(
        tf.constant(0), trainable=False, dtype=tf.int32
      )
      self._ids = tf.lookup.experimental.MutableHashTable(
        tf.int64,
        tf.int64,
        tf.constant(0, tf.int64),
        experimental_is_anonymous=True,
      )

  def note(self, ids: tf.Tensor) -> tf.Operation | None:
    """On the server: the rows of these ids are written, or removed."""
    are_noted = tf.raw_ops.ReadVariableOp(
      resource=self._are_noted.handle, dtype=tf.int32
    )
    count = tf.size(ids) * are_noted
    return self._ids.insert(ids[:count], ids[:count])

  def note_all(self) -> None:
    """All rows are others."""
    self._begin(0)

  def forget(self) -> None:
    """All rows were saved."""
    self._begin(1)

  def _begin(self, are_noted: int) -> None:
    with tf.init_scope(), tf.device(self._device):
      nothing = tf.zeros([0], tf.int64)
      tf.raw_ops.LookupTableImportV2(
        table_handle=self._ids.resource_handle, keys=nothing, values=nothing
      )
      self._are_noted.assign(are_noted, read_value=False)

  def count(self) -> float:
    """Returns how many rows were written; infinity for all."""
    with tf.device(self._device):
      if not int(self._are_noted.read_value()):
        return math.inf
      return int(self._ids.size())

  def ids(self) -> tf.Tensor:
    """The ids of the rows that were written, on the server."""
    with tf.device(self._device):
      return self._ids.export()[0]
