"""What a parameter server strategy does with variables and replicas."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal, _tf_internal, errors, option_checks
from tf_strategies.collectives import schedule
from tf_strategies.keras import optimizer_wrapper
from tf_strategies.keras.tables import row_updates
from tf_strategies.strategies.parameter_server import (
  partitioned,
  traced_step,
  variables,
)

# What `ServerVariable` passes on; the rest of a creator's arguments choose the
# kind of variable, which is ours.
_ARGUMENTS = (
  'initial_value',
  'trainable',
  'name',
  'dtype',
  'constraint',
  'synchronization',
  'aggregation',
  'shape',
  'validate_shape',
  'distribute_strategy',
  'experimental_enable_variable_lifting',
)


# A small model is on one server: each server costs a step several messages, which
# take longer than the bytes of small variables.
SPREAD_BYTES = 1 << 20


class Placement:
  """Chooses a server for each variable, and knows the load of all.

  Variables come one by one. Each goes to the first of the servers with the fewest
  whole `SPREAD_BYTES` so far (Graham's list scheduling: the fullest server holds at
  most the mean plus the largest variable plus `SPREAD_BYTES`). TensorFlow counts
  variables instead: with kernel, bias, kernel, bias and two servers, every kernel
  lands on server 0. Scalars go to server 0, which counts steps and metrics. `load` is
  the bytes on each server.
  """

  def __init__(self, num_servers: int):
    self.load = [0] * num_servers

  def place(
    self, shape: Sequence[int], dtype: tf.DType, server: int | None = None
  ) -> int:
    """Returns the server of a new variable; `server` if it must be there. O(servers)."""
    if server is None:
      filled = [load // SPREAD_BYTES for load in self.load]
      server = filled.index(min(filled)) if shape else 0
    self.load[server] += math.prod(shape) * dtype.size
    return server


class ReplicaContext(_tf_internal.OneDeviceContext):
  """The context of the one replica that a worker is."""

  def all_reduce(self, reduce_op, value, options=None):
    """Returns the value itself: each worker is the only replica of its step."""
    del reduce_op, options
    trace = traced_step.current()
    if trace is not None:
      trace.reduces = True

    def as_tensor(value):
      is_sparse = isinstance(value, tf.IndexedSlices)
      return value if is_sparse else tf.convert_to_tensor(value)

    return tf.nest.map_structure(as_tensor, value)


class ParameterServerExtended(_tf_internal.ParameterServerExtended):
  """The implementation behind `ParameterServerStrategy`."""

  # See `_keras_internal`: Keras draws no batch to make variables.
  builds_from_specs = True
  makes_variables_in_steps = False

  def __init__(
    self,
    strategy: Any,
    registry: MutableMapping[int, variables.ServerVariable],
    make_step_function: Callable[[Any], Any],
  ):
    # pylint: disable=protected-access
    resolver = strategy._cluster_resolver
    partitioner = strategy.options.variable_partitioner
    with _tf_internal.without_notices():
      super().__init__(strategy, resolver, partitioner)
    # What client libraries read, beside `_num_workers`.
    self._cluster_resolver = resolver
    self._cluster_spec = resolver.cluster_spec()
    self._task_type, self._task_id = resolver.task_type, resolver.task_id
    self._is_chief, self._id_in_cluster = True, 0
    self.placement = Placement(self._num_ps)
    self._partitioner = partitioner or partitioned.large_tables(self._num_ps)
    self._drained = strategy._drained
    self._on_write = strategy.engine.note_write
    # Makes what Keras calls for the steps of a model.
    self.make_step_function = make_step_function
    self._registry = registry
    # Steps are run by our own threads, not by `ClusterCoordinator`.
    self._allow_run_without_coordinator = True

  def _create_variable(self, next_creator, **kwargs):
    value, shape = kwargs.get('initial_value'), kwargs.get('shape')
    # `tf.saved_model.load` gives a value later.
    is_loaded = value is None and tf.TensorShape(shape).is_fully_defined()
    if kwargs.get('per_worker_variable') or (value is None and not is_loaded):
      return super()._create_variable(next_creator, **kwargs)
    if is_loaded:
      # Made on the server: a table does not pass through this process.
      value = functools.partial(tf.zeros, shape, kwargs['dtype'])
      kwargs['initial_value'] = value
    if not callable(value) and not tf.executing_eagerly():
      kwargs['initial_value'] = _tf_internal.lift(value)
    # A function that makes variables is traced with those that it has made.
    with tf.init_scope():
      return self._create_lifted(kwargs, is_loaded)

  def _create_lifted(self, kwargs, is_loaded):
    reference, name = kwargs.get('colocate_with'), kwargs.get('name')
    arguments = {k: kwargs[k] for k in _ARGUMENTS if kwargs.get(k) is not None}
    shape, dtype = _shape_and_dtype(arguments)
    servers = [part.server for part in getattr(reference, 'parts', ())]
    if not servers:
      # The functions of a loaded model have one handle of each.
      count = 1 if is_loaded else self._num_parts(shape, dtype, name)
      servers = [None] * count
    elif shape != tuple(reference.shape):
      servers = servers[:1]
    if len(servers) > 1:
      return self._create_parts(arguments, shape, dtype, servers)
    server = self.placement.place(shape, dtype, *servers)
    logging.debug('variable %s of shape %s on ps %d', name, shape, server)
    return self._create_on(server, **arguments)

  def _create_on(self, server: int, **arguments) -> variables.ServerVariable:
    with _tf_internal.no_colocation():
      variable = variables.ServerVariable(
        server=server,
        drained=self._drained,
        on_write=self._on_write,
        **arguments,
      )
    self._registry[id(variable)] = variable
    return variable

  def _create_parts(self, arguments, shape, dtype, servers):
    """A variable cut along its first axis, one part a server in turn."""
    # As TensorFlow's 'div' strategy: ids of one part are consecutive.
    sizes = schedule.chunk_sizes(shape[0], len(servers))
    value = arguments.pop('initial_value')
    values = partitioned.initial_values(value, shape, dtype, sizes)
    name = arguments.pop('name', 'Variable')
    for of_parts in ('dtype', 'shape'):
      arguments.pop(of_parts, None)
    parts = []
    for i, (size, rows) in enumerate(zip(sizes, values, strict=True)):
      part = self._create_on(
        self.placement.place((size, *shape[1:]), dtype, servers[i]),
        initial_value=rows,
        dtype=dtype,
        name=f'{name}/part_{i}',
        trainable=False,
      )
      parts.append(part)
    return partitioned.PartitionedVariable(parts, name, **arguments)

  def make_row_table(self, variable, initial_rows) -> partitioned.ServerTable:
    """The rows of a `DynamicEmbedding`, on all servers."""
    table = partitioned.ServerTable(
      variable, initial_rows, self._num_ps, self._drained
    )
    self._registry.update({id(shard): shard for shard in table.shards})
    return table

  def _num_parts(self, shape, dtype, name) -> int:
    """Into how many parts a variable is cut."""
    if not shape:
      return 1
    found = self._partitioner(shape=tf.TensorShape(shape), dtype=dtype)
    if (
      not isinstance(found, list | tuple)
      or len(found) != len(shape)
      or any(not isinstance(n, int | np.integer) or n < 1 for n in found)
      or any(n != 1 for n in found[1:])
    ):
      raise errors.UnsupportedOptionError(
        f'{found!r} from variable_partitioner for variable {name!r} of shape '
        f'{shape}',
        'a list with one number of parts for each axis, above 1 on the first '
        'axis only',
        'use one of tf.distribute.experimental.partitioners',
      )
    return min(int(found[0]), shape[0])

  def _in_multi_worker_mode(self):
    # TensorFlow's class answers by `_cluster_spec`, which is there for client
    # libraries only. True would wrap each batch of the one replica.
    return False

  @property
  def _retrace_functions_for_each_device(self):
    """Returns whether TensorFlow traces a function again that was traced elsewhere.

    A step does, because there a variable in parts is whole.
    """
    return traced_step.current() is not None

  def _call_for_each_replica(self, fn, args, kwargs):
    _keras_internal.refuse_keras_2(fn)
    with ReplicaContext(self._container_strategy(), replica_id_in_sync_group=0):
      return fn(*args, **kwargs)

  def _update(self, var, fn, args, kwargs, group):
    if traced_step.current() is not None:
      # On the copies that the worker has.
      with _tf_internal.UpdateContext(None):
        return fn(var, *args, **kwargs)
    optimizer = _keras_internal.optimizer_of(fn)
    if args and isinstance(args[0], tf.IndexedSlices):
      fn = row_updates.by_rows(optimizer, fn)
    in_parts = []
    if len(var.parts) > 1:
      kind = type(optimizer).__name__
      option_checks.check(
        kind not in optimizer_wrapper.WHOLE_VARIABLE_OPTIMIZERS,
        f'{kind} with partitioned variable {var.name!r}',
        'an optimizer that updates each element by itself, such as Adam or SGD',
        'use another optimizer, or cut no variable: '
        'variable_partitioner=lambda shape, dtype: [1] * len(shape)',
      )
      slots = _keras_internal.slots_of(optimizer, var) if optimizer else {}
      in_parts = [s for s in slots.values() if len(s.value.parts) > 1]
    result = None
    for i, (part, *of_part) in enumerate(
      zip(var.parts, *map(var.split, args), strict=True)
    ):
      with (
        _keras_internal.seen_as_part(in_parts, i),
        variables.updating(part.server),
      ):
        result = fn(part, *of_part, **kwargs)
    return result


def _shape_and_dtype(arguments) -> tuple[tuple[int, ...], tf.DType]:
  """Returns both for a new variable, if possible without making its value."""
  value = arguments['initial_value']
  dtype = arguments.get('dtype')
  if callable(value):
    shape = arguments.get('shape')
    if shape is None:
      shape = _keras_internal.initial_shape(value)
    if shape is not None and dtype is not None:
      return tuple(tf.TensorShape(shape)), tf.as_dtype(dtype)
    # Nothing tells the size: the value is made here, and sent.
    with tf.init_scope():
      value = _tf_internal.unwrap_checkpoint_value(value())
      value = tf.convert_to_tensor(value, dtype)
  value = arguments['initial_value'] = tf.convert_to_tensor(value, dtype)
  return tuple(value.shape), value.dtype
