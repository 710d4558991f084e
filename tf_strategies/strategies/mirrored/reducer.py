"""How values are reduced: over local devices and over workers.

A strategy has one `Reducer`, which all of TensorFlow's hooks call: `DeviceReducer`
(the devices of this process, by a cross-device op) or `WorkerReducer` (a
`DeviceReducer` and a `Communicator` between processes).
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.cross_device import executor
from tf_strategies.keras import gradient_reducer
from tf_strategies.strategies import communicator as communicator_lib

_SUM = tf.distribute.ReduceOp.SUM
_MEAN = tf.distribute.ReduceOp.MEAN


class Reducer(abc.ABC):
  """Reduces and gathers values of all replicas.

  Attributes:
    devices: names of this process's devices.
    num_replicas: number of replicas in all processes.
  """

  devices: tuple[str, ...]
  num_replicas: int

  def reduce(self, reduce_op, value, destinations, options):
    """Reduces each value of a structure; `StrategyExtended.reduce_to`."""
    value = tf.nest.map_structure(self.per_replica, value)
    if reduce_op == _MEAN and _tf_internal.is_mirrored(value):
      return value

    def reduce_one(value):
      if not isinstance(value, tf.distribute.DistributedValues):
        return self.reduce_shared(reduce_op, value, destinations)
      return self.batch_reduce(reduce_op, [(value, destinations)], options)[0]

    return tf.nest.map_structure(reduce_one, value)

  def batch_reduce(self, reduce_op, pairs, options):
    """Reduces values; `StrategyExtended.batch_reduce_to`."""
    distributed = []
    for value, destination in pairs:
      new = self._once(reduce_op, self.per_replica(value))
      # A destination that is the value itself stands for the value's devices.
      distributed.append((new, new if destination is value else destination))
    return self.reduce_distributed(reduce_op, distributed, options)

  def _once(self, reduce_op, value):
    """Returns a tensor that all local replicas share as one that counts once.

    It was made outside of the step. `tf.distribute.MirroredStrategy` counts it once.
    """
    if isinstance(value, tf.distribute.DistributedValues):
      return value
    first = tf.convert_to_tensor(value)
    other = first if reduce_op == _MEAN else tf.zeros_like(first)
    others = [other] * (len(self.devices) - 1)
    return _tf_internal.PerReplica((first, *others))

  def gather(self, value, destinations, axis, options):
    """Concatenates the replicas' values along `axis`."""
    value = self.per_replica(value)
    if not isinstance(value, tf.distribute.DistributedValues):
      return self.gather_shared(value, destinations, axis)
    return self.gather_distributed(value, destinations, axis, options)

  def per_replica(self, value):
    """Returns the distributed value that `value` stands for, or `value`."""
    return value

  @abc.abstractmethod
  def reduce_distributed(self, reduce_op, pairs, options):
    """Reduces distributed values, each to its destinations."""

  @abc.abstractmethod
  def reduce_shared(self, reduce_op, value, destinations):
    """Reduces a value that a process has once, such as a Python number."""

  @abc.abstractmethod
  def gather_distributed(self, value, destinations, axis, options):
    """Concatenates the components of a distributed value."""

  @abc.abstractmethod
  def gather_shared(self, value, destinations, axis):
    """Gathers a value that a process has once."""


class DeviceReducer(Reducer):
  """Adds up values of the devices of this process, by a cross-device op.

  `choose_ops` returns the op for a value. The options of a call are merged into
  `options`.
  """

  def __init__(
    self,
    devices: Sequence[str],
    choose_ops: Callable[..., tf.distribute.CrossDeviceOps],
    options,
  ):
    self.devices = tuple(devices)
    self.num_replicas = len(self.devices)
    self._choose_ops = choose_ops
    self._options = options

  def reduce_distributed(self, reduce_op, pairs, options):
    """See base class."""
    return self._choose_ops(pairs[0][0]).batch_reduce(
      reduce_op, pairs, options=self._options.merge(options)
    )

  def reduce_shared(self, reduce_op, value, destinations):
    """See base class: it is the same on every replica."""
    return _tf_internal.reduce_non_distributed_value(
      reduce_op, value, destinations, self.num_replicas
    )

  def gather_distributed(self, value, destinations, axis, options):
    """See base class."""
    return self._choose_ops(value)._gather(  # pylint: disable=protected-access
      value,
      destinations=destinations,
      axis=axis,
      options=self._options.merge(options),
    )

  def gather_shared(self, value, destinations, axis):
    """See base class: it is the value itself."""
    del destinations, axis
    return value

  def sum_on_first(self, columns):
    """Sums columns of tensors, one a device, on the first of them."""
    pairs = [
      (_tf_internal.PerReplica(row), self.devices[0])
      for row in zip(*columns, strict=True)
    ]
    return self.reduce_distributed(_SUM, pairs, None)


