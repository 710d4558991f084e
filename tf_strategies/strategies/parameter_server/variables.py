"""Variables that live on parameter servers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.keras import row_updates
from tf_strategies.strategies.parameter_server import (
  step_access,
  traced_step,
)


def server_device(server: int) -> str:
  """The device of a parameter server."""
  return f'/job:ps/replica:0/task:{server}/device:CPU:0'


class ServerVariable(_tf_internal.ResourceVariable):
  """A variable on one parameter server.

  In a step that is being traced, `TracedStep` defines its reads and writes. Elsewhere
  in a graph, `assign(self + delta)` becomes an atomic addition. The coordinator's
  own reads and writes are `drained`: they wait until all scheduled steps are done, so
  that they see the results. `on_write` is called before a write.

  A variable that is lost with its server is zero until it is assigned. It cannot be
  read meanwhile: no step that reads it can be traced, and steps that were traced
  before refer to the lost variable.
  """

  def __init__(
    self,
    *,
    server: int,
    drained: Callable[[Callable], Any] | None = None,
    on_write: Callable[[], None] | None = None,
    **kwargs,
  ):
    self.server = server
    self.is_lost = False
    self.is_part = False  # Of a partitioned variable.
    # Whether the variable is never written, and its value has no meaning, as
    # for a row table.
    self.stays_zero = False
    # How many operations a graph had when it was written there last.
    self._written_at = weakref.WeakKeyDictionary()
    self._drained = drained or (lambda action: action())
    self._on_write = on_write or (lambda: None)
    with tf.device(server_device(server)):
      super().__init__(**kwargs)
    # With the layer that it is of, if that is known.
    self.full_name = self.name

  @property
  def is_counter(self) -> bool:
    """Returns whether it is of a metric, which may count from zero again."""
    return self.synchronization == tf.VariableSynchronization.ON_READ

  def check_is_whole(self) -> None:
    """Raises an error if it is lost, and not a counter."""
    if self.is_lost and not self.is_counter:
      raise errors.DataError(
        f'variable {self.name!r} was lost with parameter server {self.server} and '
        'is not in the checkpoints. Expected a value. Fix: assign one; and, before '
        'training, pass its owner to strategy.track(name=owner).'
      )

  def _read_variable_op(self, no_copy=False):
    self.check_is_whole()
    step = traced_step.current()
    if step is not None:
      copy = step.read(self)
      if copy is not None:
        with step.at_home(copy):
          return _tf_internal.read_from_copy(self, copy)
    elif tf.executing_eagerly():
      if not self.is_part:
        num_bytes = self.shape.num_elements() * self.dtype.size
        row_updates.warn_of_whole_read(self.full_name, num_bytes)
      read = super()._read_variable_op
      return self._drained(lambda: _fetched(read(no_copy)))
    return super()._read_variable_op(no_copy)

  def rows_directly(self, numbers: tf.Tensor) -> tf.Tensor:
    """Reads some rows on the server."""
    return tf.raw_ops.ResourceGather(
      resource=self.handle, indices=numbers, dtype=self.dtype
    )

  def write_rows_directly(self, first: int, rows: tf.Tensor) -> None:
    """Writes rows from number `first` on, on the server."""
    with tf.device(self.device):
      numbers = tf.range(first, first + rows.shape[0], dtype=tf.int64)
      tf.raw_ops.ResourceScatterUpdate(
        resource=self.handle, indices=numbers, updates=rows
      )

  def _write_drained(self, write):
    """Writes for the coordinator, after the steps that it has scheduled."""

    def write_now():
      self._on_write()
      self.is_lost = False
      return write()

    return self._drained(write_now)

  def _write_in_unit(self, step, write: Callable[[], Any]) -> Any:
    """Writes on the server, as one unit of a step; returns the write's result."""
    results = []
    self.note_written()

    def write_here():
      with tf.device(self.device):
        results.append(write())
      return results[-1]

    result = step.on_server(self.server, write_here)
    if result is results[-1]:
      return result
    # That is of another graph. Reads of the variable come after the write.
    return self if isinstance(results[-1], tf.Variable) else result

  def read_directly(self) -> tf.Tensor:
    """Reads on the server, whatever a step holds."""
    return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

  def write_directly(self, value, delta) -> tf.Operation:
    """Assigns `value`, or adds `delta` if there is one, on the server."""
    if delta is not None:
      return super().assign_add(tf.cast(delta, self.dtype), read_value=False)
    return super().assign(value, read_value=False)

  def assign(self, value, use_locking=None, name=None, read_value=True):
    """Does the same as `tf.Variable.assign`."""
    step = traced_step.current()
    if step is not None:
      value = tf.convert_to_tensor(value, self.dtype)
      if step.write(self, value):
        return step.read(self)
    method, options = super().assign, (use_locking, name, read_value)
    delta = None if tf.executing_eagerly() else self.addition_of(value)
    if delta is not None:  # What another worker adds meanwhile is kept.
      if value.op.type == 'Sub':
        # Without a pass over it that changes its sign.
        method, value = super().assign_sub, delta.op.inputs[0]
      else:
        method, value = super().assign_add, delta
      if value.shape != self.shape and self.shape.is_fully_defined():
        value = tf.broadcast_to(value, self.shape)
    write = functools.partial(method, value, *options)
    if step is not None:
      return self._write_in_unit(step, write)
    elif tf.executing_eagerly():
      return self._write_drained(write)
    self.note_written()
    return write()

  def note_written(self) -> None:
    """Notes, in a graph, that reads before this have an old value."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
      self._written_at[graph] = len(graph.get_operations())
      graph = getattr(graph, 'outer_graph', None)

  def _is_older(self, read: tf.Operation) -> bool:
    """Returns whether it was written after this read of it."""
    count = self._written_at.get(read.graph, 0)
    return count > 0 and read in read.graph.get_operations()[:count]

  def addition_of(self, value) -> tf.Tensor | None:
    """Returns the term that `value` adds to this variable, as last read in a graph."""
    if not tf.is_tensor(value) or not hasattr(value, 'op'):
      return None
    if value.op.type not in ('AddV2', 'Add', 'Sub'):
      return None
    for old in value.op.inputs:
      read = step_access.origin(old)
      if read.op.type != 'ReadVariableOp':
        continue
      handle = tf.compat.v1.get_default_graph().capture(self.handle)
      if read.op.inputs[0] is handle and not self._is_older(read.op):
        return step_access.additive_delta(value, old)
    return None

  def assign_add(self, delta, use_locking=None, name=None, read_value=True):
    """Does the same as `tf.Variable.assign_add`; atomic on a server."""
    return self._add(super().assign_add, delta, 1, name, read_value)

  def assign_sub(self, delta, use_locking=None, name=None, read_value=True):
    """Does the same as `tf.Variable.assign_sub`; atomic on a server."""
    return self._add(super().assign_sub, delta, -1, name, read_value)

  def _add(self, write, delta, sign, name, read_value):
    self.check_is_whole()
    options = {'name': name, 'read_value': read_value}
    step = traced_step.current()
    if step is not None:
      delta = tf.convert_to_tensor(delta, self.dtype)
      if step.write(self, None, sign * delta):
        return step.read(self)
    add = functools.partial(write, delta, **options)
    if step is not None:
      return self._write_in_unit(step, add)
    elif tf.executing_eagerly():
      return self._write_drained(add)
    self.note_written()
    return add()

  def _restore_from_tensors(self, restored_tensors):
    # TensorFlow's assigns past `assign`.
    restore = super()._restore_from_tensors
    write = functools.partial(restore, restored_tensors)
    return self._write_drained(write) if tf.executing_eagerly() else write()

  @property
  def gives_rows(self) -> bool:
    """Returns whether Keras is to look rows up by `tf.gather` of the variable itself."""
    return gives_rows()

  def sparse_read(self, indices, name=None):
    """Gathers rows as `tf.gather`, on the server; each row is sent once."""
    step = traced_step.current()
    if step is None or not step.looks_up:
      return self.rows_at(indices, name)
    return look_up(self, indices, self.rows_at, reads_once=not step.looks_only)

  def rows_at(self, indices, name=None):
    """Gathers rows as `tf.gather`, on the server, one for each index."""
    return self._read_rows(super().sparse_read, tf.gather, indices, name)

  def gather_nd(self, indices, name=None):
    """Gathers as `tf.gather_nd`, on the server."""
    return self._read_rows(super().gather_nd, tf.gather_nd, indices, name)

  def _read_rows(self, read, gather, indices, name):
    copy = self._touch_rows(writes=False)
    if copy is not None:
      with traced_step.current().at_home(copy):
        value = _tf_internal.read_from_copy(self, copy)
      return gather(value, indices)
    if tf.executing_eagerly():
      return self._drained(lambda: _fetched(read(indices, name)))
    return read(indices, name)

  def _touch_rows(self, writes: bool):
    """Prepares an op on some rows; returns a value that only the step has, if any."""
    self.check_is_whole()
    step = traced_step.current()
    return None if step is None else step.touch_rows(self, writes)

  def is_alive(self) -> bool:
    """Returns whether the process that holds the variable is the one it was made in."""
    try:
      with tf.device(self.device):
        return bool(tf.raw_ops.VarIsInitializedOp(resource=self.handle))
    except tf.errors.OpError:
      return False

  def recreate_if_dead(self) -> bool:
    """Creates the variable again, as zeros, on a server that was restarted.

    Returns whether the variable has lost its value.
    """
    if self.is_alive():
      return False
    device = server_device(self.server)
    zeros = zeros_on(device, self.shape, self.dtype)
    with tf.device(device):
      fresh = _tf_internal.ResourceVariable(
        zeros, trainable=False, dtype=self.dtype
      )
    # The handle alone says which memory of which process this variable is.
    _tf_internal.replace_handle(self, fresh.handle)
    self._handle_owner = fresh
    self.is_lost = not self.stays_zero
    return self.is_lost


def zeros_on(device: str, shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
  """Makes zeros on a server, as `_tf_internal.on_task` does."""
  zero = np.zeros([], dtype.as_numpy_dtype)
  dims = np.array(shape, np.int32)
  with _tf_internal.on_task(device, dims, zero) as arguments:
    return tf.fill(*arguments)


def gives_rows() -> bool:
  """Returns whether the caller may look up single rows of a table.

  Loops and branches of a step take the whole table from outside, since the gradient of
  a loop reaches only tensors that come from outside.
  """
  step = traced_step.current()
  if step is None:
    return tf.executing_eagerly()
  return step.looks_up


def look_up(
  variable: tf.Variable,
  indices: tf.Tensor,
  read: Callable[[tf.Tensor], tf.Tensor],
  reads_once: bool,
) -> tf.Tensor:
  """Gathers rows as `tf.gather(variable, indices)`; `read` gets them from servers.

  If it `reads_once`, a row with several indices is sent once. The gradient keeps the
  indices apart as on one device, since most of Keras's optimizers treat two gradients
  differently from their sum.
  """
  indices = tf.convert_to_tensor(indices)
  with _tf_internal.stop_recording():
    if reads_once:
      found, places = tf.unique(tf.reshape(indices, [-1]))
      value = tf.gather(read(found), tf.reshape(places, tf.shape(indices)))
      value.set_shape(indices.shape.concatenate(variable.shape[1:]))
    else:
      value = read(indices)
  _tf_internal.record_read(
    variable, value, lambda dy: _gradient_of_rows(variable, dy, indices)
  )
  return value


def _gradient_of_rows(variable, dy, indices):
  return tf.IndexedSlices(
    tf.reshape(dy, [-1, *variable.shape[1:].as_list()]),
    tf.reshape(indices, [-1]),
    tf.constant(variable.shape.as_list(), indices.dtype),
  )


def _fetched(value: tf.Tensor) -> tf.Tensor:
  """The value in this process: nothing computed from it can fail with a server."""
  with tf.device('/device:CPU:0'):
    return tf.identity(value)


def _sparse_write(name: str):
  method = getattr(_tf_internal.ResourceVariable, name)

  def write(self, *args, **kwargs):
    # pylint: disable=protected-access
    self._touch_rows(writes=True)
    write_rows = functools.partial(method, self, *args, **kwargs)
    if tf.executing_eagerly():
      return self._write_drained(write_rows)
    step = traced_step.current()
    if step is None:
      self.note_written()
      return write_rows()
    return self._write_in_unit(step, write_rows)

  write.__name__ = name
  write.__doc__ = method.__doc__
  return write


for _name in (
  'scatter_add',
  'scatter_sub',
  'scatter_mul',
  'scatter_div',
  'scatter_min',
  'scatter_max',
  'scatter_update',
  'batch_scatter_update',
  'scatter_nd_add',
  'scatter_nd_sub',
  'scatter_nd_update',
  'scatter_nd_min',
  'scatter_nd_max',
):
  setattr(ServerVariable, _name, _sparse_write(_name))
