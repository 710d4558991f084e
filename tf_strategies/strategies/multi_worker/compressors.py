"""How gradients become less to send: between them and a group's collectives.

A compressor is a generator: it yields what is to be sent, gets what came of it, and
in the end returns sums, and what it left out of this worker's share ("error
feedback", Seide et al. 2014; Karimireddy et al. 2019). What all compressors of a step
yield is sent together, so that one call waits for all.

All of it are TensorFlow's operations, where the gradients are; what a group does
with a bucket, in its thread, are NumPy's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_strategies import process_group
from tf_strategies.collectives import codecs
from tf_strategies.collectives import compression as compression_lib
from tf_strategies.process_group import buffers
from tf_strategies.strategies.mirrored import packing
from tf_strategies.strategies.multi_worker import gradient_state

# Of a column's length: what is left of one that lies in the others' plane.
_LEAST_LENGTH = 1e-6


class Request(NamedTuple):
  """A flat tensor, and what a group makes of it.

  Attributes:
    tensor: what is handed over.
    members: the tensors that are in it, of those that a compressor got.
    shape: of what comes back.
    work: is called with a group, the array and a name.
  """

  tensor: tf.Tensor
  members: tuple[int, ...]
  shape: Sequence[int | None]
  work: Callable[[process_group.ProcessGroup, np.ndarray, str], np.ndarray]


def requests(packed, work, shapes=None) -> list[Request]:
  """Asks for the same of each bucket; `shapes` are those of other results."""
  shapes = [b.shape for b in packed.buckets] if shapes is None else shapes
  each = zip(packed.buckets, packed.members, shapes, strict=True)
  return [Request(*asked, work) for asked in each]


class Outcome(NamedTuple):
  """What came of a tensor: the sum, what was not sent, the next factor."""

  total: tf.Tensor
  rest: tf.Tensor | None = None
  factor: tf.Tensor | None = None


_Rounds = Generator[list[Request], list[tf.Tensor], list[Outcome]]


@dataclasses.dataclass(frozen=True)
class Sending:
  """How arrays are sent: of the options of a strategy."""

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

  def sum(self, group, array, name: str, compression: str = 'none', **more):
    """The sum of all workers."""
    return group.all_reduce(
      array,
      name=name,
      algorithm=self.algorithm,
      compression=compression,
      **more,
    )


class Item(NamedTuple):
  """A tensor to send, how, and what is kept of it."""

  tensor: tf.Tensor
  compression: compression_lib.Compression
  kept: gradient_state.Kept | None = None


def all_reduce(
  items: Sequence[Item],
  sending: Sending,
  send: Callable[[list[Request]], list[tf.Tensor]],
  writes: dict[Any, tf.Tensor],
) -> list[tf.Tensor]:
  """Sums tensors over all workers.

  Args:
    items: what is summed.
    sending: see there.
    send: has a group do what is asked; returns what came of it, in the same order.
    writes: gets the new values of what is kept, by reference of the variable; those
      that are there already are newer than the variables.

  Returns:
    The sums.
  """

  def read(variable):
    waiting = writes.get(variable.ref())
    return variable.read_value() if waiting is None else waiting

  together: dict[compression_lib.Compression, list[int]] = {}
  for i, item in enumerate(items):
    together.setdefault(item.compression, []).append(i)
  running, outcomes = [], {}
  for compression, positions in together.items():
    tensors = _with_rests([items[i] for i in positions], read)
    factors = [
      read(items[i].kept.factor)
      if items[i].kept is not None and items[i].kept.factor is not None
      else None
      for i in positions
    ]
    rounds = _COMPRESSORS.get(compression.name, _by_codec)
    running.append(
      (positions, rounds(compression, tensors, factors, sending), None)
    )
  while running:
    asked = []
    for positions, rounds, answers in running:
      try:
        asked.append((positions, rounds, rounds.send(answers)))
      except StopIteration as end:
        outcomes.update(zip(positions, end.value, strict=True))
    running = _send(asked, send)
  outcomes = [outcomes[i] for i in range(len(items))]
  sums = [outcome.total for outcome in outcomes]
  _keep(items, outcomes, sums, read, writes)
  return sums


def _with_rests(items, read) -> list[tf.Tensor]:
  """What is sent of each item: also what was left, of a variable once."""
  tensors, added = [], set()
  for tensor, _, kept in items:
    if kept is not None:
      tensor = tf.reshape(tensor, kept.rest.shape)
      if kept.rest.ref() not in added:
        added.add(kept.rest.ref())
        tensor += read(kept.rest)
    tensors.append(tensor)
  return tensors


def _send(asked, send):
  """Sends what compressors ask for, in the order in which it becomes ready."""
  wanted = [
    request._replace(members=tuple(positions[i] for i in request.members))
    for positions, _, of_one in asked
    for request in of_one
  ]
  # A bucket can go when the first of its layers is there: the backward pass ends there.
  order = sorted(range(len(wanted)), key=lambda i: -min(wanted[i].members))
  found = send([wanted[i] for i in order]) if wanted else []
  by_place = dict(zip(order, found, strict=True))
  results = iter([by_place[i] for i in range(len(wanted))])
  return [
    (positions, rounds, [next(results) for _ in of_one])
    for positions, rounds, of_one in asked
  ]


def _keep(items, outcomes, sums, read, writes) -> None:
  """Notes what is kept from now on: as before, if a sum is not finite.

  Such a step is left out by who scales losses, and ruins any other training. What
  was not sent before it is still not sent, and must not become NaN for ever.
  """
  new: dict[Any, tf.Tensor] = {}
  for item, outcome in zip(items, outcomes, strict=True):
    if item.kept is None:
      continue
    kept = item.kept.variables()
    values = outcome.rest, outcome.factor
    for variable, value in zip(kept, values, strict=False):
      reference = variable.ref()
      if variable is item.kept.rest and reference in new:
        value += new[reference]  # A step may have two gradients of a variable.
      new[reference] = value
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


# The compressors.


def _by_codec(compression, tensors, factors, sending) -> _Rounds:
  """As arrays that a codec encodes, or none."""
  del factors
  codec = codecs.get(compression.codec)
  packed = sending.pack(
    [to_wire(t, codec) for t in tensors], codec.block_length or 1
  )

  def add(group, array, name):
    return sending.sum(group, array, name, codec.name)

  def add_and_keep(group, array, name):
    both = sending.pool.take((2, array.size), array.dtype)
    more = {'out': both[0], 'residual': both[1]}
    sending.sum(group, array, name, codec.name, **more)
    return both

  if not compression.keeps_rest:
    results = yield requests(packed, add)
    return [Outcome(total) for total in packed.unpack(results)]
  shapes = [[2, *bucket.shape] for bucket in packed.buckets]
  results = yield requests(packed, add_and_keep, shapes)
  totals = packed.unpack([both[0] for both in results])
  rests = packed.unpack([both[1] for both in results])
  return list(map(Outcome, totals, rests))


def _top_k(compression, tensors, factors, sending) -> _Rounds:
  """The largest values of each bucket and their places, to everyone.

  Stich et al., "Sparsified SGD with memory", 2018. Their sum is made by every worker,
  in the order of ranks.
  """
  del factors
  packed = sending.pack(tensors)
  asked, rests = [], []
  for bucket, members in zip(packed.buckets, packed.members, strict=True):
    length, dtype = bucket.shape[0], bucket.dtype
    count = compression.count(length)
    _, places = tf.math.top_k(tf.abs(bucket), count, sorted=False)
    # What is not finite has no order.
    is_finite = tf.reduce_all(tf.math.is_finite(bucket))
    values = tf.gather(bucket, places)
    values = tf.where(is_finite, values, tf.constant(np.nan, dtype))
    rests.append(
      tf.tensor_scatter_nd_update(
        bucket, places[:, None], tf.zeros([count], dtype)
      )
    )
    # One array to send: places in the bits of values.
    bits = tf.cast(places, tf.int32 if dtype.size == 4 else tf.int64)
    sent = tf.concat([values, tf.bitcast(bits, dtype)], 0)
    asked.append(Request(sent, members, [length], _scatter(length, sending)))
  totals = packed.unpack((yield asked))
  return list(map(Outcome, totals, packed.unpack(rests)))


def _scatter(length, sending):
  def work(group, array, name):
    total = sending.pool.take(length, array.dtype)
    total.fill(0)
    for part in group.all_gather(array, name=name):
      values, places = np.split(part, 2)
      # No place is there twice.
      total[places.view(f'i{places.itemsize}')] += values
    return total

  return work


def _power_sgd(compression, tensors, factors, sending) -> _Rounds:
  """Matrices as the product of two narrow ones, of which sums are made.

  Vogels et al., "PowerSGD", 2019: one step of power iteration, from the columns of
  the step before.
  """
  shapes = [
    compression_lib.matrix_shape(tuple(t.shape.as_list())) for t in tensors
  ]
  matrices = [
    tf.reshape(t, shape) for t, shape in zip(tensors, shapes, strict=True)
  ]
  packed = sending.pack(
    [tf.matmul(m, f) for m, f in zip(matrices, factors, strict=True)]
  )
  rank = compression.rank

  def add_and_orthogonalise(members):
    ends = np.cumsum([shapes[i][0] * rank for i in members])

    def work(group, array, name):
      total = sending.sum(group, array, name)
      # On every worker by the same operations, in one thread: the same bits.
      for part in np.split(total, ends[:-1]):
        part[:] = orthogonalised(part.reshape(-1, rank)).reshape(-1)
      return total

    return work

  bases = packed.unpack(
    (
      yield [
        Request(bucket, members, bucket.shape, add_and_orthogonalise(members))
        for bucket, members in zip(packed.buckets, packed.members, strict=True)
      ]
    )
  )
  mine = [
    tf.matmul(m, b, transpose_a=True)
    for m, b in zip(matrices, bases, strict=True)
  ]
  packed = sending.pack(mine)
  sums = packed.unpack((yield requests(packed, sending.sum)))
  outcomes = []
  for tensor, shape, matrix, base, own, total in zip(
    tensors, shapes, matrices, bases, mine, sums, strict=True
  ):
    product = tf.matmul(base, total, transpose_b=True)
    rest = matrix - tf.matmul(base, own, transpose_b=True)
    first = gradient_state.first_factor(shape, rank).astype(
      total.dtype.as_numpy_dtype
    )
    outcomes.append(
      Outcome(
        tf.reshape(product, tensor.shape),
        tf.reshape(rest, tensor.shape),
        _scaled(total, first),
      )
    )
  return outcomes


def _scaled(factor, first):
  """Columns of the largest value 1; anew where there is none."""
  largest = tf.reduce_max(tf.abs(factor), 0, keepdims=True)
  return tf.where(largest > 0, tf.math.divide_no_nan(factor, largest), first)


def orthogonalised(matrix: np.ndarray) -> np.ndarray:
  """Columns of length 1 that span what those of `matrix` do, by Gram and Schmidt.

  One that lies in the plane of those before it becomes zeros. What is not finite does
  not become finite.
  """
  columns = np.array(matrix.T, np.float64, order='C')
  with np.errstate(invalid='ignore', over='ignore'):
    for i, column in enumerate(columns):
      before = np.sqrt(np.sum(column * column))
      for _ in range(2):  # Rounding leaves something the first time.
        for other in columns[:i]:
          column -= np.sum(column * other) * other
      length = np.sqrt(np.sum(column * column))
      if length == 0 or length < _LEAST_LENGTH * before:
        column[:] = 0
      else:
        column /= length
  return columns.T


_COMPRESSORS = {
  compression_lib.POWER_SGD: _power_sgd,
  compression_lib.TOP_K: _top_k,
}


def to_wire(tensor, codec):
  """A tensor in the dtype in which the group gets it."""
  if tensor.dtype == tf.bool:
    return tf.cast(tensor, tf.uint8)
  # Where a codec is a cast, TensorFlow makes it on all cores.
  if tensor.dtype == tf.float32 and codec.cast_dtype is not None:
    return tf.cast(tensor, codec.cast_dtype)
  return tensor
