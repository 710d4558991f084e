"""The only importer of `tensorflow.python`, with a reason for each symbol.

TensorFlow exports the classes that *use* a strategy, but not those that
implement one. The import of this file checks every symbol, and a missing one
raises an error that names it. The end of this file lists the methods of
TensorFlow's classes that this package overrides.
"""

import tensorflow as tf

from tf_strategies import _requirements, errors
from tf_strategies._tf_internal.cluster import (  # noqa: F401  For all others.
  before_sending_functions,
  clear_errors,
  connect_again,
  connected_cluster,
  incarnations,
  on_host,
  on_task,
  own_executor,
  without_notices,
)
from tf_strategies._tf_internal.cluster import eager_context as _eager_context
from tf_strategies._tf_internal.loading import change  # noqa: F401
from tf_strategies._tf_internal.loading import load as _load
from tf_strategies._tf_internal.tracing import (  # noqa: F401  For all others.
  OneDeviceContext,
  ResourceVariable,
  TrackedAsAnother,
  autograph_convert,
  call_with,
  compiled_operations,
  copy_op,
  create_now,
  elementwise_operations,
  extract_stack,
  functions_of,
  inlined,
  replace_captures,
  rewritten_once,
  spec_of_part,
  temporary_variable,
  trace,
  with_any_rows,
)

MirroredExtended = _load(
  'distribute.mirrored_strategy.MirroredExtended', 'the base of strategies'
)
call_for_each_replica = _load(
  'distribute.mirrored_run.call_for_each_replica', 'a thread a replica'
)
MirroredReplicaThread = _load(
  'distribute.mirrored_run._MirroredReplicaThread', 'the graph of a replica'
)
PerReplica = _load('distribute.values.PerReplica', 'one value a replica')
PerReplicaSpec = _load('distribute.values.PerReplicaSpec', 'the type of those')
Mirrored = _load('distribute.values.Mirrored', 'equal values everywhere')
MirroredVariable = _load(
  'distribute.values.MirroredVariable', 'variables with one copy a replica'
)
SyncOnReadVariable = _load(
  'distribute.values.SyncOnReadVariable', 'metrics, reduced when read'
)
is_mirrored = _load(
  'distribute.distribute_utils.is_mirrored', 'a mean of equal values'
)
regroup = _load(
  'distribute.distribute_utils.regroup', 'makes a distributed value'
)
get_devices_from = _load(
  'distribute.cross_device_ops.get_devices_from',
  'what a destination stands for',
)
resolve_device = _load(
  'distribute.device_util.resolve', 'the full name of a device'
)
_graph_or_parents_in_xla = _load(
  'ops.control_flow_util.GraphOrParentsInXlaContext', 'XLA calls no Python'
)
_CheckpointInitialValue = _load(
  'trackable.base.CheckpointInitialValue',
  'a variable that is created while a checkpoint is being restored',
)
shard_files = _load(
  'data.experimental.ops.distribute._AutoShardDataset', 'every n-th file'
)
compute_batch_size = _load(
  'data.experimental.ops.distribute.compute_batch_size',
  'the number of rows that a data set puts into a batch',
)
global_seed = _load(
  'eager.context.global_seed', 'workers that shuffle must have the same seed'
)
ParameterServerExtended = _load(
  'distribute.parameter_server_strategy_v2.ParameterServerStrategyV2Extended',
  'the base of the parameter server strategy',
)
UpdateContext = _load(
  'distribute.distribute_lib.UpdateContext', "updates on a variable's device"
)
DistributedDataset = _load(
  'distribute.input_lib.DistributedDataset', 'Keras knows it by name'
)
empty_batch = _load(
  'distribute.input_lib._dummy_tensor_fn', 'a batch without rows'
)
OwnedIterator = _load(
  'data.ops.iterator_ops.OwnedIterator',
  'raises where Python would loop forever',
)
UnaryUnchangedStructureDataset = _load(
  'data.ops.dataset_ops.UnaryUnchangedStructureDataset',
  'a data set with iterators of our own',
)
UninitializedVariable = _load(
  'ops.resource_variable_ops.UninitializedVariable', 'what loaders make instead'
)
BaseResourceVariable = _load(
  'ops.resource_variable_ops.BaseResourceVariable', 'a variable made of others'
)
_in_save_context = _load(
  'saved_model.save_context.in_save_context',
  'functions that are traced to save',
)
_lift_to_graph = _load(
  'eager.lift_to_graph.lift_to_graph',
  'the initial value of a variable that a function makes',
)
_UnliftableError = _load(
  'eager.lift_to_graph.UnliftableError', 'a value that depends on arguments'
)
_colocate_with = _load(
  'framework.ops.colocate_with', 'to place a variable wherever we want'
)
_variable_accessed = _load(
  'ops.resource_variable_ops.variable_accessed', 'lets tapes watch a read'
)
_record_operation = _load(
  'eager.record.record_operation',
  'a read from a copy has the gradient of a read from the variable',
)
stop_recording = _load(
  'eager.record.stop_recording', 'a copy is no part of a gradient'
)
_CollectiveKeys = _load(
  'distribute.cross_device_utils.CollectiveKeys',
  'numbers groups and instances of collectives alike on all workers',
)
_CollectiveReplicaLauncher = _load(
  'distribute.cross_device_utils.CollectiveReplicaLauncher',
  'keys of collectives that stay right when a worker retraces',
)
_all_reduce_v2 = _load(
  'ops.collective_ops.all_reduce_v2', 'takes max_subdivs_per_device'
)
host_of = _load(
  'distribute.device_util.get_host_for_device', 'the host of a device'
)
_coordination_config = _load(
  'distribute.collective_all_reduce_strategy.coordination_config_pb2',
  'a deadline for workers that do not come',
)
TPUExtended = _load(
  'distribute.tpu_strategy.TPUExtended', 'the base of the TPU strategy'
)
enclosing_tpu_context = _load(
  'distribute.tpu_util.enclosing_tpu_context', 'a TPU program is being built'
)
initialized_tpu_systems = _load(
  'tpu.tpu_strategy_util.get_initialized_tpu_systems',
  'rejects TPUs that were not initialised, on which ops hang',
)
apply_op = _load(
  'framework.op_def_library.apply_op', "XLA's ops have no public wrapper"
)


