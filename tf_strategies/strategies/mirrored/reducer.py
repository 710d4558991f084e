"""Reduces values over local devices and workers, without padding rows.

A strategy has one `Reducer`, which all of TensorFlow's hooks call. It excludes
the contributions of replicas without rows. It is a `DeviceReducer` (the devices
of this process, by a cross-device op) or a `WorkerReducer` (a `DeviceReducer` and
a `Communicator` between processes).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.cross_device import executor
from tf_strategies.spmd.site import Site
from tf_strategies.strategies import communicator as communicator_lib

_SUM = tf.distribute.ReduceOp.SUM
_MEAN = tf.distribute.ReduceOp.MEAN


# TensorFlow's public name makes objects of a private class.
class Gradients(type(tf.distribute.experimental.CommunicationOptions())):
  """Tells a link that the tensors that it sums are gradients.

  Args:
    names: for each tensor, the name of the variable.
  """

  def __init__(self, names: Sequence[str]):
    super().__init__()
    self.names = names


def names_of(variables: Iterable[Any]) -> list[str]:
  """Returns the names of variables, for timelines."""
  return [getattr(v, 'path', v.name) for v in variables]


@dataclasses.dataclass(eq=False)
class ReplicaRun:
  """The replicas of one `strategy.run`, of which some may have no rows.

  Attributes:
    sites: sites of this process's replicas. None if every replica of every process
      is known to have rows.
    num_with_rows: number of all replicas that have rows, float32, at least one.
  """

  sites: Sequence[Site] | None = None
  num_with_rows: tf.Tensor | None = None


class _Thread(threading.local):
  run: ReplicaRun | None = None
  are_reduced = False


_state = _Thread()


def current_run() -> ReplicaRun | None:
  """Returns the run that the calling thread works for, if any."""
  return _state.run


@contextlib.contextmanager
def running(run: ReplicaRun) -> Iterator[None]:
  """Makes `run` the current one of this thread."""
  before, _state.run = _state.run, run
  try:
    yield
  finally:
    _state.run = before


def are_gradients_reduced() -> bool:
  """Returns whether the calling thread is inside `gradients_reduced()`."""
  return _state.are_reduced


@contextlib.contextmanager
def gradients_reduced() -> Iterator[None]:
  """Makes reductions do nothing, as values are equal on all replicas."""
  before, _state.are_reduced = _state.are_reduced, True
  try:
    yield
  finally:
    _state.are_reduced = before


def current_replica_id() -> int | None:
  """Returns the replica of the calling thread, or None in cross-replica context."""
  thread = threading.current_thread()
  if isinstance(thread, _tf_internal.MirroredReplicaThread):
    return thread.replica_id
  return None


def in_branch_of_replica() -> bool:
  """Returns whether a replica is building a graph inside its own, e.g. for a
  `tf.cond`.

  A merge call brings all replicas together in the graph in which they were
  started. From a branch of one replica's graph, no tensors of other replicas
  are visible.
  """
  thread = threading.current_thread()
  return (
    isinstance(thread, _tf_internal.MirroredReplicaThread)
    and not thread.in_eager
    and not tf.executing_eagerly()
    and tf.compat.v1.get_default_graph() is not thread.graph
  )


def branch_error() -> errors.UnsupportedOptionError:
  """Returns the error for replicas that would have to meet inside of a branch.

  Each replica builds its own branch, without the tensors of other replicas.
  """
  return errors.UnsupportedOptionError(
    'optimizer.apply, or another reduction, in a tf.cond, a loop or a tf.function '
    'of a replica',
    'control flow in which replicas do not wait for each other',
    'pass the step to strategy.step in place of strategy.run, or write the control '
    'flow around strategy.run',
  )


class Reducer:
  """Reduces and gathers values of all replicas.

  Replicas without rows contribute nothing: their part of a sum is zero, and a
  mean is taken over the replicas that have rows.

  Attributes:
    devices: devices of this process's replicas.
    num_replicas: number of all replicas.
  """

  devices: Sequence[str]
  num_replicas: int

  def reduce(self, reduce_op, value, destinations, options):
    """Reduces each value of a structure; see `StrategyExtended.reduce_to`."""
    value = tf.nest.map_structure(self.per_replica, value)
    if reduce_op == _MEAN and _tf_internal.is_mirrored(value):
      return value

    def reduce_one(value):
      if not isinstance(value, tf.distribute.DistributedValues):
        return self.reduce_shared(reduce_op, value, destinations)
      return self.batch_reduce(reduce_op, [(value, destinations)], options)[0]

    return tf.nest.map_structure(reduce_one, value)

  def batch_reduce(self, reduce_op, pairs, options):
    """Reduces values; see `StrategyExtended.batch_reduce_to`."""
    run = current_run()
    is_masked = run is not None and run.sites is not None
    values = [
      self._once(reduce_op, self.per_replica(value)) for value, _ in pairs
    ]
    if is_masked:
      values = _masked(run, values)
    # If a destination is the value itself, it means the value's devices.
    pairs = [
      (new, new if destination is old else destination)
      for new, (old, destination) in zip(values, pairs, strict=True)
    ]
    if reduce_op == _SUM or not is_masked:
      return self.reduce_each(reduce_op, pairs, options)
    sums = self.reduce_each(_SUM, pairs, options)
    return [_divided(total, run.num_with_rows) for total in sums]

  def _once(self, reduce_op, value):
    """Returns a tensor that all local replicas share, so that it counts once.

    It was created outside the step. `tf.distribute.MirroredStrategy` counts it
    once.
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
    run = current_run()
    if run is not None and run.sites is not None:
      pairs = zip(run.sites, value.values, strict=True)
      value = _tf_internal.PerReplica(
        [site.real_rows(tensor, axis) for site, tensor in pairs]
      )
      destinations = value if len(run.sites) > 1 else destinations
    return self.gather_each(value, destinations, axis, options)


