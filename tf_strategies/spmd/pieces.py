"""Pieces of flat tensors: what a replica holds of one that is divided."""

from __future__ import annotations

import tensorflow as tf

from tf_strategies.spmd import kinds

# Of parts, by their `op`.
REDUCE = {
  'sum': tf.reduce_sum,
  'prod': tf.reduce_prod,
  'max': tf.reduce_max,
  'min': tf.reduce_min,
  'all': tf.reduce_all,
  'any': tf.reduce_any,
}


def cut(whole: tf.Tensor, shard: kinds.Shard, place) -> tf.Tensor:
  """Returns the piece at a place, from 0, of a tensor of static shape."""
  return tf.gather(rows(whole, shard), place)


def rows(tensor: tf.Tensor, shard: kinds.Shard) -> tf.Tensor:
  """Returns all pieces of a tensor of static shape as the rows of a matrix."""
  elements = tensor.shape.num_elements()
  length, flat = shard.length(elements), tf.reshape(tensor, [-1])
  flat = tf.pad(flat, [[0, shard.count * length - elements]])
  return tf.reshape(flat, [shard.count, length])


def joined(pieces: tf.Tensor, shape) -> tf.Tensor:
  """Returns the tensor of shape `shape` whose pieces are the rows of `pieces`."""
  elements = tf.TensorShape(shape).num_elements()
  return tf.reshape(tf.reshape(pieces, [-1])[:elements], shape)


def counted(
  piece: tf.Tensor, shard: kinds.Shard, elements: int, place, op: str
) -> tf.Tensor:
  """A piece with elements that change nothing in `op` where it is filled up."""
  length = shard.length(elements)
  if shard.count * length == elements:
    return piece
  is_own = tf.range(length) < elements - place * length
  # What nothing is reduced to changes nothing.
  return tf.where(is_own, piece, REDUCE[op](piece[:0]))
