"""TensorFlow internals for traced steps and their variables."""

import contextlib
import functools
import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_strategies import _requirements
from tf_strategies._tf_internal.loading import load

ResourceVariable = load(
  'ops.resource_variable_ops.ResourceVariable',
  'a counter that no strategy scope may turn into a mirrored variable',
)
# Creates a variable immediately, even while a `tf.function` is being traced.
create_now = functools.partial(
  load(
    'ops.resource_variable_ops.default_variable_creator_v2',
    'a variable that is made outside of the step that first uses it',
  ),
  None,
)
_compiled_operations = {
  device: load(
    f'util.pywrap_xla_ops.get_{device}_kernel_names',
    'the parts of a step that XLA compiles',
  )
  for device in ('cpu', 'gpu')
}
_converters = load(
  'ops.parallel_for.pfor._pfor_converter_registry',
  'the operations on each element',
)
# They are those that `tf.vectorized_map` converts alike.
elementwise_operations = frozenset(
  name for name, how in _converters.items() if how is _converters['Abs']
)
_func_graph_from_py_func = load(
  'framework.func_graph.func_graph_from_py_func',
  'the graph of a step, before it is split',
)
_control_status_ctx = load(
  'autograph.core.ag_ctx.control_status_ctx', 'as stock strategies convert'
)
_tf_convert = load(
  'autograph.impl.api.tf_convert', 'as stock strategies convert'
)
_ag_ctx = load('autograph.core.ag_ctx', 'as a tf.function converts')
_autograph_config = load(
  'autograph.core.config', 'what AutoGraph leaves as it is'
)
# AutoGraph does not convert this package, as it does not convert TensorFlow and
# Keras. Nothing here needs it, and tracebacks show the original lines.
_autograph_config.CONVERSION_RULES += (
  _autograph_config.DoNotConvert(__name__.partition('.')[0]),
)
_ConcreteFunction = load(
  'eager.polymorphic_function.concrete_function.ConcreteFunction',
  'a function that has its graph when a step calls it',
)
_context = load('eager.context.context', 'how a graph is rewritten')
_CallOptions = load(
  'eager.context.FunctionCallOptions', 'how a graph is rewritten'
)
_anonymous_name = load(
  'eager.context.anonymous_name', 'a variable that one call of a graph has'
)
_stream = load(
  'ops.stateful_random_ops.get_replica_id',
  'the numbers of a tf.random.Generator',
)
_requirements.mention(
  _stream,
  ['get_replica_context', 'replica_id_in_sync_group'],
  'the numbers of a tf.random.Generator',
)


class OneDeviceContext(tf.distribute.ReplicaContext):
  """The context of a step that is one device's: the only replica."""

  @property
  def replica_id_in_sync_group(self):
    """Zero, because a step must not tell workers apart.

    None for a `tf.random.Generator`, which then draws the numbers of one device.
    """
    is_generator = sys._getframe(1).f_code is _stream.__code__
    return None if is_generator else tf.constant(0)


_c_api = load(
  'client.pywrap_tf_session', 'the operations of the replicas of a step'
)
_in_arguments = load(
  'framework.ops._reconstruct_sequence_inputs',
  'the operations of the replicas of a step',
)
extract_stack = load(
  'util.tf_stack.extract_stack', 'the operations of the replicas of a step'
)


def replace_captures(others: Mapping[int, tf.Tensor]) -> None:
  """Replaces tensors that traced functions have captured, by the ids of the old ones."""
  for each in gc.get_objects():
    if issubclass(type(each), _ConcreteFunction):
      captures = each._captured_inputs
      captures[:] = [others.get(id(t), t) for t in captures]


def call_with(
  function: tf.types.experimental.ConcreteFunction,
  inputs: Sequence[tf.Tensor],
  others: Mapping[int, tf.Tensor] | None = None,
) -> Any:
  """Calls a concrete function, without checks of its arguments, and returns its results.

  Args:
    function: the concrete function.
    inputs: its arguments.
    others: what replaces captured tensors, by the ids of those.
  """
  captured = function.captured_inputs
  if others:
    captured = [others.get(id(t), t) for t in captured]
  return function._call_flat(list(inputs), captured)


def compiled_operations(device: str) -> frozenset[str]:
  """Returns the types of operations that XLA compiles for a device."""
  names = _compiled_operations['gpu' if 'gpu' in device.lower() else 'cpu']()
  return frozenset(map(tf.compat.as_str, names))


def autograph_convert(fn):
  """Returns `fn` converted by AutoGraph as the caller's context requires.

  Functions that it calls are also converted.
  """
  context = _control_status_ctx()
  converted = _tf_convert(fn, context)

  def call(*args, **kwargs):
    with context:
      return converted(*args, **kwargs)

  return call


def trace(name: str, fn, args):
  """Returns the `FuncGraph` of `fn(*args)`. The specs in `args` become placeholders."""
  return _func_graph_from_py_func(name, fn, args, {})


_CALLS = frozenset(
  f'{prefix}{kind}'
  for kind in ('PartitionedCall', 'While', 'If', 'Case')
  for prefix in ('', 'Stateless', 'Stateful')
)


