"""Which rows of a table have been written since they were saved as a whole."""

from __future__ import annotations

import tensorflow as tf

from tf_strategies import _tf_internal


class ChangedRows:
  """Marks of the rows of one variable, on its server.

  A mark is set in the call that writes the row, so it costs no message. After the
  marks of rows comes one that means all of them.
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
    """How many rows were written."""
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
