"""How virtual shards meet in a step that is the same at any number of replicas."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.cross_device import packing
from tf_strategies.spmd import emit
from tf_strategies.spmd.site import Site
from tf_strategies.strategies import communicator as communicator_lib
from tf_strategies.strategies.mirrored import fixed_point_ops
from tf_strategies.strategies.mirrored import reducer as reducer_lib

_SUM = tf.distribute.ReduceOp.SUM
# Of a bucket between the devices of one process.
_BUCKET_BYTES = 8 << 20
# A last bucket of fewer has its exponents go with those of the one before.
_REST_BYTES = 1 << 20


class ShardExchange(emit.Exchange):
  """Adds up what shards hold, without rounding; gathers it in their order.

  Floats are added as integers with shared exponents, see `fixed_point_ops`: first
  those of a replica's shards, then of this process's devices, then of workers.

  Args:
    inner: gathers what replicas hold.
    local: adds up what the devices of this process hold.
    own: the sites of this process's shards.
    num_shards: of all replicas.
    communicator: the link to other workers, if there is one.
  """

  rounds_gradients = False

  def __init__(
    self,
    inner: emit.Exchange,
    local: reducer_lib.DeviceReducer,
    own: Sequence[Site],
    num_shards: int,
    communicator: communicator_lib.Communicator | None = None,
  ):
    self._inner, self._local, self._own = inner, local, own
    self._num_shards, self._communicator = num_shards, communicator

  def gather(self, values, axis, sites):
    """See base class."""
    with tf.device(self._own[0].device):
      together = tf.concat(values, axis) if len(values) > 1 else values[0]
    return self._inner.gather([together], axis, sites)

  def first(self, value, like, sites):
    """See base class."""
    return self._inner.first(value, like, sites)

  def finish(self):
    """See base class."""
    self._inner.finish()

  def add(self, columns, sites, are_gradients):
    """See base class."""
    del are_gradients
    packed = self._pack(columns[0])
    shards: list[_Shard] = []
    for site, column in zip(self._own, columns, strict=True):
      with tf.device(site.device):
        shards.append(self._shard(site, column, packed))
    exponents: list[tf.Tensor | None] = []
    totals = self._totals(shards, exponents)
    totals = self._over_workers(totals, packed, columns[0], sites)
    results = []
    for site, integers in zip(sites, totals, strict=True):
      with tf.device(site.device):
        buckets = [
          i if e is None else self._decode(i, e, bucket.dtype)
          for i, e, bucket in zip(
            integers, exponents, packed.buckets, strict=True
          )
        ]
        results.append(
          [
            tf.cast(t, like.dtype)
            for t, like in zip(packed.unpack(buckets), columns[0], strict=True)
          ]
        )
    return results

  def _decode(self, integers, exponents, dtype):
    return fixed_point_ops.decode(integers, exponents, self._num_shards, dtype)

  @property
  def _bucket_bytes(self) -> int:
    if self._communicator is None:
      return _BUCKET_BYTES
    return self._communicator.bucket_bytes

  def _pack(self, column):
    return packing.pack(
      [tf.cast(t, fixed_point_ops.exact_dtype(t.dtype)) for t in column],
      self._bucket_bytes,
      block=fixed_point_ops.BLOCK_LENGTH,
    )

  def _shard(self, site, column, like) -> _Shard:
    """A shard's tensors in buckets such as the first one's, and their exponents."""
    if site.is_mine is None:
      buckets = list(self._pack(column).buckets)
      return _Shard(site, buckets, list(map(_exponents, buckets)))
    none = [tf.zeros_like(_exponents(bucket)) for bucket in like.buckets]
    count = len(none)

    def build():
      buckets = self._pack(column).buckets
      return [*buckets, *map(_exponents, buckets)]

    # Whoever has not the shard adds no exponents, and may not use its buckets.
    empty = [tf.zeros([0], bucket.dtype) for bucket in like.buckets]
    found = tf.cond(site.is_mine, build, lambda: [*empty, *none])
    for bucket, first in zip(found[:count], like.buckets, strict=True):
      bucket.set_shape(first.shape)
    return _Shard(site, found[:count], found[count:])

  def _totals(self, shards, exponents) -> Iterator[list[tf.Tensor]]:
    """For each bucket the sums of each device's shards, as integers.

    Whoever takes one builds the operations of it, so that exponents of a bucket are
    exchanged behind the sums of the one before. They go to `exponents`, None for a
    bucket that holds integers anyway.
    """
    by_device: dict[int, list[_Shard]] = {}
    for shard in shards:
      by_device.setdefault(shard.site.replica, []).append(shard)
    for group in groups_of(shards[0].buckets, self._bucket_bytes):
      exponents += self._largest(shards, group)
      for i in group:
        totals = []
        for of_device in by_device.values():
          with tf.device(of_device[0].site.device):
            totals.append(self._total(of_device, i, exponents[i]))
        yield totals

  def _total(self, shards, i, shared):
    """Returns the sum of one device's shards of a bucket, as integers."""

    def encode(*buckets):
      if shared is None:
        return tf.add_n(buckets)
      return fixed_point_ops.encode(buckets, shared, self._num_shards)

    surely = [s.buckets[i] for s in shards if s.site.is_mine is None]
    total = encode(*surely)
    for shard in shards:
      if shard.site.is_mine is not None:
        bucket, before = shard.buckets[i], total
        [total] = tf.cond(
          shard.site.is_mine,
          lambda b=bucket, t=before: [t + encode(b)],
          lambda t=before: [tf.identity(t)],
        )
    return total

  def _largest(self, shards, group) -> list[tf.Tensor | None]:
    """The largest exponents of some buckets among all shards; None of integers."""
    found: dict[int, tf.Tensor] = {}
    for i in group:
      if not shards[0].buckets[i].dtype.is_integer:
        with tf.device(self._local.devices[0]):
          found[i] = functools.reduce(
            tf.maximum, [s.exponents[i] for s in shards]
          )
    if self._communicator is not None:
      # Those of one dtype, which is that of nearly all.
      for dtype in dict.fromkeys(t.dtype for t in found.values()):
        some = {i: t for i, t in found.items() if t.dtype == dtype}
        found.update(zip(some, self._over_all(some), strict=True))
    return [found.get(i) for i in group]

  def _over_all(self, found: dict[int, tf.Tensor]) -> list[tf.Tensor]:
    """The largest of what all workers found for some buckets."""
    with tf.device('CPU:0'):
      sizes = [tf.size(t) for t in found.values()]
      together = self._communicator.combine(
        tf.concat(list(found.values()), 0), 'max', f'exponents_{min(found)}'
      )
      largest = tf.split(together, sizes, num=len(sizes))
    for part, own in zip(largest, found.values(), strict=True):
      part.set_shape(own.shape)
    return largest

  def _over_workers(
    self, totals: Iterator[list[tf.Tensor]], packed, column, sites
  ) -> list[Sequence[tf.Tensor]]:
    """The sums of integers that the devices of all workers hold, for each site."""
    if self._communicator is None:
      sums = [self._over_devices(parts, sites) for parts in totals]
      return list(zip(*sums, strict=True))
    first = (self._over_devices(parts, sites[:1])[0] for parts in totals)
    summed = self._communicator.all_reduce_buckets(
      first, [[column[i] for i in members] for members in packed.members]
    )
    return [summed] * len(sites)

  def _over_devices(self, parts, sites):
    """The sum of what devices have, for each site."""
    if len(parts) == 1:
      return parts * len(sites)
    value = _tf_internal.PerReplica(tuple(parts))
    place = sites[0].device if len(sites) == 1 else value
    [total] = self._local.reduce(_SUM, [(value, place)], None)
    if len(sites) == 1:
      return [total]
    return [total.values[site.replica or 0] for site in sites]


def groups_of(
  buckets: Sequence[tf.Tensor], bucket_bytes: int
) -> list[list[int]]:
  """The buckets of which exponents travel together.

  That costs as much as copying some megabytes, and the integers wait for it. So a
  group has `bucket_bytes` or more, and a small last bucket is in the one before.
  """
  groups: list[list[int]] = []
  left = 0
  for i, bucket in enumerate(buckets):
    num_bytes = (bucket.shape[0] or 0) * bucket.dtype.size
    is_rest = i == len(buckets) - 1 and num_bytes < _REST_BYTES
    if not groups or (left <= 0 and not is_rest):
      groups.append([])
      left = bucket_bytes
    groups[-1].append(i)
    left -= num_bytes
  return groups


class _Shard:
  """What a shard adds: buckets, and the exponents of those of floats."""

  def __init__(self, site: Site, buckets, exponents):
    self.site, self.buckets, self.exponents = site, buckets, exponents


def _exponents(bucket):
  """Those of its blocks; of integers something that nobody uses."""
  if bucket.dtype.is_integer:
    return tf.zeros([0], tf.uint8)
  return fixed_point_ops.exponents(bucket)