class WorkerReducer(Reducer):
  """Adds up values of the devices of all workers."""

  def __init__(
    self, local: DeviceReducer, communicator: communicator_lib.Communicator
  ):
    self.devices = local.devices
    self._communicator = communicator

  @property
  def num_replicas(self) -> int:
    """Number of replicas of all workers."""
    return len(self.devices) * self._communicator.world_size

  def per_replica(self, value):
    """See base class: a tensor of the only local replica is one."""
    if (
      len(self.devices) > 1
      or not tf.is_tensor(value)
      or isinstance(value, tf.distribute.DistributedValues)
    ):
      return value
    return _tf_internal.PerReplica((value,))

  def reduce_distributed(self, reduce_op, pairs, options):
    """See base class."""
    is_mean = reduce_op == _MEAN
    values = [_components(value) for value, _ in pairs]
    are_dense = [not isinstance(v[0], tf.IndexedSlices) for v in values]
    dense = list(itertools.compress(values, are_dense))
    gradients = _gradients(options, are_dense)
    sums = iter(self._sum_dense(dense, is_mean, gradients))
    reduced = [
      self._gather_slices(v, is_mean)
      if isinstance(v[0], tf.IndexedSlices)
      else next(sums)
      for v in values
    ]
    return [
      self._place(columns, value, destinations)
      for columns, (value, destinations) in zip(reduced, pairs, strict=True)
    ]

  def reduce_shared(self, reduce_op, value, destinations):
    """See base class."""
    del destinations
    value = tf.convert_to_tensor(value)
    total = self._communicator.combine(value, 'sum', 'host_value')
    if reduce_op == _MEAN:
      return executor.divide(total, self._communicator.world_size)
    return total

  def gather_distributed(self, value, destinations, axis, options):
    """See base class."""
    del options
    with tf.device('CPU:0'):
      local = tf.concat([tf.convert_to_tensor(v) for v in value.values], axis)
      # Lengths may differ along the axis, which the link wants to come first.
      rank = local.shape.rank
      order = [axis % rank, *(i for i in range(rank) if i != axis % rank)]
      gathered = self._communicator.all_gather(
        tf.transpose(local, order), f'gather/axis_{axis}'
      )
      back = [order.index(i) for i in range(rank)]
      gathered = tf.transpose(gathered, back)
    return self._place([gathered], value, destinations)

  def gather_shared(self, value, destinations, axis):
    """See base class."""
    value = _tf_internal.PerReplica((tf.convert_to_tensor(value),))
    return self.gather_distributed(value, destinations, axis, None)

  def _sum_dense(self, values, is_mean, gradients):
    """For each value its sum (or mean) over all replicas, by local device."""
    if not values:
      return []
    for value in values:
      # What one worker would send as numbers, and several cannot add.
      if value[0].dtype in (tf.bool, tf.string):
        raise errors.UnsupportedOptionError(
          f'a reduction of {value[0].dtype.name} values over replicas',
          'numbers',
          'convert them first: tf.cast(value, tf.int32)',
        )

    def shares(tensors, halves):
      # 16-bit floats may overflow in a sum whose mean is well in range.
      return [
        executor.divide(t, self.num_replicas)
        if is_mean and executor.is_half(t.dtype) == halves
        else t
        for t in tensors
      ]

    columns = []
    for device, column in zip(
      self.devices, zip(*values, strict=True), strict=True
    ):
      with tf.device(device):
        columns.append(shares(column, halves=True))
    columns = self._communicator.all_reduce(columns, 'reduce', gradients)
    return [shares(row, halves=False) for row in zip(*columns, strict=True)]

  def _gather_slices(self, slices, is_mean):
    """Concatenates `tf.IndexedSlices` of all replicas of all workers."""
    with tf.device('CPU:0'):
      values = tf.concat([s.values for s in slices], 0)
      indices = tf.concat([s.indices for s in slices], 0)
      if is_mean:
        values = executor.divide(values, self.num_replicas)
      gathered = tf.IndexedSlices(
        self._communicator.all_gather(values, 'slices/values'),
        self._communicator.all_gather(indices, 'slices/indices'),
        slices[0].dense_shape,
      )
    return [gathered] * len(self.devices)

  def _place(self, columns, value, destinations):
    """Copies a reduced value to where it is wanted."""
    devices = self.devices
    if destinations is not value:
      devices = tuple(_tf_internal.get_devices_from(destinations))
    copies = []
    for i, device in enumerate(devices):
      with tf.device(device):
        source = columns[i] if len(devices) == len(columns) else columns[0]
        copies.append(
          tf.nest.map_structure(tf.identity, source, expand_composites=True)
        )
    if len(copies) == 1:
      return copies[0]
    return _tf_internal.regroup(tuple(copies), wrap_class=_tf_internal.Mirrored)


def _gradients(options, which) -> gradient_reducer.Gradients | None:
  """What those of the values are the gradients of, if they are."""
  if not isinstance(options, gradient_reducer.Gradients):
    return None
  variables = itertools.compress(options.variables, which)
  return gradient_reducer.Gradients(variables, options.writes)


def _components(value):
  """The tensors of a distributed value, or of one that is none."""
  if isinstance(value, tf.distribute.DistributedValues):
    return [
      v if isinstance(v, tf.IndexedSlices) else tf.convert_to_tensor(v)
      for v in value.values
    ]
  return [tf.convert_to_tensor(value)]
