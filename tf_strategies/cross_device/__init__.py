"""Moves values between the devices of one process: `tf.distribute.CrossDeviceOps`.

Every op here also works in TensorFlow's own strategy:

  >>> import tensorflow as tf
  >>> from tf_strategies import cross_device
  >>> strategy = tf.distribute.MirroredStrategy(
  ...   ['CPU:0', 'CPU:1'], cross_device_ops=cross_device.RingAllReduce())
"""

from tf_strategies.cross_device.auto import AutoAllReduce
from tf_strategies.cross_device.base import (
  RingAllReduce,
  ScheduledAllReduce,
)

__all__ = [
  'AutoAllReduce',
  'RingAllReduce',
  'ScheduledAllReduce',
]
