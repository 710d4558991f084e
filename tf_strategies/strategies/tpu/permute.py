"""Executes a ring inside a program for TPUs with CollectivePermute ops.

All replicas run one program, so their differences must be data. A replica uses
its number to look up in tables which chunk to send, and which chunk to receive
into. The number is XLA's own, which the pairs of CollectivePermute use.
TensorFlow's replica ids may order the devices differently.
"""

import sys
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.collectives import schedule as schedule_lib
from tf_strategies.cross_device import executor, packing


class PermutingAllReduce:
  """An all-reduce over all replicas of the TPU program that is being built.

  The tensors of a call are packed into one buffer per dtype, so the number of
  permutes depends only on the number of replicas. One replica computes a
  chunk's sum and the others copy it, so results are bit-equal.

  * SUM and MEAN of every float, complex and integer dtype. 16-bit floats travel
    in 16 bits, and are added in float32 and rounded once per round. For a mean, they
    are divided before the sum, so that it cannot overflow. The mean of integers is
    rounded down.
  * The gradient of an all-reduce is the same all-reduce of the gradients.

  Args:
    schedule: in each round every rank sends one chunk and receives one, and all
      ranks add, or all overwrite. The ranks are the replicas.
  """

  def __init__(self, schedule: schedule_lib.Schedule):
    self._schedule = schedule
    # A row for each replica: the chunk that it sends, and receives into, in
    # each round.
    self._table = np.zeros(
      [schedule.world_size, 2 * schedule.num_rounds], np.int32
    )
    for index, transfers in enumerate(schedule.rounds()):
      for t in transfers:
        self._table[t.src, 2 * index] = t.chunk
        self._table[t.dst, 2 * index + 1] = t.chunk

  def __call__(
    self, reduce_op: tf.distribute.ReduceOp, tensors: Sequence[tf.Tensor]
  ) -> list[tf.Tensor]:
    """Reduces this replica's tensors over all replicas, with one buffer per dtype.

    Raises:
      UnsupportedOptionError: if a tensor has an unknown shape or a dtype without a sum.
        The error names the tensor.
    """
    tensors = [tf.convert_to_tensor(t) for t in tensors]
    for tensor in tensors:
      _check(tensor)
    if self._schedule.world_size == 1:
      return tensors  # With one replica, a step gets no additional operation.
    packed = packing.pack(tensors, sys.maxsize, sys.maxsize)
    return packed.unpack([self._reduce(reduce_op, b) for b in packed.buckets])

  def _reduce(self, reduce_op, buffer):
    """Reduces a flat buffer."""
    is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
    if buffer.dtype.is_integer:
      return self._add_up(is_mean, buffer)

    @tf.custom_gradient
    def reduce(buffer):
      # The gradient of the ops would use a different schedule than the
      # requested one.
      return self._add_up(is_mean, buffer), lambda d: self(reduce_op, [d])[0]

    return reduce(buffer)

  def _add_up(self, is_mean, buffer):
    world_size, num_chunks = (
      self._schedule.world_size,
      self._schedule.num_chunks,
    )
    count, size = world_size if is_mean else 1, buffer.shape[0]
    buffer = executor.divide_beside_sum(buffer, count, is_before=True)
    # Rows of equal length, because all ranks run the same ops.
    length = -(-size // num_chunks)
    padded = tf.pad(buffer, [[0, length * num_chunks - size]])
    rows = tf.reshape(padded, [num_chunks, length])
    with tf.name_scope(f'{self._schedule.name}_all_reduce'):
      rows = self._permute_and_add(rows)
    total = tf.reshape(rows, [-1])[:size]
    return executor.divide_beside_sum(total, count, is_before=False)

  def _permute_and_add(self, state):
    if state.shape.num_elements() == 0:
      return state
    replica = _tf_internal.apply_op('XlaReplicaId')
    entries = tf.unstack(tf.gather(self._table, replica))
    rounds = self._schedule.rounds()
    for index, transfers in enumerate(rounds):
      chunk = tf.raw_ops.CollectivePermute(
        input=_take(state, entries[2 * index]),
        source_target_pairs=tf.constant([(t.src, t.dst) for t in transfers]),
      )
      received = entries[2 * index + 1]
      if transfers[0].reduce:
        chunk = executor.add([_take(state, received), chunk])
      # XLA makes this update in place, while a scatter may become a loop.
      state = _tf_internal.apply_op(
        'XlaDynamicUpdateSlice',
        input=state,
        update=chunk,
        indices=tf.stack([received, 0]),
      )
    return state


def _take(state, entry):
  """Returns row `entry` of the state, as a matrix."""
  return tf.slice(state, tf.stack([entry, 0]), [1, state.shape[1]])


def _check(tensor) -> None:
  if not tensor.shape.is_fully_defined():
    raise errors.UnsupportedOptionError(
      f'an all-reduce of tensor {tensor.name!r} of shape {tensor.shape}',
      'a static shape on TPUs',
      'give the batch a fixed size: batch(..., drop_remainder=True)',
    )
  dtype = tensor.dtype
  if not (dtype.is_floating or dtype.is_integer or dtype.is_complex):
    raise errors.UnsupportedOptionError(
      f'an all-reduce of tensor {tensor.name!r} of dtype {dtype.name}',
      'a float, complex or integer dtype',
      'cast the value first, for instance bool to int32',
    )
