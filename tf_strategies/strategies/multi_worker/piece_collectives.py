"""Reduce-scatter and all-gather of pieces between workers, by host calls.

An all-reduce is one after the other, so both together send as many bytes. As the
gradients of an all-reduce, pieces travel in buckets as soon as these are ready.
"""

from __future__ import annotations

import tensorflow as tf

from tf_strategies.collectives import codecs
from tf_strategies.spmd import pieces
from tf_strategies.strategies.mirrored import piece_packing


class PieceCollectives:
  """Mixed into a communicator with a queue, a local reducer and options.

  Pieces are in the order of replicas: those of one worker's devices lie behind
  each other.
  """

  def scatter_pieces(self, columns, shard, name, are_gradients):
    """Sums tensors of all devices of all workers, and divides the sums.

    Args:
      columns: for each local device its tensors.
      shard: how they are divided.
      name: of the collective.
      are_gradients: whether they may be rounded on their way.

    Returns:
      For each local device its pieces.
    """
    count = len(columns)
    tensors = columns[0] if count == 1 else self._local.sum_on_first(columns)
    compression = self._options.compression if are_gradients else 'none'
    codec = codecs.get(compression)
    algorithm = self._options.all_reduce

    def bucket(index):
      def work(group, array):
        return group.reduce_scatter(
          array,
          name=f'{name}/bucket_{index}',
          algorithm=algorithm,
          compression=compression,
        )

      return work

    with tf.device(self._local.devices[0]):
      packed = piece_packing.pack(
        [pieces.rows(self._to_wire(t, codec), shard) for t in tensors],
        shard.count,
        self._options.bucket_bytes,
        codec.block_length or 1,
      )
      matrices = self._call_pieces('reduce_scatter', bucket, packed, count)
    results = []
    for i, device in enumerate(self._local.devices):
      with tf.device(device):
        pairs = zip(matrices, tensors, strict=True)
        results.append([tf.cast(m[i], t.dtype) for m, t in pairs])
    return results

  def join_pieces(self, columns, name):
    """Brings the pieces of all devices of all workers to this one.

    Returns:
      For each of them a matrix whose rows are the pieces of all replicas.
    """
    count = len(columns) * self.world_size

    def bucket(index):
      def work(group, array):
        return group.all_gather_equal(array, name=f'{name}/bucket_{index}')

      return work

    with tf.device(self._local.devices[0]):
      rows = [tf.stack(row) for row in zip(*columns, strict=True)]
      packed = piece_packing.pack(rows, count, self._options.bucket_bytes)
      return self._call_pieces('all_gather', bucket, packed, count)

  def _call_pieces(self, kind, bucket, packed, num_rows):
    """Runs a collective of each bucket; the matrices that come out of them."""
    results = self._queue.call_all(
      kind,
      [bucket(i) for i in range(len(packed.buckets))],
      packed.buckets,
      [''] * len(packed.buckets),
      self._local.devices[0],
      packed.shapes(num_rows),
    )
    return packed.unpack(results, num_rows)
