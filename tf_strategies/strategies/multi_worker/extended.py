"""What changes in the mirrored implementation when there are several workers.

Each worker is a process of its own that mirrors variables on its devices. What
crosses workers goes through `Workers`; everything else is
`ExactMirroredExtended`, which sees this worker's replicas only.
"""

from __future__ import annotations

import contextlib

import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.cross_device import executor
from tf_strategies.strategies.mirrored import empty_replicas, replica_run
from tf_strategies.strategies.mirrored import extended as mirrored_extended
from tf_strategies.strategies.multi_worker import (
  communicator as communicator_lib,
)
from tf_strategies.strategies.multi_worker import input as input_lib


class MultiWorkerExtended(mirrored_extended.ExactMirroredExtended):
  """Mirrored replicas on this worker's devices, in step with other workers.

  Args:
    container_strategy: the strategy that this implements.
    devices: full names of this worker's devices.
    cross_device_ops: what reductions between them go through.
    make_communicator: called with this object, returns the link to the others.
    share_initial_values: whether variables start from the chief's values.
  """

  def __init__(
    self,
    container_strategy,
    devices,
    cross_device_ops,
    make_communicator,
    share_initial_values: bool = True,
  ):
    super().__init__(container_strategy, devices, cross_device_ops)
    self._share_initial_values = share_initial_values
    self._input = input_lib.WorkerInput(self)
    self._communicator: communicator_lib.Communicator = make_communicator(self)

  @property
  def communicator(self) -> communicator_lib.Communicator:
    """The link to the other workers."""
    return self._communicator

  # Who is who. Replicas are numbered over workers: rank * local + local id.

  @property
  def _num_replicas_in_sync(self):
    return len(self._devices) * self._communicator.world_size

  def _get_replica_id_in_sync_group(self, replica_id):
    return self._communicator.rank * len(self._devices) + replica_id

  def _get_local_replica_id(self, replica_id_in_sync_group):
    return replica_id_in_sync_group - self._communicator.rank * len(
      self._devices
    )

  def _in_multi_worker_mode(self):
    # Keras then averages its logs over workers and gathers predictions.
    return True

  @property
  def experimental_between_graph(self):
    """Every worker runs the program."""
    return True

  @property
  def should_checkpoint(self):
    """Only the chief writes checkpoints."""
    return self._communicator.rank == 0

  @property
  def should_save_summary(self):
    """Only the chief writes summaries."""
    return self._communicator.rank == 0

  # What tfs.keras.DistributedOptimizer asks of a strategy.

  @contextlib.contextmanager
  def gradients_reduced(self, gradients=()):
    """See base class. A step that fails must not have counted itself."""
    tensors = tf.nest.flatten(gradients, expand_composites=True)
    with super().gradients_reduced(gradients):
      if tf.executing_eagerly():
        yield
      else:
        with tf.control_dependencies([t for t in tensors if t is not None]):
          yield

  def prefers_dense(self, slices: tf.IndexedSlices) -> bool:
    """Whether all replicas' slices are more to send than the dense sum.

    Every worker must answer alike, so only static shapes count.
    """
    rows = slices.values.shape[0]
    dense_shape = tf.get_static_value(slices.dense_shape)
    if rows is None or dense_shape is None or tf.executing_eagerly():
      return False
    size = slices.values.dtype.size
    dense_bytes = size * int(dense_shape.prod())
    row_bytes = dense_bytes // max(1, int(dense_shape[0]))
    pair_bytes = row_bytes + slices.indices.dtype.size
    # A ring sends the dense sum twice, less what is there already.
    return self._num_replicas_in_sync * rows * pair_bytes > 2 * dense_bytes

  # Where code runs.

  def _make_run(self, args, is_keras_step):
    return replica_run.ReplicaRun.of(
      args, len(self._devices), is_keras_step, self._share_rows
    )

  def _share_rows(self, rows):
    """The rows of every replica of every worker, by replica id."""
    before = self._communicator.rank * len(rows)
    after = self._num_replicas_in_sync - before - len(rows)
    with tf.device('CPU:0'):
      local = tf.stack([tf.cast(n, tf.int32) for n in rows])
      padded = tf.pad(local, [[before, after]])
      everyone = self._communicator.combine(padded, 'sum', 'rows')
      if tf.executing_eagerly():
        return tuple(everyone.numpy().tolist())
      return tuple(tf.unstack(everyone))

  def _trim(self, run, outputs):
    if len(self._devices) > 1 or run.has_rows is None:
      return super()._trim(run, outputs)
    # With one device an output is a plain tensor, which the base class takes
    # for a value that belongs to no replica.
    wrapped = tf.nest.map_structure(self._as_per_replica, outputs)
    trimmed = super()._trim(run, wrapped)
    return tf.nest.map_structure(
      lambda new, old: old if new is old else new.values[0], trimmed, outputs
    )

  def _agree_on_finite(self, run, finite):
    local = super()._agree_on_finite(run, self._as_per_replica(finite))
    with tf.device('CPU:0'):
      everywhere = self._communicator.combine(
        tf.cast(local, tf.int32), 'min', 'finite'
      )
      return tf.cast(everywhere, tf.bool)

  # How values are reduced.

  def _as_per_replica(self, value):
    """A tensor of the only replica as the distributed value that it is."""
    if len(self._devices) > 1 or not tf.is_tensor(value):
      return value
    if isinstance(value, tf.distribute.DistributedValues):
      return value
    return _tf_internal.PerReplica((value,))

  def _reduce_to(self, reduce_op, value, destinations, options):
    is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
    if is_mean and _tf_internal.is_mirrored(value):
      return value

    def reduce_one(value):
      if not isinstance(value, tf.distribute.DistributedValues):
        return self._reduce_host_value(is_mean, value)
      return self._reduce_batch(reduce_op, [(value, destinations)], options)[0]

    return tf.nest.map_structure(
      lambda v: reduce_one(self._as_per_replica(v)), value
    )

  def _reduce_host_value(self, is_mean, value):
    """Combines a value that each worker has once, such as a Python number."""
    value = tf.convert_to_tensor(value)
    summed = self._communicator.combine(value, 'sum', 'host_value')
    if is_mean:
      return executor.divide(summed, self._communicator.world_size)
    return summed

  def reduce_report(self, reduce_op, value):
    """Sum or mean over all replicas of a scalar that is only reported."""
    value = self._as_per_replica(value)
    with tf.device('CPU:0'):
      local = tf.add_n([tf.identity(v) for v in _components(value)])
      total = self._communicator.combine(local, 'sum', 'report', is_report=True)
      if reduce_op in (tf.distribute.ReduceOp.MEAN, 'MEAN'):
        return executor.divide(total, self._num_replicas_in_sync)
      return total

  def _reduce_batch(self, reduce_op, pairs, options):
    wrapped = [self._as_per_replica(value) for value, _ in pairs]
    pairs = [
      (new, new if destination is old else destination)
      for new, (old, destination) in zip(wrapped, pairs, strict=True)
    ]
    return super()._reduce_batch(reduce_op, pairs, options)

  def _batch_reduce(self, reduce_op, pairs, options):
    is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
    values = [_components(value) for value, _ in pairs]
    is_sparse = [isinstance(v[0], tf.IndexedSlices) for v in values]
    dense = [
      v for v, sparse in zip(values, is_sparse, strict=True) if not sparse
    ]
    summed = iter(self._sum_dense(dense, is_mean))
    reduced = []
    for value, sparse in zip(values, is_sparse, strict=True):
      if sparse:
        reduced.append(self._gather_slices(value, is_mean))
      else:
        reduced.append(next(summed))
    return [
      self._place(columns, value, destinations)
      for columns, (value, destinations) in zip(reduced, pairs, strict=True)
    ]

  def _sum_dense(self, values, is_mean):
    """For each value its sum (or mean) over all replicas, by local device."""
    if not values:
      return []
    _check_summable(values)
    count = self._num_replicas_in_sync
    # 16-bit floats may overflow in a sum whose mean is well in range.
    halves = [is_mean and executor.is_half(v[0].dtype) for v in values]
    columns = []
    for i, device in enumerate(self._devices):
      with tf.device(device):
        columns.append(
          [
            executor.divide(v[i], count) if half else tf.convert_to_tensor(v[i])
            for v, half in zip(values, halves, strict=True)
          ]
        )
    columns = self._communicator.all_reduce(columns, 'reduce')
    results = []
    for i, half in enumerate(halves):
      row = [column[i] for column in columns]
      if is_mean and not half:
        row = [executor.divide(t, count) for t in row]
      results.append(row)
    return results

  def _gather_slices(self, slices, is_mean):
    """Concatenates `tf.IndexedSlices` of all replicas of all workers."""
    with tf.device('CPU:0'):
      values = tf.concat([s.values for s in slices], 0)
      indices = tf.concat([s.indices for s in slices], 0)
      if is_mean:
        values = executor.divide(values, self._num_replicas_in_sync)
      gathered = tf.IndexedSlices(
        self._communicator.all_gather(values, 'slices/values'),
        self._communicator.all_gather(indices, 'slices/indices'),
        slices[0].dense_shape,
      )
    return [gathered] * len(self._devices)

  def _place(self, columns, value, destinations):
    """Copies a reduced value to where it is wanted."""
    devices = self._devices
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

  def _gather_to_implementation(self, value, destinations, axis, options):
    del options
    value = self._as_per_replica(value)
    if not isinstance(value, tf.distribute.DistributedValues):
      value = _tf_internal.PerReplica((tf.convert_to_tensor(value),))
    run = replica_run.current()
    if run is not None and run.has_rows is not None:
      value = empty_replicas.drop_rows(run, value, axis, self._devices)
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

  def _all_reduce_in_branch(self, reduce_op, value, options):
    replica_id = replica_run.current_replica_id()
    run = replica_run.current()
    tensors = tf.nest.flatten(value)
    count = self._num_replicas_in_sync
    if run is not None and run.has_rows is not None:
      tensors = empty_replicas.mask_tensors(run, replica_id, tensors)
      count = run.num_with_rows()
    summed = self._communicator.all_reduce_replica(
      tensors, replica_id, self._communication_options.merge(options)
    )
    if reduce_op == tf.distribute.ReduceOp.MEAN:
      summed = [t / tf.cast(count, t.dtype) for t in summed]
    return tf.nest.pack_sequence_as(value, summed)

  def share_from_chief(self, variables) -> None:
    """Gives variables the chief's values, eagerly, on every worker."""
    values = [
      self._communicator.broadcast(tf.convert_to_tensor(v.numpy()), 0, 'share')
      for v in variables
    ]
    with self._container_strategy().scope():
      for variable, value in zip(variables, values, strict=True):
        variable.assign(value)

  def local_all_reduce(self, tensors, replica_id, options):
    """Sums a local replica's tensors with the others' inside a branch."""
    return self._collective_ops._all_reduce(  # pylint: disable=protected-access
      tf.distribute.ReduceOp.SUM, list(tensors), replica_id, options
    )

  def local_reduce(self, columns):
    """Sums columns of tensors, one a local device, on the first of them."""
    pairs = [
      (_tf_internal.PerReplica(row), self._devices[0])
      for row in zip(*columns, strict=True)
    ]
    return self._cross_device_ops.batch_reduce(
      tf.distribute.ReduceOp.SUM, pairs, options=self._communication_options
    )

  # How variables are created, and what feeds the replicas.

  def _get_variable_creator_initial_value(
    self, replica_id, device, primary_var, **kwargs
  ):
    if replica_id > 0 or not self._share_initial_values:
      return super()._get_variable_creator_initial_value(
        replica_id, device, primary_var, **kwargs
      )

    def initial_value():
      value = kwargs['initial_value']
      value = value() if callable(value) else value
      value = _tf_internal.unwrap_checkpoint_value(value)
      tensor = tf.convert_to_tensor(value, dtype=kwargs.get('dtype'))
      # Without its name, in which Keras counts the models of a process.
      return self._communicator.broadcast(tensor, 0, 'initial_value')

    return initial_value

  def _experimental_distribute_dataset(self, dataset, options):
    return self._input.distribute(dataset, options)

  def _distribute_datasets_from_function(self, dataset_fn, options):
    return self._input.distribute_from_function(dataset_fn, options)

  def _experimental_distribute_values_from_function(self, value_fn):
    values = []
    for i in range(len(self._devices)):
      context = tf.distribute.experimental.ValueContext(
        self._get_replica_id_in_sync_group(i), self._num_replicas_in_sync
      )
      with tf.device(self._devices[i]):
        values.append(value_fn(context))
    return _tf_internal.regroup(tuple(values), always_wrap=True)


def _check_summable(values):
  """Refuses what one worker would send as numbers, and several cannot add."""
  for value in values:
    dtype = value[0].dtype
    if dtype in (tf.bool, tf.string):
      raise errors.UnsupportedOptionError(
        f'a reduction of {dtype.name} values over replicas',
        'numbers',
        'convert them first: tf.cast(value, tf.int32)',
      )


def _components(value):
  """The tensors of a distributed value, or of one that is none."""
  if isinstance(value, tf.distribute.DistributedValues):
    return [
      v if isinstance(v, tf.IndexedSlices) else tf.convert_to_tensor(v)
      for v in value.values
    ]
  return [tf.convert_to_tensor(value)]
