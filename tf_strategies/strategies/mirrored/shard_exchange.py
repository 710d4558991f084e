"""How virtual shards meet in a step that is the same at any number of replicas."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.spmd import emit
from tf_strategies.spmd.site import Site
from tf_strategies.strategies import communicator as communicator_lib
from tf_strategies.strategies.mirrored import fixed_point_ops
from tf_strategies.strategies.mirrored import reducer as reducer_lib

_SUM = tf.distribute.ReduceOp.SUM
# Of a bucket between the devices of one process.
_BUCKET_BYTES = 8 << 20


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

  def add(self, columns, sites, are_gradients):
    """See base class."""
    del are_gradients
    packed = self._pack(columns[0])
    sums = _Sums(self._own, self._num_shards, self._largest, packed)
    flats = [packed.buckets]
    for site, column in zip(self._own[1:], columns[1:], strict=True):
      flats.append(self._buckets(site, column, packed))
    totals = self._over_workers(sums.totals(flats), packed, columns[0], sites)
    results = []
    for site, buckets in zip(sites, totals, strict=True):
      with tf.device(site.device):
        tensors = packed.unpack(sums.floats(buckets))
        results.append(
          [tf.cast(t, o.dtype) for t, o in zip(tensors, columns[0], strict=True)]
        )
    return results

  def _pack(self, column):
    bucket_bytes = _BUCKET_BYTES
    if self._communicator is not None:
      bucket_bytes = self._communicator.bucket_bytes
    return reducer_lib.pack(
      [tf.cast(t, fixed_point_ops.exact_dtype(t.dtype)) for t in column],
      bucket_bytes,
      block=fixed_point_ops.BLOCK_LENGTH,
    )

  def _buckets(self, site, column, like):
    """A shard's tensors in buckets such as the first one's."""
    with tf.device(site.device):
      buckets = site.if_mine(lambda: self._pack(column).buckets, like.buckets)
    for bucket, first in zip(buckets, like.buckets, strict=True):
      bucket.set_shape(first.shape)
    return buckets

  def _largest(self, exponents: list[tf.Tensor], name: str) -> tf.Tensor:
    """The largest exponents among all replicas', of which each device has some."""
    with tf.device(self._local.devices[0]):
      largest = functools.reduce(tf.maximum, exponents)
    if self._communicator is None:
      return largest
    return self._communicator.combine(largest, 'max', f'{name}/exponents')

  def _over_workers(
    self, totals: Iterator[list[tf.Tensor]], packed, column, sites
  ) -> list[list[tf.Tensor]]:
    """The sums of integers that the devices of all workers hold, for each site."""
    if self._communicator is None:
      return list(
        zip(*(self._over_devices(t, sites) for t in totals), strict=True)
      )
    first = (self._over_devices(t, sites[:1])[0] for t in totals)
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


class _Sums:
  """Buckets of floats as integers and back, with the exponents of all shards.

  `largest` makes of each device's exponents those of all devices everywhere.
  """

  def __init__(self, own, num_shards, largest, packed):
    self._own, self._num_shards = own, num_shards
    self._largest, self._packed = largest, packed
    # Of each bucket; None for one of integers.
    self._exponents: list[tf.Tensor | None] = []

  def totals(self, flats) -> Iterator[list[tf.Tensor]]:
    """For each bucket the sums of each device's shards, as integers.

    Whoever takes one builds the operations of it: between workers, the exponents
    of a bucket are exchanged behind the sums of the one before.
    """
    for i, buckets in enumerate(zip(*flats, strict=True)):
      shared = None
      if not buckets[0].dtype.is_integer:
        shared = self._largest(
          self._by_device(
            buckets,
            lambda flats: functools.reduce(
              tf.maximum, map(fixed_point_ops.exponents, flats)
            ),
            tf.maximum,
          ),
          f'bucket_{i}',
        )
      self._exponents.append(shared)
      yield self._by_device(
        buckets, functools.partial(self._encode, shared), tf.add
      )

  def floats(self, totals) -> list[tf.Tensor]:
    """Sums of integers as what they stand for."""
    return [
      total
      if shared is None
      else fixed_point_ops.decode(total, shared, self._num_shards, bucket.dtype)
      for total, shared, bucket in zip(
        totals, self._exponents, self._packed.buckets, strict=True
      )
    ]

  def _encode(self, shared, flats):
    if shared is None:
      return tf.add_n(list(flats))
    return fixed_point_ops.encode(flats, shared, self._num_shards)

  def _by_device(self, buckets, compute, combine):
    """`compute` of each device's shards, of one bucket."""
    by_device: dict[int, list[tuple[Site, tf.Tensor]]] = {}
    for site, bucket in zip(self._own, buckets, strict=True):
      by_device.setdefault(site.replica, []).append((site, bucket))
    results = []
    for pairs in by_device.values():
      with tf.device(pairs[0][0].device):
        result = compute([b for site, b in pairs if site.is_mine is None])
        for site, bucket in pairs:
          if site.is_mine is not None:
            [result] = tf.cond(
              site.is_mine,
              lambda r=result, b=bucket: [combine(r, compute([b]))],
              lambda r=result: [tf.identity(r)],
            )
        results.append(result)
    return results
