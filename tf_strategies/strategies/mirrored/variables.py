"""Distributed variables that stay right under Keras 3.

Keras 3 creates most of its state with aggregation NONE. Under a mirrored
strategy, each replica then writes its own copy, and only the first is saved.
These classes and `creation_policy` define the behavior that each kind of state
needs.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tf_strategies import _keras_internal, _tf_internal, errors
from tf_strategies.cross_device import statistics
from tf_strategies.strategies.mirrored import (
  run_context,
  variable_copies,
  whole_batch,
)


class _Distributed:
  """Adds to TensorFlow's distributed variables the features of `tf.Variable`.

  `tf.train.Checkpoint` restores a variable that is created after `restore` as
  soon as it exists. In a loop, one replica creates it, and `assign` would write
  only this replica's copy. A restored value is therefore written to all copies.
  """

  def _serialize_to_tensors(self):
    return {'VARIABLE_VALUE': self}

  def _restore_from_tensors(self, restored_tensors):
    value = tf.convert_to_tensor(restored_tensors['VARIABLE_VALUE'], self.dtype)
    return self._set_whole(value)

  def _set_whole(self, value):
    """Makes all replicas together hold `value`. Returns an operation in a graph.

    For a sum, the first replica of all gets the whole value and the others
    zero. Dividing it by their number would round it.
    """
    if not variable_copies.is_sum(self):
      return tf.group([copy.assign(value) for copy in self.values])
    extended = self.distribute_strategy.extended
    is_first = extended._get_replica_id_in_sync_group(0) == 0
    total = value if is_first else tf.zeros_like(value)
    return variable_copies.set_copies(self, total)

  def __int__(self):
    return int(self.numpy())

  def __float__(self):
    return float(self.numpy())

  def __complex__(self):
    return complex(self.numpy())


class MirroredVariable(_Distributed, _tf_internal.MirroredVariable):
  """A mirrored variable that control flow may update.

  With aggregation ONLY_FIRST_REPLICA, TensorFlow broadcasts the first replica's
  value in a merge call, which is impossible in a branch of a `tf.cond`. Values
  written with this aggregation, such as Keras's step counter, are equal on
  every replica. Each replica therefore writes its own copy.
  """

  def _update_replica(self, update_fn, value, **kwargs):
    first_only = tf.VariableAggregation.ONLY_FIRST_REPLICA
    extended = self.distribute_strategy.extended
    is_first_only = self.aggregation == first_only
    if extended.is_one_device or (
      is_first_only and not extended._use_merge_call()
    ):
      return update_fn(self._get_on_device_or_primary(), value, **kwargs)
    return super()._update_replica(update_fn, value, **kwargs)

  def _get_cross_replica(self):
    if self.distribute_strategy.extended.is_one_device:
      return self._values[0]  # A copy would add an operation.
    return super()._get_cross_replica()


def _scattered(name: str):
  """Returns a write of some rows, which in a model's step is one device's write."""

  def write(self, *args, **kwargs):
    variable = super(MirroredVariable, self)
    if whole_batch.is_active():
      variable = self._get_on_device_or_primary()
    return getattr(variable, name)(*args, **kwargs)

  write.__name__ = name
  write.__doc__ = f'As `tf.Variable.{name}`.'
  return write


for _name in (
  'batch_scatter_update',
  'scatter_add',
  'scatter_div',
  'scatter_max',
  'scatter_min',
  'scatter_mul',
  'scatter_nd_add',
  'scatter_nd_sub',
  'scatter_nd_update',
  'scatter_sub',
  'scatter_update',
):
  setattr(MirroredVariable, _name, _scattered(_name))


class SeedVariable(MirroredVariable):
  """The state of a Keras seed generator, with different numbers on each replica.

  All copies hold the same state, so one copy is saved and all stay in step. A
  replica adds its number to the seed when it reads the state, and subtracts it
  when it writes the next state. Replica 0 draws the same numbers as one device.
  """

  def _get(self):
    state, offset = super()._get(), self._offset()
    return state if offset is None else state.read_value() + offset

  def value(self):
    """Returns the state, offset by the number of the calling replica."""
    state, offset = super().value(), self._offset()
    return state if offset is None else state + offset

  def assign(self, value, use_locking=False, name=None, read_value=True):
    """Sets the state that follows the one that this replica has read."""
    offset = self._offset()
    if offset is not None:
      value = tf.convert_to_tensor(value, self.dtype) - offset
    return super().assign(value, use_locking, name, read_value)

  def _offset(self):
    """Returns the offset of this replica's seed; None for the first replica."""
    number = whole_batch.stream()
    replica_id = run_context.current_replica_id()
    in_replica = tf.distribute.get_replica_context() and replica_id is not None
    if number == 0 and in_replica:
      extended = self.distribute_strategy.extended
      number = extended._get_replica_id_in_sync_group(replica_id)
    if number == 0:
      return None
    return tf.constant([number * _keras_internal.SEED_STRIDE, 0], self.dtype)


