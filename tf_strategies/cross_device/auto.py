"""`AutoAllReduce`: the algorithm by kind of device and by size."""

from collections.abc import Sequence

import tensorflow as tf

from tf_strategies import collectives
from tf_strategies.collectives import schedule as schedule_lib
from tf_strategies.cross_device import algorithms, base

# A copy between two GPUs over PCIe 3 x16: about 10 us and 12 GB/s. Only the
# ratio matters for the choice: it puts the change from latency to bandwidth
# algorithms at some tens of kilobytes.
_GPU_LINK = collectives.Link(
  alpha_seconds=10e-6, beta_seconds_per_byte=1 / 12e9
)

# TensorFlow believes that a logical CPU has 256 MiB. Where more than 80% of them
# are in use at once, its memory optimizer turns a sum of three or more tensors
# into a copy and binary additions, which moves twice the bytes. Half of it for
# the sums leaves the rest to the model.
_ONE_CPU_BYTES = 128 * 2**20


class AutoAllReduce(base.ScheduledAllReduce):
  """Picks the all-reduce by device type and size.

  * CPUs share memory, so that copies cost nothing and whole tensors travel: all
    sums on one device, which sends the fewest messages, or on all of them where
    one would get more than TensorFlow thinks that a logical CPU has.
  * Other devices: the cheapest of ring, direct, halving-doubling and tree by
    the alpha-beta model, for the bytes of the call. Tensors are cut so that
    the busiest link carries 2(N-1)/N of them.

  On physical GPUs with NCCL, TensorFlow's own `tf.distribute.NcclAllReduce` is
  ahead of any ring of copies, so a strategy without `cross_device_ops` should
  be given that one there; NCCL refuses virtual GPUs, which is where this op
  takes over. The choice for GPUs was checked in unit tests of the choice
  alone: no GPU has run it.
  """

  def schedule(self, devices, num_bytes) -> schedule_lib.Schedule:
    """The schedule that `choose_schedule` picks."""
    return choose_schedule(devices, num_bytes)

  def split_above(self, devices) -> float | None:
    """Cuts nothing where copies are free."""
    if algorithms.share_memory(devices):
      return None
    return 0.5 / len(devices)


def choose_schedule(
  devices: Sequence[str], num_bytes: int
) -> schedule_lib.Schedule:
  """Returns the all-reduce schedule for `num_bytes` over `devices`.

  Args:
    devices: device names; only their type counts.
    num_bytes: bytes of one device's tensors.

  Returns:
    On CPUs naive, or direct for many bytes; elsewhere the cheapest by the cost
    model.
  """
  world_size = len(devices)
  if algorithms.share_memory(devices) or world_size == 1:
    # One device would hold what all others send it, and the sum.
    fits = (world_size + 1) * num_bytes <= _ONE_CPU_BYTES
    if world_size <= 2 or fits:
      return collectives.naive_all_reduce(world_size)
    return collectives.direct_all_reduce(world_size)
  return collectives.choose(
    num_bytes, collectives.Topology(world_size, _GPU_LINK)
  )


def nccl_is_usable(devices: Sequence[str]) -> bool:
  """Whether every device is a physical GPU of its own, as NCCL demands."""
  if not all('gpu' in device.lower() for device in devices):
    return False
  physical = tf.config.list_physical_devices('GPU')
  return len(physical) == len(tf.config.list_logical_devices('GPU'))
