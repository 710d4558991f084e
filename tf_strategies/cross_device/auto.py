"""`AutoAllReduce`: the algorithm by kind of device and by size."""

from collections.abc import Sequence

import tensorflow as tf

from tf_strategies import collectives
from tf_strategies.collectives import schedule as schedule_lib
from tf_strategies.cross_device import base, executor

# A copy between two GPUs over PCIe 3 x16: about 10 us and 12 GB/s. Only the
# ratio matters for the choice: it puts the change from latency to bandwidth
# algorithms at some tens of kilobytes.
_GPU_LINK = collectives.Link(
  alpha_seconds=10e-6, beta_seconds_per_byte=1 / 12e9
)


class AutoAllReduce(base.ScheduledAllReduce):
  """Picks the all-reduce by device type and size.

  * CPUs share memory: `DirectAllReduce` by whole tensors, which copies nothing.
  * Other devices: the cheapest of `cost_model.CANDIDATES` by the alpha-beta
    model, for the bytes of the call. Tensors are cut so that the busiest link
    carries 2(N-1)/N of them.
  * Physical GPUs, in a graph: TensorFlow's `tf.distribute.NcclAllReduce`, which
    is ahead of any ring of copies. NCCL refuses virtual GPUs; those get the
    schedules above.

  No GPU has run this op: the choice, and the hand-over to TensorFlow's op, were
  checked on CPUs.
  """

  _cuts_shared_memory = False

  def __init__(self):
    super().__init__('direct')
    self._nccl = tf.distribute.NcclAllReduce()

  def schedule(self, devices, num_bytes) -> schedule_lib.Schedule:
    """Direct on CPUs; elsewhere the cheapest by the cost model."""
    world_size = len(devices)
    if executor.share_memory(devices) or world_size == 1:
      return collectives.direct_all_reduce(world_size)
    topology = collectives.Topology(world_size, _GPU_LINK)
    return collectives.choose(num_bytes, topology)

  def _reduce_everywhere(self, reduce_op, values, devices):
    if tf.executing_eagerly() or not nccl_is_usable(devices):
      return super()._reduce_everywhere(reduce_op, values, devices)
    num_bytes = sum(base.bytes_of(v.values[0]) for v in values)
    # NCCL's rings move what ours would.
    ring = collectives.ring_all_reduce(len(devices))
    chunks = collectives.chunk_sizes(num_bytes, ring.num_chunks)
    self._statistics['all_reduce'].record(devices, ring.bytes_in(chunks))
    return self._nccl.batch_reduce(reduce_op, [(v, v) for v in values])


def nccl_is_usable(devices: Sequence[str]) -> bool:
  """Whether every device is a physical GPU of its own, as NCCL demands."""
  if not all('gpu' in device.lower() for device in devices):
    return False
  physical = tf.config.list_physical_devices('GPU')
  return len(physical) == len(tf.config.list_logical_devices('GPU'))
