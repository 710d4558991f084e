"""`RingMirroredStrategy`: synchronous replicas on the devices of one host."""

from __future__ import annotations

import tensorflow as tf

from tf_strategies import _tf_internal, cross_device, errors
from tf_strategies.strategies.mirrored import devices as devices_lib
from tf_strategies.strategies.mirrored import extended as extended_lib


class ExactStrategy:
  """Mixed into a `tf.distribute.Strategy` on an `ExactMirroredExtended`."""

  @property
  def cross_device_ops(self) -> tf.distribute.CrossDeviceOps:
    """The op that every reduction of this strategy goes through."""
    return self.extended.cross_device_ops

  def communication_report(self) -> dict[str, object]:
    """What was communicated so far, counted by the graph as it ran.

    Returns:
      `cross_device_ops` (its class), `calls` of each kind, among them
      `all_reduce_in_control_flow` for those that TensorFlow's collectives did
      inside a branch, and `all_reduce_bytes_in` and `reduce_bytes_in`, bytes
      received by each device.
    """
    report = {'cross_device_ops': type(self.cross_device_ops).__name__}
    if isinstance(self.cross_device_ops, cross_device.ScheduledAllReduce):
      report = self.cross_device_ops.report()
    calls = dict(report.get('calls', {}))
    calls['all_reduce_in_control_flow'] = (
      self.extended.all_reduces_in_control_flow
    )
    return {**report, 'calls': calls}

  def reduce(self, reduce_op, value, axis):
    """Reduces `value` across replicas; see `tf.distribute.Strategy.reduce`.

    Keras reduces the first batch, a whole structure, to learn its shapes. Its
    replicas may have different numbers of rows, of which there is no mean: it
    then gets the first replica's part.
    """
    if axis is None and is_uneven_structure(value):
      return tf.nest.map_structure(
        lambda v: self.experimental_local_results(v)[0], value
      )
    return super().reduce(reduce_op, value, axis)


class RingMirroredStrategy(ExactStrategy, tf.distribute.MirroredStrategy):
  """Mirrored training on the devices of one host, over a ring, exactly.

  What it changes beside `tf.distribute.MirroredStrategy`:

  * Every reduction, broadcast and gather goes through `cross_device_ops`: none
    falls back to TensorFlow's own because it is int32 or its destination is a
    CPU. Virtual GPUs work, since no NCCL is needed.
  * `gradient_accumulation_steps`, EMA with `ema_overwrite_frequency` and
    dynamic loss scaling work under Keras 3: synchronisation inside a
    `tf.cond` uses TensorFlow's collectives, and all replicas agree whether
    gradients are finite.
  * Moving statistics of BatchNormalization are one mean value everywhere.
  * A replica without rows in the last batch contributes nothing, instead of
    NaN.
  * An optimizer option that is wrong without `tfs.keras.DistributedOptimizer`
    raises an error.

  Example:

    >>> import tensorflow as tf
    >>> strategy = RingMirroredStrategy(['CPU:0'])
    >>> with strategy.scope():
    ...   model = tf.keras.Sequential([tf.keras.Input([3]),
    ...                                tf.keras.layers.Dense(1)])
    ...   model.compile('sgd', 'mse')
    >>> history = model.fit(tf.ones([8, 3]), tf.ones([8, 1]), verbose=0)

  Args:
    devices: device names such as 'GPU:0'; None means all GPUs, or all logical
      CPUs where there is no GPU.
    cross_device_ops: how values are reduced between devices; default
      `RingAllReduce()`.

  Raises:
    UnsupportedOptionError: a device that is not there or listed twice, or a
      `cross_device_ops` that is none.
  """

  def __init__(
    self,
    devices=None,
    cross_device_ops: tf.distribute.CrossDeviceOps | None = None,
  ):
    if cross_device_ops is None:
      cross_device_ops = cross_device.RingAllReduce()
    check_cross_device_ops(cross_device_ops)
    # The base class numbers its collectives from here.
    self._collective_key_base = extended_lib.new_collective_key_base()
    extended = extended_lib.ExactMirroredExtended(
      self, devices_lib.resolve_devices(devices), cross_device_ops
    )
    # MirroredStrategy's own __init__ would build its own extended.
    tf.distribute.Strategy.__init__(self, extended)


def check_cross_device_ops(cross_device_ops) -> None:
  """Rejects what is no cross-device op.

  Raises:
    UnsupportedOptionError: naming it.
  """
  if not isinstance(cross_device_ops, tf.distribute.CrossDeviceOps):
    raise errors.UnsupportedOptionError(
      f'cross_device_ops={cross_device_ops!r}',
      'an instance of tf.distribute.CrossDeviceOps',
      'pass for instance tfs.RingAllReduce()',
    )


def is_uneven_structure(value) -> bool:
  """Whether `value` is a structure of batches with replicas of uneven rows."""
  if isinstance(value, tf.distribute.DistributedValues):
    return False
  return any(
    len({v.shape[0] for v in leaf.values if v.shape.rank}) > 1
    for leaf in tf.nest.flatten(value)
    if isinstance(leaf, _tf_internal.PerReplica)
  )
