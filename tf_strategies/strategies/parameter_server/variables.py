"""Variables that live on parameter servers."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.keras.tables import row_updates
from tf_strategies.strategies.parameter_server import traced_step


def server_device(server: int) -> str:
  """The device of a parameter server."""
  return f'/job:ps/replica:0/task:{server}/device:CPU:0'


class _Updating(threading.local):
  """The update that the calling thread traces.

  Attributes:
    server: on which it runs.
    copies: variables of other servers, by variable, server and graph. None if nothing
      is applied.
  """

  server: int | None = None
  copies: dict[tuple[int, int, int], tf.Tensor] | None = None


_updating = _Updating()


@contextlib.contextmanager
def applying() -> Iterator[None]:
  """Makes updates share copies: a server gets a variable of another one once."""
  before, _updating.copies = _updating.copies, {}
  try:
    yield
  finally:
    _updating.copies = before


@contextlib.contextmanager
def updating(server: int) -> Iterator[None]:
  """Marks the trace of an update that runs on a server."""
  before, _updating.server = _updating.server, server
  try:
    device = server_device(server)
    with tf.device(device), _tf_internal.UpdateContext(device):
      yield
  finally:
    _updating.server = before


def _is_older(read: tf.Operation) -> bool:
  """Returns whether its variable was written after a read, in the same graph."""
  users = read.inputs[0].consumers()
  written = [op for op in users if op.type not in traced_step.READS]
  if not written:
    return False
  operations = read.graph.get_operations()
  return operations.index(read) < max(map(operations.index, written))


def write_of(variable: tf.Variable, value: Any) -> tuple[str, Any]:
  """Returns the method that assigns a value to a variable, and its argument.

  In a graph, `assign(variable + term)` adds the term, so that what another worker adds
  meanwhile is kept.
  """
  op = None if tf.executing_eagerly() else getattr(value, 'op', None)
  if op is None or op.type not in ('AddV2', 'Add', 'Sub'):
    return 'assign', value
  left, right = op.inputs
  if _is_read(variable, left):
    term = right
  elif op.type != 'Sub' and _is_read(variable, right):
    term = left
  else:
    return 'assign', value
  if term.shape != variable.shape and variable.shape.is_fully_defined():
    term = tf.broadcast_to(term, variable.shape)
  return ('assign_sub' if op.type == 'Sub' else 'assign_add'), term


def _is_read(variable: tf.Variable, tensor: tf.Tensor) -> bool:
  """Returns whether a tensor is a variable, as last read in the graph."""
  while tensor.op.type == 'Identity':
    tensor = tensor.op.inputs[0]
  read = tensor.op
  if read.type != 'ReadVariableOp':
    return False
  handle = tf.compat.v1.get_default_graph().capture(variable.handle)
  return read.inputs[0] is handle and not _is_older(read)


class OnServers:
  """Reads of a variable on one server, or in parts on several.

  The chief's own reads are `drained`: they wait until all scheduled steps are
  done, so that they see the results.

  Attributes:
    parts: the variables that it consists of; itself if it is on one server.
  """

  parts: tuple[ServerVariable, ...]

  @property
  def gives_rows(self) -> bool:
    """Returns whether Keras is to look rows up by `tf.gather` of the variable itself."""
    trace = traced_step.current()
    if trace is None:
      return tf.executing_eagerly()
    return trace.looks_up(self)

  def sparse_read(self, indices, name=None):
    """Gathers rows as `tf.gather`, on their servers; each row is sent once."""
    trace = traced_step.current()
    if trace is None:
      reads_rows = len(self.parts) > 1 and not _tf_internal.traces_to_save()
    else:
      reads_rows = trace.looks_up(self)
    if not reads_rows:
      return self._read(super().sparse_read, indices, name)
    # That rows of the batch are looked up may be all there is to see.
    is_once = trace is None or not trace.are_rows_known
    rows = (self if is_once else self.parts[0]).rows_directly
    read = functools.partial(self._read, rows)
    return row_updates.look_up(self, indices, read, is_once)

  def _read(self, read: Callable[..., tf.Tensor], *args) -> tf.Tensor:
    for part in self.parts:
      part.check_is_whole()
    if not tf.executing_eagerly():
      return read(*args)
    return self.parts[0].drained(lambda: _fetched(read(*args)))


class ServerVariable(OnServers, _tf_internal.ResourceVariable):
  """A variable on one parameter server.

  In a graph, `assign(self + delta)` becomes an atomic addition. The chief's own
  writes are `drained` too. `on_write` is called before a write.

  A variable that is lost with its server is zero until it is assigned. It cannot be
  read meanwhile: no step that reads it can be traced, and steps that were traced
  before refer to the lost variable.
  """

  # Those of lost variables, oldest first. Functions may have captured them.
  old_handles = ()
  is_lost = False
  # Whether the variable is never written, and its value has no meaning, as for a row
  # table.
  stays_zero = False

  def __init__(
    self,
    *,
    server: int,
    drained: Callable[[Callable], Any],
    on_write: Callable[[], None],
    **kwargs,
  ):
    self.server = server
    self.drained, self._on_write = drained, on_write
    with tf.device(server_device(server)):
      super().__init__(**kwargs)
    traced_step.register(self, self.handle)

  @property
  def parts(self) -> tuple[ServerVariable, ...]:
    """Returns the variables that it consists of: itself; see `PartitionedVariable`."""
    return (self,)

  @property
  def stand_in(self) -> ServerVariable:
    """Returns the variable by whose handle a step that is traced knows it."""
    return self

  def split(self, value: Any) -> Sequence[Any]:
    """Returns an argument of an update for each part."""
    return [value]

  def join(self, by_part: Sequence[Any]) -> Any:
    """Returns the gradient that `split` splits."""
    [whole] = by_part
    return whole

  @property
  def is_counter(self) -> bool:
    """Returns whether it is of a metric, which may count from zero again."""
    return self.synchronization == tf.VariableSynchronization.ON_READ

  def check_is_whole(self) -> None:
    """Raises an error if it is lost, and not a counter."""
    if self.is_lost and not self.is_counter:
      raise errors.DataError(
        f'Expected variable {self.name!r} in a checkpoint, got none: it was '
        f'lost with parameter server {self.server}. Fix: assign it; and, '
        'before training, pass its owner to strategy.track(name=owner).'
      )

  def _read_variable_op(self, no_copy=False):
    if tf.executing_eagerly():
      return self._read(super()._read_variable_op, no_copy)
    self.check_is_whole()
    copies, server = _updating.copies, _updating.server
    if copies is None or server in (None, self.server):
      return super()._read_variable_op(no_copy)
    key = id(self), server, id(tf.compat.v1.get_default_graph())
    if key not in copies:
      copies[key] = tf.identity(super()._read_variable_op(no_copy))
    return copies[key]

  def rows_directly(self, numbers: tf.Tensor) -> tf.Tensor:
    """Reads some rows on the server."""
    return tf.raw_ops.ResourceGather(
      resource=self.handle, indices=numbers, dtype=self.dtype
    )

  def read_directly(self) -> tf.Tensor:
    """Reads on the server, now."""
    return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

  def assign(self, value, use_locking=None, name=None, read_value=True):
    """Does the same as `tf.Variable.assign`."""
    method, value = write_of(self, value)
    write = getattr(super(), method)
    return self._write(
      functools.partial(write, value, use_locking, name, read_value)
    )

  def _write(self, write: Callable[[], Any]) -> Any:
    if not tf.executing_eagerly():
      for key in [k for k in _updating.copies or () if k[0] == id(self)]:
        del _updating.copies[key]
      return write()

    def write_now():
      self._on_write()
      self.is_lost = False
      return write()

    return self.drained(write_now)

  def _restore_from_tensors(self, restored_tensors):
    # TensorFlow's assigns past `assign`.
    restore = super()._restore_from_tensors
    return self._write(functools.partial(restore, restored_tensors))

  def gather_nd(self, indices, name=None):
    """Gathers as `tf.gather_nd`, on the server."""
    return self._read(super().gather_nd, indices, name)

  def is_alive(self) -> bool:
    """Returns whether the process that holds the variable is the one it was made in."""
    try:
      with tf.device(self.device):
        return bool(tf.raw_ops.VarIsInitializedOp(resource=self.handle))
    except tf.errors.OpError:
      return False

  def recreate_if_dead(self) -> None:
    """Creates the variable again, as zeros, on a server that was restarted.

    Functions that have captured it need `update_functions`.
    """
    if self.is_alive():
      return
    fresh = zeros_on(self.server, self.shape, self.dtype)
    # The handle alone says which memory of which process this variable is.
    self.old_handles = (*self.old_handles, self._handle)
    self._handle = fresh.handle
    traced_step.register(self, fresh.handle)
    self._handle_owner = fresh
    self.is_lost = not self.stays_zero


def update_functions(variables: Iterable[Any]) -> None:
  """Gives traced functions the present handles of variables.

  A recovery may fail after it has created some variables again, so a function may have
  any of the old handles.
  """
  _tf_internal.replace_captures(
    {id(old): v.handle for v in variables for old in v.old_handles}
  )


def zeros_on(
  server: int, dims: Sequence[int], dtype: tf.DType, **options
) -> tf.Variable:
  """Makes a variable of zeros on a server, as `_tf_internal.on_task` does."""
  device = server_device(server)
  values = np.array(dims, np.int32), np.zeros([], dtype.as_numpy_dtype)
  with _tf_internal.on_task(device, *values) as arguments:
    zeros = tf.fill(*arguments)
  with tf.device(device):
    return _tf_internal.ResourceVariable(zeros, trainable=False, **options)


def _fetched(value: tf.Tensor) -> tf.Tensor:
  """The value in this process: nothing computed from it can fail with a server."""
  with tf.device('/device:CPU:0'):
    return tf.identity(value)


def _checked_write(name: str):
  method = getattr(_tf_internal.ResourceVariable, name)

  @functools.wraps(method)
  def write(self, *args, **kwargs):
    self.check_is_whole()
    # pylint: disable-next=protected-access
    return self._write(functools.partial(method, self, *args, **kwargs))

  return write


for _name in dir(_tf_internal.ResourceVariable):
  if _name.startswith(('assign_', 'scatter_', 'batch_scatter_')):
    setattr(ServerVariable, _name, _checked_write(_name))
