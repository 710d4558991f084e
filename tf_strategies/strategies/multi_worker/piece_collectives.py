"""Reduce-scatter and all-gather of pieces between workers, by host calls.

An all-reduce is one after the other, so both together send as many bytes. As the
gradients of an all-reduce, pieces travel in buckets as soon as these are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tf_strategies import process_group
from tf_strategies.collectives import codecs
from tf_strategies.spmd import kinds, pieces
from tf_strategies.strategies.mirrored import piece_packing
from tf_strategies.strategies.multi_worker import compressors


class PieceCollectives:
  """Mixed into a communicator with a queue, a local reducer and options.

  Pieces are in the order of replicas: those of one worker's devices lie behind
  each other.
  """

  def scatter_pieces(
    self,
    columns: Sequence[Sequence[tf.Tensor]],
    shard: kinds.Shard,
    others: Sequence[Sequence[tf.Tensor]],
    are_gradients: bool = False,
  ) -> tuple[list[list[tf.Tensor]], list[list[tf.Tensor]]]:
    """Sums tensors of all devices of all workers, and divides some of the sums.

    Args:
      columns: for each local device its tensors whose sums are divided.
      shard: how.
      others: for each local device its tensors whose sums all get.
      are_gradients: whether they are, so that they may be rounded on their way.

    Returns:
      For each local device its pieces, and the other sums. None is there before
      all are.
    """
    count = len(columns)
    local = [[*c, *o] for c, o in zip(columns, others, strict=True)]
    tensors = local[0] if count == 1 else self._local.sum_on_first(local)
    split = len(columns[0])
    compression = self._options.compression if are_gradients else 'none'
    codec = codecs.get(compression)
    options = {
      'algorithm': self._options.all_reduce,
      'compression': compression,
    }
    size, block = self._options.bucket_bytes, codec.block_length or 1
    with tf.device(self._local.devices[0]):
      sent = [compressors.to_wire(t, codec) for t in tensors]
      rows = [pieces.rows(t, shard) for t in sent[:split]]
      divided = piece_packing.pack(rows, shard.count, size, block)
      whole = self._sending.pack(sent[split:], block)
      results = self._queue.call_all(
        'reduce_scatter',
        [
          *_works('reduce_scatter', 'pieces', len(divided.buckets), options),
          *_works('all_reduce', 'reduce', len(whole.buckets), options),
        ],
        [*divided.buckets, *whole.buckets],
        [
          *(self._names(tensors[:split], m) for m in divided.members),
          *(self._names(tensors[split:], m) for m in whole.members),
        ],
        self._local.devices[0],
        [*divided.shapes(count), *(b.shape for b in whole.buckets)],
      )
      number = len(divided.buckets)
      matrices = divided.unpack(results[:number], count)
      sums = whole.unpack(results[number:])
    mine, added = [], []
    for i, device in enumerate(self._local.devices):
      with tf.device(device):
        pairs = list(zip(matrices + sums, tensors, strict=True))
        mine.append([tf.cast(m[i], t.dtype) for m, t in pairs[:split]])
        added.append([tf.cast(s, t.dtype) for s, t in pairs[split:]])
    return mine, added

  def join_pieces(
    self, columns: Sequence[Sequence[tf.Tensor]]
  ) -> list[tf.Tensor]:
    """Brings the pieces of all devices of all workers to this one.

    Args:
      columns: for each local device its pieces.

    Returns:
      For each of them a matrix whose rows are the pieces of all replicas.
    """
    count = len(columns) * self.world_size
    with tf.device(self._local.devices[0]):
      rows = [
        row[0][None] if len(row) == 1 else tf.stack(row)
        for row in zip(*columns, strict=True)
      ]
      packed = piece_packing.pack(rows, count, self._options.bucket_bytes)
      joined = self._queue.call_all(
        'all_gather',
        _works('all_gather_equal', 'pieces', len(packed.buckets), {}),
        packed.buckets,
        [self._names(columns[0], members) for members in packed.members],
        self._local.devices[0],
        packed.shapes(count),
      )
      return packed.unpack(joined, count)


def _works(
  kind: str, name: str, count: int, options: dict[str, str]
) -> list[Callable[[process_group.ProcessGroup, np.ndarray], np.ndarray]]:
  """A collective of a group for each of so many buckets."""

  def work(index):
    def run(group, array):
      return getattr(group, kind)(
        array, name=f'{name}/bucket_{index}', **options
      )

    return run

  return [work(index) for index in range(count)]