class DeviceReducer(Reducer):
  """Adds values of the devices of this process with a cross-device op.

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

  def per_replica(self, value):
    """Returns the distributed value that `value` represents, or `value`."""
    return value

  def reduce_each(self, reduce_op, pairs, options):
    """Reduces distributed values, each to its destinations."""
    return self._choose_ops(pairs[0][0]).batch_reduce(
      reduce_op, pairs, options=self._options.merge(options)
    )

  def reduce_shared(self, reduce_op, value, destinations):
    """Reduces a value that is the same on every replica."""
    try:
      return _tf_internal.reduce_non_distributed_value(
        reduce_op, value, destinations, self.num_replicas
      )
    except ValueError as error:
      raise errors.UnsupportedOptionError(
        f'{value!r}',
        f'values of replicas to reduce with {reduce_op}',
        'use a result of strategy.step as it is: it is of the whole batch',
      ) from error

  def gather_each(self, value, destinations, axis, options):
    """Concatenates the components of a distributed value."""
    return self._choose_ops(value)._gather(  # pylint: disable=protected-access
      value,
      destinations=destinations,
      axis=axis,
      options=self._options.merge(options),
    )

  def gather_shared(self, value, destinations, axis):
    """Returns a value that belongs to no replica unchanged."""
    del destinations, axis
    return value

  def sum_on_first(self, columns):
    """Sums columns of tensors, one for each device, on the first device."""
    pairs = [
      (_tf_internal.PerReplica(row), self.devices[0])
      for row in zip(*columns, strict=True)
    ]
    return self.reduce_each(_SUM, pairs, None)


class WorkerReducer(Reducer):
  """Adds values of the devices of all workers."""

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
    """Returns a tensor of the only local replica as a distributed value."""
    if (
      len(self.devices) > 1
      or not tf.is_tensor(value)
      or isinstance(value, tf.distribute.DistributedValues)
    ):
      return value
    return _tf_internal.PerReplica((value,))

  def reduce_each(self, reduce_op, pairs, options):
    """Reduces distributed values, each to its destinations."""
    is_mean = reduce_op == _MEAN
    values = [
      [
        v if isinstance(v, tf.IndexedSlices) else tf.convert_to_tensor(v)
        for v in value.values
      ]
      for value, _ in pairs
    ]
    are_dense = [not isinstance(v[0], tf.IndexedSlices) for v in values]
    dense = list(itertools.compress(values, are_dense))
    gradients = ()
    if isinstance(options, Gradients):
      gradients = list(itertools.compress(options.names, are_dense))
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
    """Combines a value that each worker has once, such as a Python number."""
    del destinations
    value = tf.convert_to_tensor(value)
    total = self._communicator.sum(value, 'host_value')
    if reduce_op == _MEAN:
      return executor.divide(total, self._communicator.world_size)
    return total

  def gather_each(self, value, destinations, axis, options):
    """Concatenates the components of all workers' values."""
    del options
    parts = [tf.convert_to_tensor(v) for v in value.values]
    gathered = self._communicator.gather(parts, axis, f'gather/axis_{axis}')
    return self._place([gathered], value, destinations)

  def gather_shared(self, value, destinations, axis):
    """Gathers a value that each worker has once."""
    value = _tf_internal.PerReplica((tf.convert_to_tensor(value),))
    return self.gather_each(value, destinations, axis, None)

  def _sum_dense(self, values, is_mean, gradients):
    """Returns, by local device, each value's sum (or mean) over all replicas."""
    if not values:
      return []
    for value in values:
      # One worker could send these as numbers, but several cannot add them.
      if value[0].dtype in (tf.bool, tf.string):
        raise errors.UnsupportedOptionError(
          f'a reduction of {value[0].dtype.name} values over replicas',
          'numbers',
          'convert them first: tf.cast(value, tf.int32)',
        )
    count = self.num_replicas if is_mean else 1
    columns = []
    for device, column in zip(
      self.devices, zip(*values, strict=True), strict=True
    ):
      with tf.device(device):
        columns.append(executor.divide_some(column, count, halves=True))
    columns = self._communicator.all_reduce(columns, 'reduce', gradients)
    rows = zip(*columns, strict=True)
    return [executor.divide_some(row, count, halves=False) for row in rows]

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
    """Copies a reduced value to its destinations."""
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


def _masked(run: ReplicaRun, values):
  """Returns values to which replicas without rows contribute nothing."""
  masked = list(values)
  maskable = [
    i for i, v in enumerate(values) if isinstance(v, _tf_internal.PerReplica)
  ]
  columns = [
    _contributions(site, [values[i].values[replica] for i in maskable])
    for replica, site in enumerate(run.sites)
  ]
  for i, *parts in zip(maskable, *columns, strict=True):
    masked[i] = _tf_internal.PerReplica(parts)
  return masked


def _contributions(site, tensors):
  """Returns one replica's tensors, or zeros and empty slices if it has no rows."""
  dense = site.contributions([t for t in tensors if isinstance(t, tf.Tensor)])
  dense = iter(dense)
  return [
    next(dense)
    if isinstance(t, tf.Tensor)
    else tf.IndexedSlices(
      site.real_rows(t.values), site.real_rows(t.indices), t.dense_shape
    )
    for t in tensors
  ]


def _divided(value, count: tf.Tensor):
  """Returns a tensor or mirrored value divided by `count`, in its dtype."""
  if not isinstance(value, tf.distribute.DistributedValues):
    return value / tf.cast(count, value.dtype)
  divided = []
  for tensor in value.values:
    with tf.device(tensor.device):
      divided.append(_divided(tensor, count))
  return _tf_internal.Mirrored(divided)
