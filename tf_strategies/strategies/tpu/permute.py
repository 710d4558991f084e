"""Executes a ring inside a program for TPUs with CollectivePermute ops.

All replicas run one program, so their differences must be data. A replica uses
its number to look up in tables which chunk to send, and which chunk to receive
into. The number is XLA's own, which the pairs of CollectivePermute use.
TensorFlow's replica ids may order the devices differently.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.collectives import schedule as schedule_lib
from tf_strategies.cross_device import executor


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
      UnsupportedOptionError: if `reduce_op` is neither SUM nor MEAN, or a tensor has an
        unknown shape or a dtype without a sum. The error names the tensor.
    """
    if reduce_op not in (
      tf.distribute.ReduceOp.SUM,
      tf.distribute.ReduceOp.MEAN,
    ):
      raise errors.UnsupportedOptionError(
        f'reduce_op={reduce_op!r}',
        'tf.distribute.ReduceOp.SUM or MEAN',
        'gather the values by all_gather and combine them yourself',
      )
    results = [tf.convert_to_tensor(t) for t in tensors]
    groups: dict[tf.DType, list[int]] = {}
    for i, tensor in enumerate(results):
      _check(tensor)
      groups.setdefault(tensor.dtype, []).append(i)
    if self._schedule.world_size == 1:
      return results  # With one replica, a step gets no additional operation.
    for members in groups.values():
      reduced = self._reduce_group(reduce_op, [results[i] for i in members])
      for i, tensor in zip(members, reduced, strict=True):
        results[i] = tensor
    return results

  def _reduce_group(self, reduce_op, tensors):
    """Reduces tensors of one dtype."""
    is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
    if tensors[0].dtype.is_integer:
      return self._reduce(is_mean, tensors)

    @tf.custom_gradient
    def reduce(*xs):
      # The gradient of the ops would use a different schedule than the
      # requested one.
      return self._reduce(is_mean, xs), lambda *dys: self(reduce_op, dys)

    return list(tf.nest.flatten(reduce(*tensors)))

  def _reduce(self, is_mean, tensors):
    world_size, dtype = self._schedule.world_size, tensors[0].dtype
    if is_mean and executor.is_half(dtype):
      tensors = [executor.divide(t, world_size) for t in tensors]
    buffer = self._pack(tensors)
    with tf.name_scope(f'{self._schedule.name}_all_reduce'):
      buffer = self._permute_and_add(buffer)
    if is_mean and not executor.is_half(dtype):
      buffer = executor.divide(buffer, world_size)
    sizes = [t.shape.num_elements() for t in tensors]
    parts = tf.split(tf.reshape(buffer, [-1])[: sum(sizes)], sizes)
    return [tf.reshape(p, t.shape) for p, t in zip(parts, tensors, strict=True)]

  def _pack(self, tensors):
    """Returns the chunks as rows of equal length, because all ranks run the
    same ops.
    """
    flat = tf.concat([tf.reshape(t, [-1]) for t in tensors], 0)
    num_chunks = self._schedule.num_chunks
    length = -(-flat.shape[0] // num_chunks)
    flat = tf.pad(flat, [[0, length * num_chunks - flat.shape[0]]])
    return tf.reshape(flat, [num_chunks, length])

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
      state = _put(state, chunk, received)
    return state


def _take(state, entry):
  """Returns row `entry` of the state, as a matrix."""
  return tf.slice(state, tf.stack([entry, 0]), [1, state.shape[1]])


def _put(state, chunk, entry):
  # XLA makes this update in place, while a scatter may become a loop.
  return _tf_internal.apply_op(
    'XlaDynamicUpdateSlice',
    input=state,
    update=chunk,
    indices=tf.stack([entry, 0]),
  )


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
