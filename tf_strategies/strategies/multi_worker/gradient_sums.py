"""Sums tensors over all workers, each in the codec that its variable asks for.

All buckets of a step are handed over together, so that one call waits for all of
them. A codec that rounds a worker's share returns the rest of it, which is added to
the next gradient ("error feedback", Seide et al. 2014; Karimireddy et al. 2019).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal, process_group
from tf_strategies.collectives import codec as codec_lib
from tf_strategies.cross_device import packing
from tf_strategies.process_group import buffers

# Does something with an array of this name in a group; returns the result.
Work = Callable[[process_group.ProcessGroup, np.ndarray, str], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Sending:
  """How arrays are sent, from the options of a strategy.

  Attributes:
    bucket_bytes: largest number of bytes in a bucket.
    algorithm: algorithm between the workers, or 'auto'.
    num_chunks: number of chunks into which the algorithm cuts a bucket.
    pool: source of the memory of results.
  """

  bucket_bytes: int
  algorithm: str
  num_chunks: int
  pool: buffers.Pool = dataclasses.field(default_factory=buffers.Pool)

  def pack(
    self,
    tensors: Sequence[tf.Tensor],
    codecs: Sequence[codec_lib.Codec],
    num_rows: int | None = None,
  ) -> packing.Packed:
    """Returns buckets of tensors; see `packing.pack`."""
    return packing.pack(
      tensors,
      self.bucket_bytes,
      codecs=codecs,
      num_chunks=self.num_chunks,
      num_rows=num_rows,
    )

  def sum(
    self,
    codec: codec_lib.Codec,
    group: process_group.ProcessGroup,
    array: np.ndarray,
    name: str,
  ) -> np.ndarray:
    """Returns the sum of all workers' arrays, and the rest if the codec keeps one."""
    all_reduce = functools.partial(
      group.all_reduce,
      array,
      name=name,
      algorithm=self.algorithm,
      compression=codec.name,
    )
    if not codec.keeps_rest:
      return all_reduce()
    both = self.pool.take((2, array.size), array.dtype)
    all_reduce(out=both[0], residual=both[1])
    return both


class Item(NamedTuple):
  """A tensor to sum.

  Attributes:
    tensor: this worker's share.
    codec: codec in which it travels.
    rest: variable that holds the unsent rest of earlier shares; None for a codec
      that keeps no rest.
  """

  tensor: tf.Tensor
  codec: codec_lib.Codec
  rest: tf.Variable | None = None


def all_reduce(
  items: Sequence[Item],
  sending: Sending,
  send: Callable[[packing.Packed, list[Work]], list[tf.Tensor]],
  writes: dict[Any, tf.Tensor],
) -> list[tf.Tensor]:
  """Sums tensors over all workers.

  Args:
    items: the tensors.
    sending: how arrays are sent.
    send: function that has a group do some work with each bucket. Its arguments are
      the buckets and the work for each.
    writes: gets the new values of rests, by reference of the variable. Values
      that are there already are newer than the variables.

  Returns:
    The sums.
  """

  def read(variable):
    waiting = writes.get(variable.ref())
    return variable.read_value() if waiting is None else waiting

  codecs = [item.codec for item in items]
  tensors = map(to_wire, _with_rests(items, read), codecs)
  packed = sending.pack(list(tensors), codecs)
  of_buckets = [codecs[members[0]] for members in packed.members]
  works = [functools.partial(sending.sum, codec) for codec in of_buckets]
  results = list(zip(send(packed, works), of_buckets, strict=True))
  sums = packed.unpack(
    [r[0] if codec.keeps_rest else r for r, codec in results]
  )
  if any(codec.keeps_rest for codec in of_buckets):
    # Items without a rest get their sum, which nobody reads.
    rests = packed.unpack(
      [r[1] if codec.keeps_rest else r for r, codec in results]
    )
    _keep(items, rests, sums, read, writes)
  return sums


def rest_of(variable: Any, device: str) -> tf.Variable:
  """Returns the unsent rest of a variable's gradients; zeros before the first step.

  Every worker has its own rests, and only their sum matters: a checkpoint holds them
  as parts of a sum. They belong to no strategy, as the queue's token: there is one
  copy, on this device.
  """
  rest = vars(variable).get('gradient_rest')
  if rest is None:
    dtype = codec_lib.sum_dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)
    with tf.init_scope(), tf.device(device):
      rest = vars(variable)['gradient_rest'] = _tf_internal.ResourceVariable(
        np.zeros(tuple(variable.shape), dtype),
        trainable=False,
        name='gradient_rest',
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
      )
  return rest


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


def _keep(items, rests, sums, read, writes) -> None:
  """Notes the new rests; the old ones, if a sum is not finite.

  A user who scales losses leaves out a step that is not finite, and such a step ruins
  any other training. The old rests are still unsent, and must not become NaN for ever.
  """
  new: dict[Any, tf.Tensor] = {}
  for item, rest in zip(items, rests, strict=True):
    if item.rest is not None:
      reference = item.rest.ref()
      # A step may have two gradients of a variable.
      new[reference] = rest + new[reference] if reference in new else rest
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
  # If the codec is a cast, TensorFlow does it on all cores.
  if tensor.dtype == tf.float32 and codec.cast_dtype is not None:
    return tf.cast(tensor, codec.cast_dtype)
  return tensor
