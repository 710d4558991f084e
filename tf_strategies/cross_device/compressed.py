"""An all-reduce through a codec, between devices of one process.

Runs the simulator in a host call: the same bits as between processes.
"""

from collections.abc import Sequence

import tensorflow as tf

from tf_strategies.collectives import schedule as schedule_lib
from tf_strategies.collectives import simulator
from tf_strategies.cross_device import executor


def execute(
  schedule: schedule_lib.Schedule,
  values: Sequence[Sequence[tf.Tensor]],
  devices: Sequence[str],
  divide_by: int,
  compression: str,
) -> list[list[tf.Tensor]]:
  """As `executor.execute`, over one tensor after the other.

  Floats are divided before the sum, so that it cannot overflow; integers after.
  """
  results = [[] for _ in devices]
  for tensors in zip(*values, strict=True):
    dtype, shape = tensors[0].dtype, tensors[0].shape
    if divide_by > 1 and not dtype.is_integer:
      tensors = [executor.divide(t, divide_by) for t in tensors]
    with tf.device('CPU:0'):
      reduced = tf.numpy_function(
        lambda *arrays: (
          simulator.simulate(schedule, arrays, compression).outputs
        ),
        tensors,
        [dtype] * len(devices),
      )
    for rank, (tensor, device) in enumerate(zip(reduced, devices, strict=True)):
      with tf.device(device):
        tensor.set_shape(shape)
        if divide_by > 1 and dtype.is_integer:
          tensor = executor.divide(tensor, divide_by)
        results[rank].append(tf.identity(tensor))
  return results