class SyncOnReadVariable(_Distributed, _tf_internal.SyncOnReadVariable):
  """A variable with a separate value on each replica, reduced when read.

  A replica without rows computes on a padding row, which does not count in
  metrics.

  In elastic jobs the variable `holds_whole`: the steps of models write the
  whole sum on every replica, so nothing is lost when a worker leaves.
  """

  holds_whole = False

  def hold_whole(self) -> None:
    """Makes every copy hold the sum from now on. It must still be zero.

    Raises:
      UnsupportedOptionError: if replicas already hold parts of it.
    """
    if not self.holds_whole and self.has_parts():
      raise errors.UnsupportedOptionError(
        f'{self.name!r} in an elastic job, of which a loop with strategy.run '
        'has given each replica a part',
        'a metric that only models update',
        'reset it before fit or evaluate, or use another metric in the loop',
      )
    self.holds_whole = True

  def has_parts(self) -> bool:
    """Returns whether any copy holds more than zero."""
    with tf.init_scope():
      return any(np.any(copy.numpy()) for copy in self.values)

  def assign(self, value, use_locking=False, name=None, read_value=True):
    """Sets this replica's part, or the reduced value outside of replicas."""
    in_replica = (
      tf.distribute.has_strategy()
      and not tf.distribute.in_cross_replica_context()
    )
    if in_replica:
      return super().assign(value, use_locking, name, read_value)
    written = self._set_whole(tf.cast(value, self.dtype))
    return self if read_value else written

  def _get_replica(self, replica_id):
    if (
      whole_batch.is_active()
      and self.distribute_strategy.extended.holds_sums_whole
    ):
      self.hold_whole()
    return super()._get_replica(replica_id)

  def _get_cross_replica(self):
    if self.holds_whole or self.distribute_strategy.extended.is_one_device:
      return self._get_replica(0)
    # A saved model may read it in a function that was traced before.
    with statistics.paused():
      return super()._get_cross_replica()

  def _update_replica(self, update_fn, value, **kwargs):
    sites = run_context.current_sites()
    replica_id = run_context.current_replica_id()
    if self.holds_whole and not whole_batch.is_active():
      raise errors.UnsupportedOptionError(
        f'{self.name!r}, which job.fit and a loop with strategy.run update',
        'a metric that only models, or only loops, update',
        'use another metric in the loop',
      )
    if not sites or replica_id is None:
      return super()._update_replica(update_fn, value, **kwargs)
    local = self._get_on_device_or_primary()

    def update():
      update_fn(local, value, **kwargs)
      return tf.constant(True)

    sites[replica_id].if_real(update, lambda: tf.constant(False))
    return local


def rewrap(variable):
  """Returns TensorFlow's distributed variable as one of the classes here.

  Both hold the same component variables, which then belong to ours.
  """
  ours = {
    _tf_internal.MirroredVariable: MirroredVariable,
    _tf_internal.SyncOnReadVariable: SyncOnReadVariable,
  }.get(type(variable))
  if ours is None:
    return variable
  if _keras_internal.is_seed_state(variable.name, variable.dtype):
    ours = SeedVariable
  return ours(
    variable.distribute_strategy, variable.values, variable.aggregation
  )


def creation_policy(kwargs: dict) -> dict:
  """Returns a variable creator's arguments with the right aggregation.

  Keras 3 asks for no aggregation. Each replica then keeps its own value, and
  the first replica's value is saved. This is right for optimizer slots, which
  get equal updates everywhere. It is wrong for the statistics that layers
  compute from their rows, such as those of BatchNormalization, which must be
  one value: the mean over replicas.
  """
  none = tf.VariableAggregation.NONE, None
  usual = (
    tf.VariableSynchronization.AUTO,
    tf.VariableSynchronization.ON_WRITE,
    None,
  )
  dtype = kwargs.get('dtype')
  if (
    kwargs.get('colocate_with') is None  # No slot.
    and kwargs.get('trainable') is False
    and kwargs.get('aggregation') in none
    and kwargs.get('synchronization') in usual
    and dtype is not None
    and tf.as_dtype(dtype).is_floating
  ):
    return {**kwargs, 'aggregation': tf.VariableAggregation.MEAN}
  return kwargs
