"""Sums tensors over all workers, each in the codec that its variable asks for.

Tensors of one codec are packed into buckets. All buckets of a step are handed over
together, so that one call waits for all of them. A codec that leaves something out of
a worker's share returns the rest ("error feedback", Seide et al. 2014; Karimireddy et
al. 2019).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_strategies import process_group
from tf_strategies.collectives import codec as codec_lib
from tf_strategies.cross_device import packing
from tf_strategies.process_group import buffers


class Request(NamedTuple):
  """A flat tensor and the work that a group does with it.

  Attributes:
    tensor: the flat tensor.
    members: numbers of the tensors that it contains.
    shape: shape of the result.
    work: function of a group, an array and a name that returns the result.
  """

  tensor: tf.Tensor
  members: Sequence[int]
  shape: Sequence[int | None]
  work: Callable[[process_group.ProcessGroup, np.ndarray, str], np.ndarray]


def requests(
  packed: packing.Packed,
  work: Callable,
  numbers: Sequence[int],
  shapes: Sequence[Sequence[int | None]] | None = None,
) -> list[Request]:
  """Asks for the same work on each bucket.

  Args:
    packed: the buckets.
    work: as in `Request`.
    numbers: of the packed tensors among all tensors of the call.
    shapes: of the results; None if they are the shapes of the buckets.
  """
  shapes = [b.shape for b in packed.buckets] if shapes is None else shapes
  return [
    Request(bucket, [numbers[i] for i in members], shape, work)
    for bucket, members, shape in zip(
      packed.buckets, packed.members, shapes, strict=True
    )
  ]


@dataclasses.dataclass(frozen=True)
class Sending:
  """How arrays are sent, from the options of a strategy."""

  bucket_bytes: int
  algorithm: str
  num_chunks: int
  # Gives the memory of results.
  pool: buffers.Pool = dataclasses.field(default_factory=buffers.Pool)

  def pack(
    self,
    tensors: Sequence[tf.Tensor],
    block: int = 1,
    num_rows: int | None = None,
  ) -> packing.Packed:
    """Packs tensors for a codec with blocks of so many elements."""
    return packing.pack(
      tensors,
      self.bucket_bytes,
      block=block,
      num_chunks=self.num_chunks,
      num_rows=num_rows,
    )

  def sum(self, group, array, name: str, codec: codec_lib.Codec, **more):
    """Returns the sum of all workers' arrays."""
    return group.all_reduce(
      array,
      name=name,
      algorithm=self.algorithm,
      compression=codec.name,
      **more,
    )


class Item(NamedTuple):
  """A tensor to sum.

  Attributes:
    tensor: this worker's share.
    codec: how it travels.
    rest: the variable with what this worker has not sent so far; None for a
      codec that keeps no rest.
  """

  tensor: tf.Tensor
  codec: codec_lib.Codec
  rest: tf.Variable | None = None


def all_reduce(
  items: Sequence[Item],
  sending: Sending,
  send: Callable[[list[Request]], list[tf.Tensor]],
  writes: dict[Any, tf.Tensor],
) -> list[tf.Tensor]:
  """Sums tensors over all workers.

  Args:
    items: the tensors.
    sending: how arrays are sent.
    send: has a group do the requests; returns their results, in the same order.
    writes: gets the new values of rests, by reference of the variable. Values
      that are there already are newer than the variables.

  Returns:
    The sums.
  """

  def read(variable):
    waiting = writes.get(variable.ref())
    return variable.read_value() if waiting is None else waiting

  tensors = _with_rests(items, read)
  together: dict[codec_lib.Codec, list[int]] = {}
  for i, item in enumerate(items):
    together.setdefault(item.codec, []).append(i)
  packs, asked = [], []
  for codec, numbers in together.items():
    packed = sending.pack(
      [to_wire(tensors[i], codec) for i in numbers], codec.block_length
    )
    packs.append((codec, numbers, packed))
    asked += _requests_of(codec, numbers, packed, sending)
  results = iter(_send(asked, send))
  sums: list[Any] = [None] * len(items)
  rests: list[Any] = [None] * len(items)
  for codec, numbers, packed in packs:
    found = [next(results) for _ in packed.buckets]
    if codec.keeps_rest:
      left = packed.unpack([both[1] for both in found])
      rests = _placed(rests, numbers, left)
      found = [both[0] for both in found]
    sums = _placed(sums, numbers, packed.unpack(found))
  _keep(items, rests, sums, read, writes)
  return sums


def _requests_of(codec, numbers, packed, sending) -> list[Request]:
  """Asks for the sums of buckets; with their rests, if the codec keeps some."""

  def add(group, array, name):
    return sending.sum(group, array, name, codec)

  def add_and_keep(group, array, name):
    both = sending.pool.take((2, array.size), array.dtype)
    sending.sum(group, array, name, codec, out=both[0], residual=both[1])
    return both

  if not codec.keeps_rest:
    return requests(packed, add, numbers)
  shapes = [[2, *bucket.shape] for bucket in packed.buckets]
  return requests(packed, add_and_keep, numbers, shapes)


def _placed(values, numbers, new) -> list:
  """Returns `values` with new ones at these numbers."""
  placed = dict(enumerate(values)) | dict(zip(numbers, new, strict=True))
  return [placed[i] for i in range(len(values))]


def _with_rests(items, read) -> list[tf.Tensor]:
  """Returns the tensors to send. A variable's rest is added once per step."""
  tensors, added = [], set()
  for tensor, _, rest in items:
    if rest is not None:
      tensor = tf.reshape(tensor, rest.shape)
      if rest.ref() not in added:
        added.add(rest.ref())
        tensor += read(rest)
    tensors.append(tensor)
  return tensors


def _send(asked, send):
  """Sends requests in the order in which their tensors become ready."""
  # A bucket can go when the first of its layers is there: the backward pass ends there.
  order = sorted(range(len(asked)), key=lambda i: -min(asked[i].members))
  found = send([asked[i] for i in order]) if asked else []
  by_place = dict(zip(order, found, strict=True))
  return [by_place[i] for i in range(len(asked))]


def _keep(items, rests, sums, read, writes) -> None:
  """Notes the new rests; the old ones, if a sum is not finite.

  Whoever scales losses leaves such a step out, and it ruins any other training. What
  was not sent before it is still not sent, and must not become NaN for ever.
  """
  new: dict[Any, tf.Tensor] = {}
  for item, rest in zip(items, rests, strict=True):
    if item.rest is not None:
      reference = item.rest.ref()
      # A step may have two gradients of a variable.
      new[reference] = rest + new[reference] if reference in new else rest
  if not new:
    return
  finite = tf.reduce_all(
    [tf.reduce_all(tf.math.is_finite(s)) for s in sums if s.dtype.is_floating]
  )
  before = [read(reference.deref()) for reference in new]
  values = tf.cond(
    finite,
    lambda: [tf.identity(t) for t in new.values()],
    lambda: [tf.identity(t) for t in before],
  )
  writes.update(zip(new, values, strict=True))


def to_wire(tensor: tf.Tensor, codec: codec_lib.Codec) -> tf.Tensor:
  """Returns a tensor in the dtype in which the group gets it."""
  if tensor.dtype == tf.bool:
    return tf.cast(tensor, tf.uint8)
  # Where a codec is a cast, TensorFlow makes it on all cores.
  if tensor.dtype == tf.float32 and codec.cast_dtype is not None:
    return tf.cast(tensor, codec.cast_dtype)
  return tensor