def unwrap_checkpoint_value(value):
  """Returns the tensor in a deferred checkpoint value, or any other value unchanged."""
  if isinstance(value, _CheckpointInitialValue):
    return value.wrapped_value
  return value


def collective_launchers(
  groups, key_base: int, hint: str, timeout_seconds: float
) -> list[list]:
  """Makes launchers of TensorFlow's collectives, one for each device of each group.

  A group is a list of this worker's devices in it, and the number of all.
  """
  keys = _CollectiveKeys(group_key_start=1 + key_base)
  options = tf.distribute.experimental.CommunicationOptions(
    timeout_seconds=timeout_seconds or None,
    implementation=tf.distribute.experimental.CommunicationImplementation(
      hint.upper()
    ),
  )
  return [
    [
      _CollectiveReplicaLauncher(
        keys.get_group_key(devices), size, keys, device, options
      )
      for device in devices
    ]
    for devices, size in groups
  ]


def collective_all_reduce(
  launcher, tensor, hint, timeout_seconds, max_subdivs_per_device
):
  """Runs one device's part of an all-reduce by TensorFlow's collective runtime."""
  # pylint: disable=protected-access
  return _all_reduce_v2(
    tensor,
    launcher._group_size,
    launcher._group_key,
    _instance_key(launcher),
    merge_op='Add',
    communication_hint=hint,
    timeout=timeout_seconds,
    ordering_token=launcher._get_ordering_token(),
    max_subdivs_per_device=max_subdivs_per_device,
  )


def _instance_key(launcher):
  """Returns the number of a collective: one per call, or one for all calls in a
  branch.

  TensorFlow feeds the number when a function is called. This fails inside a
  `tf.while_loop` or `tf.cond`, which feeds nothing.
  """
  # pylint: disable=protected-access
  graph = tf.compat.v1.get_default_graph()
  while graph is not None and not tf.executing_eagerly():
    if getattr(graph, 'is_control_flow_graph', False):
      return launcher._collective_keys.get_instance_key(
        launcher._group_key, launcher._device
      )
    graph = getattr(graph, 'outer_graph', None)
  return launcher._next_instance_key()


def configure_coordination(
  leader: str, num_workers: int, timeout_seconds: float
) -> None:
  """Sets up TensorFlow's coordination service, with a deadline for the start."""
  _eager_context().configure_coordination_service(
    service_type='standalone',
    service_leader=leader,
    cluster_register_timeout_in_ms=int(timeout_seconds * 1000),
    coordinated_jobs=[
      _coordination_config.CoordinatedJob(name='worker', num_tasks=num_workers)
    ],
  )


def publish_config_value(name: str, value: str) -> None:
  """Publishes a value to all workers through TensorFlow's coordination service."""
  _eager_context().set_config_key_value(name, value)


def config_value(name: str, timeout_seconds: float) -> str:
  """Returns a value that a worker publishes. Raises OpError at the deadline."""
  milliseconds = max(1, int(timeout_seconds * 1000))
  return _eager_context().get_config_key_value(name, milliseconds)


def clone_function(function, python_function):
  """Returns a `tf.function` like `function`, for another Python function."""
  return function._clone(python_function=python_function)  # pylint: disable=protected-access


def is_compiled(function) -> bool:
  """Returns whether a `tf.function` was made with `jit_compile=True`."""
  return bool(function._jit_compile)  # pylint: disable=protected-access


def in_xla_context() -> bool:
  """Returns whether XLA will compile the graph that is being built."""
  # TensorFlow also marks the graph around a compiled function, in which eager
  # operations are not compiled.
  return not tf.executing_eagerly() and _graph_or_parents_in_xla(
    tf.compat.v1.get_default_graph()
  )


def record_read(variable, value, gradient) -> None:
  """Tells tapes that `value` was read from `variable`, with this gradient."""
  _variable_accessed(variable)
  _record_operation(
    'ReadVariableOp',
    [value],
    [variable.handle],
    backward_function=lambda dy: [gradient(dy)],
    forward_function=lambda x: [x],
  )