def functions_of(root, op, attrs) -> tuple[dict[str, Any], list]:
  """Returns the graphs of functions that an operation calls, and the other functions.

  The graphs are those that a call, a branch or a loop runs, by the name of the
  attribute, or by the number in a list. Of the others TensorFlow did not keep the
  graph. Its older loops, such as the one in `tf.nn.ctc_loss`, have such functions.
  """
  names = {'': op.type}
  for name, value in sorted(attrs.items()):
    if value.func.name:
      names[name] = value.func.name
    names |= {str(i): each.name for i, each in enumerate(value.list.func)}
  graphs, others = {}, []
  for name, function_name in names.items():
    function = op.graph._get_function(function_name)
    function = function or root._get_function(function_name)
    if hasattr(function, 'graph'):
      if op.type in _CALLS:
        graphs[name] = function.graph
    elif function is not None:
      others.append(function)
  return graphs, others


def temporary_variable(value: tf.Tensor) -> tf.Tensor:
  """Returns the handle of a variable that exists while the graph runs once."""
  handle = tf.raw_ops.VarHandleOp(
    dtype=value.dtype, shape=value.shape, shared_name=_anonymous_name()
  )
  tf.raw_ops.AssignVariableOp(resource=handle, value=value)
  return handle


@contextlib.contextmanager
def rewritten_once() -> Iterator[None]:
  """Makes TensorFlow rewrite graphs that first run in the context in one pass.

  The second pass and the rewrites that this leaves out find nothing in the steps of
  several CPUs. They take three quarters of the time of all rewrites.
  """
  context = _context()
  before = context.function_call_options
  context.function_call_options = _with_one_pass(
    before.executor_type, before.config_proto_serialized
  )
  try:
    yield
  finally:
    context.function_call_options = before


@functools.cache
def _with_one_pass(executor_type, serialized):
  config = tf.compat.v1.ConfigProto.FromString(serialized)
  rewrites = config.graph_options.rewrite_options
  rewrites.meta_optimizer_iterations = rewrites.ONE
  rewrites.memory_optimization = rewrites.NO_MEM_OPT
  rewrites.layout_optimizer = rewrites.implementation_selector = rewrites.OFF
  rewrites.disable_tfg_optimizer = True
  return _CallOptions(executor_type, config)


def copy_op(
  op: tf.Operation,
  inputs: Sequence[tf.Tensor],
  attrs: Mapping[str, Any],
  functions: Sequence[Any],
  stack: Any,
) -> list[tf.Tensor]:
  """Copies an operation, with other inputs and attributes, and the functions it calls.

  `stack` is what `extract_stack` returns. Returns the outputs. `Graph.create_op` takes
  two to three times as long: for each copy it checks the arguments, makes a `NodeDef`
  and extracts the stack.
  """
  graph = tf.compat.v1.get_default_graph()
  for function in functions:
    function.add_to_graph(graph)
  inputs = [
    t if getattr(t, 'graph', None) is graph else graph.capture(t)
    for t in inputs
  ]
  name = op.name.rpartition('/')[2].lstrip('_') or op.type
  with graph._c_graph.get() as c_graph:
    copy = _c_api.TF_NewOperation(c_graph, op.type, graph.unique_name(name))
  for each in _in_arguments(op.op_def, inputs, attrs):
    if isinstance(each, list):
      _c_api.TF_AddInputList(copy, [t._as_tf_output() for t in each])
    else:
      _c_api.TF_AddInput(copy, each._as_tf_output())
  for before in graph._control_dependencies_for_inputs({t.op for t in inputs}):
    _c_api.TF_AddControlInput(copy, before._c_op)
  for name, value in attrs.items():
    _c_api.TF_SetAttrValueProto(copy, name, value.SerializeToString())
  copy = _c_api.TF_FinishOperation(copy)
  _c_api.TF_SetOpStackTrace(copy, stack)
  return graph._create_op_from_tf_operation(copy).outputs


class TrackedAsAnother:
  """Mixin for an object that `tf.train.Checkpoint` treats as another object.

  A checkpoint of one can be restored into the other.
  """

  def _tracked(self) -> tf.__internal__.tracking.Trackable | None:
    """Returns the other object, or None while this one is being created."""
    raise NotImplementedError

  def _trackable_children(self, save_type='checkpoint', **kwargs):
    return self._tracked()._trackable_children(save_type, **kwargs)

  def _lookup_dependency(self, *args, **kwargs):
    return (self._tracked() or super())._lookup_dependency(*args, **kwargs)

  @property
  def _deferred_dependencies(self):
    tracked = self._tracked()
    if tracked is None:
      return super()._deferred_dependencies
    tracked._maybe_initialize_trackable()
    return tracked._deferred_dependencies


def spec_of_part(spec: tf.TypeSpec) -> tf.TypeSpec | None:
  """Returns the spec of a replica's part of a batch, of any number of rows.

  None if it is empty.
  """
  first, *_ = getattr(spec, '_value_specs', (spec,))
  return None if isinstance(first, tf.OptionalSpec) else with_any_rows(first)


def with_any_rows(spec: tf.TypeSpec | None) -> tf.TypeSpec | None:
  """Returns the spec of a tensor with any number of rows; a scalar has none."""
  shape = getattr(spec, 'shape', None)  # None has no shape.
  if shape is None or not shape.rank:
    return spec
  shape = [None, *shape[1:]]
  if isinstance(spec, tf.RaggedTensorSpec):
    return tf.RaggedTensorSpec(
      shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype
    )
  return type(spec)(shape, spec.dtype)


def inlined(function):
  """Returns a function that does what `tf.function(function)` would trace.

  AutoGraph converts it, unless it is a `tf.function` with `autograph=False`.
  """
  if isinstance(function, tf.types.experimental.PolymorphicFunction):
    # pylint: disable-next=protected-access
    if not function._autograph:
      return function.python_function
    function = function.python_function
  return _tf_convert(function, _ag_ctx.ControlStatusCtx(_ag_ctx.Status.ENABLED))
