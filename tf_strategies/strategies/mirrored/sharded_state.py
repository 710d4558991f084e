"""Optimizer state of which each replica stores a part (ZeRO, stage 1).

Rajbhandari et al., "ZeRO: memory optimizations toward training trillion
parameter models", SC 2020. An optimizer's state of a variable is cut into equal
pieces, one for each replica. A model's step is traced as if each slot were
whole. The plan (`spmd/plan.py`) then finds that gradients are needed in the
same pieces (a reduce-scatter), and updates as a whole (an all-gather).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal, _tf_internal, errors
from tf_strategies.spmd import kinds, pieces
from tf_strategies.spmd import site as site_lib
from tf_strategies.strategies.mirrored import variable_copies, whole_batch

# Slots with fewer elements stay whole: dividing them would cost more time.
_SHORTEST = 64


class StateShards:
  """Divides the state of a strategy's optimizers among its replicas."""

  def __init__(self, extended):
    self._extended = extended
    # Variables whose slots are divided, by `id`.
    self._divided = weakref.WeakValueDictionary()
    self._warned: set[str] = set()

  @property
  def shard(self) -> kinds.Shard:
    """Shard of a slot that a replica holds."""
    return kinds.Shard(self._extended._num_replicas_in_sync)

  def divides(self, kwargs: dict[str, Any]) -> bool:
    """Returns whether a variable that is about to be made is divided."""
    reference = kwargs.get('colocate_with')
    shape = _keras_internal.initial_shape(kwargs.get('initial_value'))
    return (
      reference is not None
      and shape is not None
      and self.shard.count > 1
      and kwargs.get('trainable') is False
      and tf.TensorShape(shape) == reference.shape
      and tf.TensorShape(shape).num_elements() >= _SHORTEST
    )

  def create(self, kwargs: dict[str, Any], initial_value) -> ShardedVariable:
    """Creates a divided variable. `initial_value` makes the whole value."""
    extended = self._extended
    with tf.init_scope():
      with tf.device('CPU:0'):
        whole = tf.cast(initial_value(), kwargs['dtype'])
      copies = []
      for replica, device in enumerate(extended.worker_devices):
        with tf.device(device):
          piece = pieces.cut(whole, self.shard, extended.places[replica])
          copies.append(
            _tf_internal.create_now(
              initial_value=piece, trainable=False, name=kwargs.get('name')
            )
          )
      variable = ShardedVariable(
        extended, copies, whole.shape, self.shard, kwargs.get('name')
      )
    extended.by_handle[id(variable.handle)] = variable
    self._divided[id(kwargs['colocate_with'])] = kwargs['colocate_with']
    return variable

  def count_of(self, variable) -> int:
    """Returns the number of pieces of an optimizer's state of a model's variable."""
    value = getattr(variable, '_value', variable)
    return self.shard.count if id(value) in self._divided else 1

  def update(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs `extended.update` with divided variables, eagerly.

    It runs once, as on one device, not once per piece. A piece is written from
    the whole old value, which the first of several writes would have changed.
    """
    extended = self._extended
    strategy, devices = extended._container_strategy(), extended.worker_devices
    with whole_batch.one_device(strategy, devices[0]):
      result = fn(*args, **kwargs)
    for variable in tf.nest.flatten([args, kwargs]):
      if isinstance(variable, _tf_internal.MirroredVariable):
        variable_copies.copy_first(variable)
    return result

  def warn(self, optimizer: keras.optimizers.Optimizer) -> None:
    """Warns once of the optimizer state that every replica stores as a whole."""
    whole = [
      v.path
      for v in optimizer.variables
      if not isinstance(v.value, ShardedVariable)
      and v.shape.num_elements() >= _SHORTEST
    ]
    name = type(optimizer).__name__
    if whole and self.shard.count > 1 and name not in self._warned:
      self._warned.add(name)
      logging.warning(
        'shard_optimizer_state=True: every replica has %d variables of %s whole, '
        'which have another shape than those of the model: %s.',
        len(whole),
        name,
        ', '.join(whole[:4]),
      )


class ShardedVariable(_tf_internal.UninitializedVariable):
  """A variable of which each replica stores a piece.

  It has the shape of the whole. A model's step is traced with its handle, which
  has no stored value. Elsewhere, a read gathers the pieces, which is a
  collective on several workers. An assignment writes the pieces of this
  process.

  Attributes:
    values: the pieces of this process, one for each device.
    shard: how the variable is cut.
  """

  def __init__(self, extended, values, shape, shard, name):
    self.values, self.shard = tuple(values), shard
    self._extended = extended
    super().__init__(
      trainable=False,
      shape=shape,
      dtype=values[0].dtype,
      name=name,
      distribute_strategy=extended._container_strategy(),
    )

  def __repr__(self):
    return (
      f'<ShardedVariable {self.name!r} shape={self.shape} '
      f'dtype={self.dtype.name}, {self.shard.count} pieces>'
    )

  def is_initialized(self, name=None):
    """Returns whether its pieces are initialized."""
    return self.values[0].is_initialized(name)

  def _is_traced(self) -> bool:
    """Returns whether a model's step is being traced, where the variable is whole.

    Raises:
      UnsupportedOptionError: if a custom loop uses it.
    """
    if whole_batch.is_active():
      return not tf.executing_eagerly()
    if tf.distribute.has_strategy() and (
      not tf.distribute.in_cross_replica_context()
    ):
      raise loop_error(self.name)
    return False

  def _read_variable_op(self, no_copy=False):
    if self._is_traced():
      return super()._read_variable_op(no_copy)
    site = site_lib.Site('CPU:0', None, 0)
    columns = [[copy.read_value()] for copy in self.values]
    [[whole]] = self._extended.step_exchange().join(
      columns, [self.shape], [site]
    )
    return whole

  def _write(self, method, value, *args, **kwargs):
    """Calls a method of the traced variable, or of each piece with its part."""
    value = tf.convert_to_tensor(value, self.dtype)
    if self._is_traced():
      return getattr(super(), method)(value, *args, **kwargs)
    self.shape.assert_is_compatible_with(value.shape)
    for replica, copy in enumerate(self.values):
      with tf.device(copy.device):
        place = self._extended.places[replica]
        getattr(copy, method)(pieces.cut(value, self.shard, place))
    return self

  # They do the same as those of `tf.Variable`.
  assign = functools.partialmethod(_write, 'assign')
  assign_add = functools.partialmethod(_write, 'assign_add')
  assign_sub = functools.partialmethod(_write, 'assign_sub')

  # Rows of one replica's slices are in the pieces of others, so rows are read and
  # written with the whole variable.

  def sparse_read(self, indices, name=None):
    """Does the same as `tf.Variable.sparse_read`."""
    return tf.gather(self.read_value(), indices, name=name)

  def scatter_update(self, sparse_delta, use_locking=False, name=None):
    """Does the same as `tf.Variable.scatter_update`."""
    rows = sparse_delta.indices[:, None]
    return self.assign(
      tf.tensor_scatter_nd_update(self.read_value(), rows, sparse_delta.values)
    )

  def scatter_add(self, sparse_delta, use_locking=False, name=None):
    """Does the same as `tf.Variable.scatter_add`."""
    return self.assign_add(self._dense(sparse_delta))

  def scatter_sub(self, sparse_delta, use_locking=False, name=None):
    """Does the same as `tf.Variable.scatter_sub`."""
    return self.assign_sub(self._dense(sparse_delta))

  def _dense(self, slices):
    return tf.math.unsorted_segment_sum(
      slices.values, slices.indices, self.shape[0]
    )

  # `tf.train.Checkpoint` saves it as a whole.

  def _serialize_to_tensors(self):
    return {'VARIABLE_VALUE': self.read_value()}

  def _restore_from_tensors(self, restored_tensors):
    return self.assign(restored_tensors['VARIABLE_VALUE'])


def is_among(values: Any) -> bool:
  """Returns whether one of some values is a variable that replicas divide."""
  return any(isinstance(v, ShardedVariable) for v in tf.nest.flatten(values))


def loop_error(what: str) -> errors.UnsupportedOptionError:
  """Returns the error for an update in a loop that calls `strategy.run`."""
  return errors.UnsupportedOptionError(
    f'{what}, of which each replica has a part (shard_optimizer_state=True), in a '
    'loop that calls strategy.run',
    'a step of a model, or of strategy.step',
    'call strategy.step(fn), or leave out shard_optimizer_state',
  )
