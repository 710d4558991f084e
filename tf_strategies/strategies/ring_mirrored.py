"""`RingMirroredStrategy`: synchronous replicas on the devices of one host."""

from __future__ import annotations

import tensorflow as tf

from tf_strategies import cross_device
from tf_strategies.strategies import devices as devices_lib
from tf_strategies.strategies import exact_strategy, mirrored_extended


class RingMirroredStrategy(
  exact_strategy.ExactStrategy, tf.distribute.MirroredStrategy
):
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
  * An optimizer option that would be silently wrong without
    `tfs.keras.DistributedOptimizer` is refused.

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
    exact_strategy.check_cross_device_ops(cross_device_ops)
    # The base class numbers its collectives from here.
    self._collective_key_base = mirrored_extended.new_collective_key_base()
    extended = mirrored_extended.ExactMirroredExtended(
      self, devices_lib.resolve_devices(devices), cross_device_ops
    )
    # MirroredStrategy's own __init__ would build its own extended.
    tf.distribute.Strategy.__init__(self, extended)
