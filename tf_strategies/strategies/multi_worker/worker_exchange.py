"""Exchanges the values of several workers' replicas in a whole-batch step."""

from __future__ import annotations

import tensorflow as tf

from tf_strategies.keras import gradient_reducer
from tf_strategies.spmd import emit, pieces
from tf_strategies.strategies.mirrored import replica_exchange


class WorkerExchange(emit.Exchange):
  """Adds up and gathers the values of the replicas of all workers."""

  def __init__(self, communicator, variables):
    self._communicator = communicator
    # Variables that have gradients, by `id`.
    self._variables = variables
    # New values of the variables that keep the unsent rests of gradients.
    self._writes = {}

  def add(self, columns, sites, variables):
    """See base class."""
    gradients = gradient_reducer.Gradients(
      map(self._variables.get, variables), self._writes
    )
    sums = self._communicator.all_reduce(columns, 'reduce', gradients)
    results = []
    for site in sites:
      with tf.device(site.device):
        results.append([tf.identity(t) for t in sums[site.replica or 0]])
    return results

  def finish(self):
    """Writes the unsent rests of gradients, after every exchange has been built."""
    gradient_reducer.write(self._writes)

  def scatter(self, columns, shard, sites, are_gradients):
    """See base class."""
    del sites
    return self._communicator.scatter_pieces(columns, shard, are_gradients)

  def join(self, columns, shapes, sites):
    """See base class."""
    whole = self._communicator.join_pieces(columns)
    pairs = list(zip(whole, shapes, strict=True))
    return replica_exchange.at_each(
      sites, lambda: [pieces.joined(*pair) for pair in pairs]
    )

  def gather(self, values, axis, sites):
    """See base class. Rows are in the order of their places in the batch."""
    dtype = values[0].dtype
    with tf.device('CPU:0'):
      order = [axis, *(i for i in range(values[0].shape.rank) if i != axis)]
      rows = [tf.transpose(v, order) for v in values]
      if dtype == tf.string:
        shape = tf.concat([[-1], tf.shape(rows[0])[1:]], 0)
        rows = [tf.reshape(v, [-1]) for v in rows]
        gathered = tf.reshape(self._all_gather(rows), shape)
      else:
        gathered = self._all_gather(rows)
      gathered.set_shape([None, *(values[0].shape[i] for i in order[1:])])
      back = [order.index(i) for i in range(len(order))]
      gathered = tf.transpose(gathered, back)
    return self._copies(gathered, sites)

  def _all_gather(self, parts):
    """Returns all rows, given the rows of this worker's replicas."""
    local = tf.concat(parts, 0)
    if local.dtype != tf.string:
      gathered = self._communicator.all_gather(_to_wire(local), 'rows')
      return tf.cast(gathered, local.dtype)
    letters = tf.io.decode_raw(tf.strings.reduce_join(local), tf.uint8)
    letters = self._communicator.all_gather(letters, 'rows')
    lengths = tf.strings.length(local)
    lengths = self._communicator.all_gather(lengths, 'lengths')
    texts = tf.RaggedTensor.from_row_lengths(_characters(letters), lengths)
    return tf.strings.reduce_join(texts, 1)

  def first(self, value, like, sites):
    """See base class."""
    shape = like.shape if like.dtype != tf.string else tf.TensorShape([None])
    with tf.device('CPU:0'):
      if value is not None:
        value = _to_wire(value)
      if shape.is_fully_defined():
        sizes = tf.constant(shape.as_list(), tf.int32)
      else:
        sizes = self._sizes(value, shape)
      if value is None:
        value = tf.zeros(sizes, _wire(like.dtype))
      result = self._communicator.broadcast(value, 0, 'first')
      result.set_shape(shape)
      result = _from_wire(result, like.dtype, like.shape)
    return self._copies(result, sites)

  def _sizes(self, value, shape):
    """Returns the shape of the first worker's tensor, on every worker."""
    rank = shape.rank
    if rank is None:
      rank = tf.zeros([], tf.int32) if value is None else tf.rank(value)
      rank = self._communicator.broadcast(rank, 0, 'first/rank')
    sizes = tf.zeros(tf.reshape(rank, [1]), tf.int32)
    if value is not None:
      sizes = tf.shape(value)
    return self._communicator.broadcast(sizes, 0, 'first/shape')

  def _copies(self, value, sites):
    return replica_exchange.at_each(sites, lambda: tf.identity(value))


# Collectives can only send numbers.


def _wire(dtype):
  return tf.uint8 if dtype in (tf.bool, tf.string) else dtype


def _to_wire(value):
  if value.dtype == tf.string:
    return tf.io.decode_raw(tf.io.serialize_tensor(value), tf.uint8)
  return tf.cast(value, _wire(value.dtype))


def _from_wire(value, dtype, shape):
  if dtype != tf.string:
    return tf.cast(value, dtype)
  text = tf.strings.reduce_join(_characters(value))
  return tf.ensure_shape(tf.io.parse_tensor(text, tf.string), shape)


def _characters(values):
  """Returns bytes as strings of one character each."""
  characters = tf.constant([bytes([i]) for i in range(256)])
  return tf.gather(characters, tf.cast(values, tf.int32))