def traces_to_save() -> bool:
  """Returns whether a function is traced here for a SavedModel."""
  return _in_save_context() and not tf.executing_eagerly()


def lift(value):
  """Returns the value of a tensor in a function's graph, computed outside it.

  Raises:
    UnsupportedOptionError: if the tensor depends on the function's arguments.
  """
  if not tf.is_tensor(value) or not hasattr(value, 'graph'):
    return value
  with tf.init_scope():

    @tf.function(autograph=False)
    def compute():
      graph = tf.compat.v1.get_default_graph()
      return _lift_to_graph([value], graph)[value]

    try:
      return compute()
    except _UnliftableError as e:
      raise errors.UnsupportedOptionError(
        'an initial value that does',
        'an initial value that does not depend on the arguments of the '
        "variable's tf.function",
        'make the variable outside of the tf.function, or pass a function '
        'that returns its initial value',
      ) from e


def no_colocation():
  """Returns a context that clears the colocation constraints of its surroundings."""
  return _colocate_with(None, ignore_existing=True)


# Methods of TensorFlow's classes that our classes override, with TensorFlow's
# signatures. A name without parentheses is a property.
_OVERRIDDEN = {
  MirroredExtended: (
    '_batch_reduce_to(reduce_op, value_destination_pairs, options)',
    '_call_for_each_replica(fn, args, kwargs)',
    '_create_variable(next_creator, kwargs)',
    '_distribute_datasets_from_function(dataset_fn, options)',
    '_experimental_distribute_dataset(dataset, options)',
    '_experimental_distribute_values_from_function(value_fn)',
    '_gather_to_implementation(value, destinations, axis, options)',
    '_get_cross_device_ops(value)',
    '_get_local_replica_id(replica_id_in_sync_group)',
    '_get_replica_id_in_sync_group(replica_id)',
    '_get_variable_creator_initial_value('
    'replica_id, device, primary_var, kwargs)',
    '_in_multi_worker_mode()',
    '_num_replicas_in_sync',
    '_reduce_to(reduce_op, value, destinations, options)',
    '_replica_ctx_all_reduce(reduce_op, value, options)',
    '_update(var, fn, args, kwargs, group)',
    '_use_merge_call()',
    'experimental_between_graph',
    'parameter_devices',
    'should_checkpoint',
    'should_save_summary',
  ),
  MirroredVariable: (
    '_get()',
    '_get_cross_replica()',
    '_get_replica(replica_id)',
    '_update_replica(update_fn, value, kwargs)',
    'handle',
  ),
  SyncOnReadVariable: (
    '_get_cross_replica()',
    '_get_replica(replica_id)',
    '_update_replica(update_fn, value, kwargs)',
  ),
  PerReplica: ('_type_spec',),
  tf.__internal__.tracking.Trackable: (
    '_serialize_to_tensors()',
    '_trackable_children(save_type, cache, kwargs)',
  ),
  OwnedIterator: ('__iter__()', '__next__()', '_type_spec'),
  UnaryUnchangedStructureDataset: ('__iter__()',),
  TPUExtended: (
    '_batch_reduce_to(reduce_op, value_destination_pairs, options)',
    '_create_variable(next_creator, kwargs)',
    '_reduce_to(reduce_op, value, destinations, options)',
    'tpu_run(fn, args, kwargs, options)',
  ),
  ParameterServerExtended: (
    '_call_for_each_replica(fn, args, kwargs)',
    '_create_variable(next_creator, kwargs)',
    '_in_multi_worker_mode()',
    '_update(var, fn, args, kwargs, group)',
  ),
  BaseResourceVariable: (
    '_read_variable_op(no_copy)',
    '_restore_from_tensors(restored_tensors)',
    '_serialize_to_tensors()',
    'handle',
  ),
  DistributedDataset: ('cardinality', 'element_spec'),
  tf.TypeSpec: (
    '_from_components(components)',
    '_to_components(value)',
  ),
  tf.distribute.ReplicaContext: (
    '_merge_call(merge_fn, args, kwargs)',
    'all_gather(value, axis, options)',
    'all_reduce(reduce_op, value, options)',
    'num_replicas_in_sync',
    'replica_id_in_sync_group',
  ),
  tf.distribute.CrossDeviceOps: (
    '_gather(per_replica_value, destinations, axis, options)',
    '_gather_implementation(per_replica_value, destinations, axis, options)',
    'batch_reduce(reduce_op, value_destination_pairs, options)',
    'batch_reduce_implementation(reduce_op, value_destination_pairs, options)',
    'broadcast_implementation(tensor, destinations)',
    'reduce_implementation('
    'reduce_op, per_replica_value, destinations, options)',
  ),
}


def check_overridden() -> None:
  """Raises UnsupportedVersionError if an overridden method is missing or has
  changed.
  """
  for owner, methods in _OVERRIDDEN.items():
    for method in methods:
      _requirements.method(owner, method, 'tf_strategies overrides it')


check_overridden()
