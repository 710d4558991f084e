"""Defines the link between the workers of a strategy."""

import abc
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.cluster import workers as workers_lib
from tf_strategies.cross_device import base, executor
from tf_strategies.spmd import exchange
from tf_strategies.spmd.site import at_each
from tf_strategies.strategies.mirrored import run_context


class Communicator(exchange.Exchange, tf.distribute.CrossDeviceOps, abc.ABC):
  """The workers of a job, as seen by one of them.

  It is a cross-device op of all devices of all workers, and the exchange in which their
  replicas meet. Unlike TensorFlow's ops, it does not check destinations, and it calls
  the other workers for a single value too.

  Every method that takes tensors works in a graph and eagerly, and is a
  collective: all workers call it in the same order with tensors of the same
  dtypes and, unless said otherwise, the same shapes. `name` is for messages.

  Attributes:
    rank: this worker's rank; 0 is the chief.
    world_size: number of workers.
    is_elastic: whether workers may come and go.
  """

  rank: int
  world_size: int
  is_elastic: bool = False

  def __init__(self, devices: Sequence[str]):
    tf.distribute.CrossDeviceOps.__init__(self)
    exchange.Exchange.__init__(self, self)
    self._devices = tuple(devices)

  @property
  def capacity(self) -> int:
    """Returns the largest number of workers while the strategy lives."""
    return self.world_size

  @abc.abstractmethod
  def all_reduce(
    self,
    columns: Sequence[Sequence[tf.Tensor]],
    name: str,
    gradients: Sequence[str | None] = (),
  ) -> list[list[tf.Tensor]]:
    """Sums tensors over all local devices of all workers.

    Args:
      columns: the tensors of each local device.
      name: name of the collective.
      gradients: if some tensors are gradients, which may be rounded on their way:
        for each tensor of a column the name of the variable, or None.

    Returns:
      The sums, in the structure of `columns`. On one worker they may be on the first
      device. All sums are ready at once, so the operations after them run with all
      sums or not at all.
    """

  # Whether a variable that a step makes gets its first value outside of the step.
  initializes_eagerly: bool = False

  @abc.abstractmethod
  def sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Adds up one small host tensor of each worker."""

  @abc.abstractmethod
  def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Concatenates tensors along axis 0, of which the lengths may differ."""

  def _gather_rows(self, local: tf.Tensor, name: str) -> tf.Tensor:
    """Concatenates tensors of any dtype along axis 0. Links send numbers only."""
    if local.dtype == tf.bool:
      return tf.cast(self.all_gather(tf.cast(local, tf.uint8), name), tf.bool)
    if local.dtype != tf.string:
      return self.all_gather(local, name)
    texts = tf.reshape(local, [-1])
    letters = tf.io.decode_raw(tf.strings.reduce_join(texts), tf.uint8)
    letters = self.all_gather(letters, f'{name}/letters')
    lengths = self.all_gather(tf.strings.length(texts), f'{name}/lengths')
    alphabet = tf.constant([bytes([i]) for i in range(256)])
    characters = tf.gather(alphabet, tf.cast(letters, tf.int32))
    texts = tf.RaggedTensor.from_row_lengths(characters, lengths)
    shape = tf.concat([[-1], tf.shape(local)[1:]], 0)
    gathered = tf.reshape(tf.strings.reduce_join(texts, 1), shape)
    gathered.set_shape([None, *local.shape[1:]])
    return gathered

  @abc.abstractmethod
  def from_chief(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Returns the chief's tensor on every worker."""

  @abc.abstractmethod
  def exchange(self, tag: str, value: Any) -> list[Any]:
    """Brings a small value of JSON of each worker to all, beside the collectives."""

  check_same = staticmethod(workers_lib.check_same)

  # As an exchange; see also `spmd.exchange`.

  def add(self, columns, sites, gradients):
    """See base class."""
    sums = self.all_reduce(columns, 'reduce', gradients)
    return at_each(
      sites, lambda site: [tf.identity(t) for t in sums[site.replica or 0]]
    )

  def first(self, value, like, sites):
    """See base class. Only the first worker has a value."""
    shape = like.shape
    with tf.device('CPU:0'):
      sizes = tf.zeros([0], tf.int32) if value is None else tf.shape(value)
      value = tf.zeros([0], like.dtype) if value is None else value
      flat = self._gather(tf.reshape(value, [-1]), 'CPU:0', 0)
      if shape.is_fully_defined():
        sizes = shape
      else:
        sizes = self.all_gather(sizes, 'first/shape')
      result = tf.ensure_shape(tf.reshape(flat, sizes), shape)
    return at_each(sites, lambda _: tf.identity(result))

  # As a cross-device op.

  def batch_reduce(self, reduce_op, value_destination_pairs, options=None):
    """See base class."""
    count = 1
    if reduce_op == tf.distribute.ReduceOp.MEAN:
      count = len(self._devices) * self.world_size
    values = [base.as_tensors(value) for value, _ in value_destination_pairs]
    are_dense = [not isinstance(v.values[0], tf.IndexedSlices) for v in values]
    # The names of the variables, if these are their gradients.
    names = itertools.compress(getattr(options, 'names', ()), are_dense)
    dense = list(itertools.compress(values, are_dense))
    sums = iter(self._sum_dense(dense, count, list(names)) if dense else ())
    reduced = [
      next(sums) if is_dense else self._gather_slices(v.values, count)
      for v, is_dense in zip(values, are_dense, strict=True)
    ]
    return [
      self._copied(columns, *pair)
      for columns, pair in zip(reduced, value_destination_pairs, strict=True)
    ]

  def _gather(self, per_replica_value, destinations, axis, options=None):
    """See base class. A value that belongs to no replica is gathered once."""
    del options
    value = run_context.per_replica(None, per_replica_value, 1)
    with tf.device('CPU:0'):
      local = tf.concat(base.as_tensors(value).values, axis)
      rank = local.shape.rank
      order = [axis % rank, *(i for i in range(rank) if i != axis % rank)]
      local = tf.transpose(local, order)
      gathered = self._gather_rows(local, f'gather/axis_{axis}')
      gathered = tf.transpose(gathered, [order.index(i) for i in range(rank)])
    return self._copied([gathered], value, destinations)

  def _sum_dense(self, values, count, names):
    """Returns, by local device, each value's sum over all replicas, over `count`."""
    rows = [v.values for v in values]
    base.check_tensors(rows)
    rows = [
      base.divided(row, self._devices, count, is_before=True) for row in rows
    ]
    columns = self.all_reduce(list(zip(*rows, strict=True)), 'reduce', names)
    return [
      base.divided(row, self._devices, count, is_before=False)
      for row in zip(*columns, strict=True)
    ]

  def _gather_slices(self, slices, count):
    """Concatenates `tf.IndexedSlices` of all replicas of all workers, over `count`."""
    with tf.device('CPU:0'):
      values = tf.concat([s.values for s in slices], 0)
      indices = tf.concat([s.indices for s in slices], 0)
      if count > 1:
        values = executor.divide(values, count)
      gathered = tf.IndexedSlices(
        self.all_gather(values, 'slices/values'),
        self.all_gather(indices, 'slices/indices'),
        slices[0].dense_shape,
      )
    return [gathered]

  def _copied(self, columns, value, destinations):
    """Copies a reduced value to its destinations."""
    devices = self._devices
    if destinations is not value:
      devices = tuple(_tf_internal.get_devices_from(destinations))
    if len(devices) != len(columns):
      columns = [columns[0]] * len(devices)
    return base.wrap(base.copied(columns, devices))

  @abc.abstractmethod
  def report(self) -> dict[str, Any]:
    """Returns counters of the communication so far."""

  @abc.abstractmethod
  def close(self) -> None:
    """Leaves the other workers."""


def check_not_compiled(kind: str) -> None:
  """Refuses a collective in what XLA compiles, which cannot call the network."""
  if _tf_internal.in_xla_context():
    raise errors.UnsupportedOptionError(
      f'jit_compile=True around a collective between workers ({kind})',
      'steps that XLA does not compile',
      'write compile(..., jit_compile=False), or compile functions inside of '
      'the step that do not synchronise. XLA cannot call the network',
    )
