"""Exchanges the values of several workers' replicas in a whole-batch step."""

import tensorflow as tf

from tf_strategies.spmd import exchange, pieces
from tf_strategies.spmd.site import at_each


class WorkerExchange(exchange.Exchange):
  """Adds up and gathers the values of the replicas of all workers.

  Its cross-device op is the `Communicator`.
  """

  def add(self, columns, sites, gradients):
    """See base class."""
    sums = self._ops.all_reduce(columns, 'reduce', gradients)
    return at_each(
      sites, lambda site: [tf.identity(t) for t in sums[site.replica or 0]]
    )

  def scatter(self, columns, shard, sites, are_gradients):
    """See base class."""
    del sites
    return self._ops.scatter_pieces(columns, shard, are_gradients)

  def join(self, columns, shapes, sites):
    """See base class."""
    whole = self._ops.join_pieces(columns)
    return at_each(sites, lambda _: list(map(pieces.joined, whole, shapes)))

  def first(self, value, like, sites):
    """See base class. Only the first worker has a value."""
    link, shape = self._ops, like.shape
    with tf.device('CPU:0'):
      if shape.is_fully_defined() and like.dtype not in (tf.bool, tf.string):
        value = tf.zeros(shape, like.dtype) if value is None else value
        result = link.from_chief(value, 'first')
      else:
        sizes = tf.zeros([0], tf.int32) if value is None else tf.shape(value)
        value = tf.zeros([0], like.dtype) if value is None else value
        flat = link.gather([tf.reshape(value, [-1])], 0, 'first')
        sizes = link.all_gather(sizes, 'first/shape')
        result = tf.ensure_shape(tf.reshape(flat, sizes), shape)
    return at_each(sites, lambda _: tf.identity(result))
