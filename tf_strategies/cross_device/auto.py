"""`AutoAllReduce` chooses the algorithm by kind of device and size."""

import itertools

import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.collectives import algorithms, cost_model
from tf_strategies.collectives import schedule as schedule_lib
from tf_strategies.cross_device import base, executor, links, packing

# Dtypes that NCCL sums as `base` promises. TensorFlow's op lacks bfloat16 and
# other integers, and float16 may overflow before the mean is taken.
_NCCL_DTYPES = (tf.float32, tf.float64)


class AutoAllReduce(base.ScheduledAllReduce):
  """Picks the all-reduce by device type and size.

  * CPUs: 'direct', which sends whole tensors and cuts none.
  * Parts of one GPU, where each copy has the same latency: a tree, which copies
    least often, over small tensors packed together.
  * float32 and float64 on physical GPUs, in a graph: TensorFlow's
    `tf.distribute.NcclAllReduce`. NCCL refuses virtual GPUs.
  * All other devices: the cheapest of `cost_model.CANDIDATES` by the alpha-beta
    model, for the bytes of the call and the link between the devices. Tensors are
    cut so that the busiest link carries 2(N-1)/N of them.

  It ran on one GPU, as virtual GPUs and, with NCCL, as one device. The choice for
  several GPUs was checked on CPUs.
  """

  def __init__(self) -> None:
    super().__init__('direct')
    self._nccl = tf.distribute.NcclAllReduce()

  def schedule(self, devices, num_bytes) -> schedule_lib.Schedule:
    """Returns 'direct' between CPUs, a tree in one GPU, or the cheapest by the
    cost model.
    """
    world_size = len(devices)
    if executor.share_memory(devices):
      return algorithms.build('direct', world_size)
    link = links.name_of(devices)
    if link == 'one_gpu':
      return algorithms.build('tree', world_size)
    topology = cost_model.Topology(world_size, links.LINKS[link])
    return cost_model.choose(num_bytes, topology)

  def _way(self, devices, dtype):
    has_nccl = not tf.executing_eagerly() and links.nccl_is_usable(devices)
    if has_nccl and dtype in _NCCL_DTYPES:
      return self._reduce_by_nccl, dtype
    return (self._reduce_by_schedule,)

  def _reduce_by_nccl(self, values, devices):
    """Adds up values of one dtype, which TensorFlow packs into one tensor."""
    base.check_tensors(values)
    num_bytes = sum(base.bytes_of(tensors[0]) for tensors in values)
    # NCCL's rings send the same bytes as ours.
    ring = algorithms.build('ring', len(devices))
    chunks = schedule_lib.chunk_sizes(num_bytes, ring.num_chunks)
    self._statistics['all_reduce'].record(devices, ring.bytes_in(chunks))
    # NCCL needs to know each tensor's device.
    placed = [
      _tf_internal.PerReplica(base.copied(tensors, devices))
      for tensors in values
    ]
    # `batch_reduce` would skip NCCL if there is only one device.
    sums = self._nccl.batch_reduce_implementation(
      tf.distribute.ReduceOp.SUM, [(v, v) for v in placed], None
    )
    # One device gets tensors.
    return [getattr(total, 'values', [total]) for total in sums]

  def _reduce_by_schedule(self, values, devices):
    """Adds up values. Between parts of one GPU, it packs small ones."""
    if links.name_of(devices) != 'one_gpu':
      return self._reduce_everywhere(values, devices)
    base.check_tensors(values)
    alone_bytes, bucket_bytes = links.packed_bytes(len(devices))
    for tensors in values:
      # Replicas may know different shapes, but must pack the same tensors.
      for tensor, other in itertools.permutations(tensors, 2):
        if not tensor.shape.is_fully_defined():
          tensor.set_shape(other.shape)
    packed = executor.on_each(
      devices,
      lambda *tensors: packing.pack(tensors, bucket_bytes, alone_bytes),
      *values,
    )
    buckets = zip(*(p.buckets for p in packed), strict=True)
    sums = self._reduce_everywhere([*buckets], devices)
    columns = executor.on_each(
      devices, lambda pack, *own: pack.unpack(own), packed, *sums
    )
    return zip(*columns, strict=True)
