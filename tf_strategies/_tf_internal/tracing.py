"""TensorFlow internals for traced steps and their variables."""

import contextlib
import dataclasses
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tf_strategies import _requirements
from tf_strategies._tf_internal.loading import load

ResourceVariable = load(
  'ops.resource_variable_ops.ResourceVariable',
  'a counter that no strategy scope may turn into a mirrored variable',
)
_compiled_operations = {
  device: load(
    f'util.pywrap_xla_ops.get_{device}_kernel_names',
    'the parts of a step that XLA compiles',
  )
  for device in ('cpu', 'gpu')
}
_func_graph_from_py_func = load(
  'framework.func_graph.func_graph_from_py_func',
  'the graph of a step, before it is split',
)
_CondBranchGraph = load(
  'ops.control_flow_v2_func_graphs.CondBranchFuncGraph',
  'whether a write of a step is done once',
)
_ControlFlowGraph = load(
  'ops.control_flow_v2_func_graphs.ControlFlowFuncGraph',
  'whether a graph belongs to the one around it alone',
)
_handle_data = load(
  'ops.handle_data_util.get_handle_data',
  'whether a handle is that of a variable',
)
copy_handle_data = load(
  'ops.handle_data_util.copy_handle_data',
  'the shape of the variable that a handle stands for',
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
_Function = load(
  'eager.polymorphic_function.polymorphic_function.Function',
  'a tf.function that a step calls',
)
_ConcreteFunction = load(
  'eager.polymorphic_function.concrete_function.ConcreteFunction',
  'a function that has its graph when a step calls it',
)
_read_only_inputs = load(
  'framework.auto_control_deps_utils.get_read_only_resource_input_indices_graph',
  'which variables a concrete function writes',
)
_canonical_inputs = load(
  'eager.polymorphic_function.function_type_utils.canonicalize_function_inputs',
  'what a tf.function makes of its arguments',
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


_graph_constant = load(
  'framework.ops._create_graph_constant', 'the arrays of a data set function'
)
_ops = load('framework.ops', 'the arrays of a data set function')


class _Arrays(threading.local):
  """Replaces arrays in the graphs that the calling thread builds."""

  take: Callable[[np.ndarray, tf.DType | None], tf.Tensor | None] | None = None


_arrays = _Arrays()


def _constant(value, dtype, shape, *args, **kwargs):
  found = None
  if _arrays.take and shape is None and isinstance(value, np.ndarray):
    found = _arrays.take(value, dtype)
  if found is None:
    return _graph_constant(value, dtype, shape, *args, **kwargs)
  return found


_ops._create_graph_constant = _constant


@contextlib.contextmanager
def arrays_from(
  take: Callable[[np.ndarray, tf.DType | None], tf.Tensor | None],
) -> Iterator[None]:
  """Makes `take(array, dtype)` convert arrays in graphs. None means a constant."""
  before, _arrays.take = _arrays.take, take
  try:
    yield
  finally:
    _arrays.take = before


@dataclasses.dataclass(frozen=True)
class CalledFunction:
  """A call of a function whose graph a trace uses unchanged.

  Attributes:
    name: name of the function.
    written: handles of variables, made before the trace, that it may write.
    read: handles of variables that it only reads.
    variables: variables that it is known to read, by the ids of their handles.
  """

  name: str
  written: Sequence[tf.Tensor]
  read: Sequence[tf.Tensor]
  variables: Mapping[int, tf.Variable]


_Handles = Mapping[int, tf.Tensor]


class _Inlining(threading.local):
  called: Callable[[CalledFunction], _Handles] | None = None
  # Called with the captures of a function that runs eagerly.
  note_captures: Callable[[Sequence[tf.Tensor]], None] | None = None


_inlining = _Inlining()
_call_function = _Function.__call__
_call_concrete = _ConcreteFunction._call_flat


def _call_or_inline(self, *args, **kwargs):
  """Calls a `tf.function`, or inlines its Python code, in the graph being traced."""
  is_inlined = _inlining.called and not tf.executing_eagerly()
  if not is_inlined:
    return _call_function(self, *args, **kwargs)
  if self._jit_compile:
    return _call_function(self._clone(None), *args, **kwargs)
  bound = _canonical_inputs(
    args, kwargs, self._function_type, self._default_values, self._is_pure
  )
  args, kwargs = tf.nest.map_structure(
    _as_input, (bound.args, dict(bound.kwargs))
  )
  outputs = inlined(self)(*args, **kwargs)
  return tf.nest.map_structure(_as_output, outputs)


def _as_input(value):
  is_array = isinstance(value, (np.ndarray, np.generic))
  return tf.convert_to_tensor(value) if is_array else value


def _as_output(value):
  """Converts a value that Python returned, as `tf.function` does."""
  kept = (
    type(None),
    tf.Operation,
    tf.TensorArray,
    tf.__internal__.CompositeTensor,
  )
  if isinstance(value, kept) and not isinstance(value, tf.Variable):
    return value
  return tf.convert_to_tensor(value)


# Variables by the ids of their old handles, which they keep alive.
_by_old_handle = weakref.WeakValueDictionary()


def replace_handle(variable: tf.Variable, handle: tf.Tensor) -> None:
  """Replaces a variable's handle, also for functions that were traced before."""
  old = vars(variable).setdefault('_old_handles', [])
  old.append(variable._handle)
  _by_old_handle[id(variable._handle)] = variable
  variable._handle = handle


def _current(tensor):
  variable = _by_old_handle.get(id(tensor))
  return tensor if variable is None else variable._handle


def _call_and_tell(self, tensor_inputs, captured_inputs):
  """Calls a concrete function, and reports the call to a graph being traced."""
  if _inlining.note_captures is not None and tf.executing_eagerly():
    _inlining.note_captures(captured_inputs)
  is_told = _inlining.called and not tf.executing_eagerly()
  if not is_told and not _by_old_handle:
    return _call_concrete(self, tensor_inputs, captured_inputs)
  inputs = list(map(_current, [*tensor_inputs, *captured_inputs]))
  count = len(tensor_inputs)
  if not is_told:
    return _call_concrete(self, inputs[:count], inputs[count:])
  only_read = set(_read_only_inputs(self.graph))
  found = [i for i, tensor in enumerate(inputs) if _is_handle(tensor)]
  others = _inlining.called(
    CalledFunction(
      tf.compat.as_str(self.name),
      [inputs[i] for i in found if i not in only_read],
      [inputs[i] for i in found if i in only_read],
      {id(v._handle): v for v in self.graph.variables if hasattr(v, '_handle')},
    )
  )
  inputs = [others.get(id(tensor), tensor) for tensor in inputs]
  return _call_concrete(self, inputs[:count], inputs[count:])


def call_with(
  function: tf.types.experimental.ConcreteFunction,
  inputs: Sequence[tf.Tensor],
  others: Mapping[int, tf.Tensor],
) -> tf.Tensor:
  """Calls a concrete function with some of its captured tensors replaced.

  Args:
    function: the concrete function.
    inputs: its arguments.
    others: replacements, by the ids of the captured tensors.
  """
  captured = [others.get(id(t), t) for t in function.captured_inputs]
  return function._call_flat(list(inputs), captured)


def _is_handle(tensor) -> bool:
  """Returns whether a tensor is a variable's handle from outside the traced graph."""
  is_resource = tf.is_tensor(tensor) and tensor.dtype == tf.resource
  if not is_resource or tf.is_symbolic_tensor(tensor):
    return False
  data = _handle_data(tensor)
  return data is not None and data.is_set


_Function.__call__ = _call_or_inline
_ConcreteFunction._call_flat = _call_and_tell


@contextlib.contextmanager
def functions_inlined(
  called: Callable[[CalledFunction], _Handles],
) -> Iterator[None]:
  """Runs the Python of every `tf.function` that this thread calls while it traces.

  TensorFlow keeps the graph of a `tf.function` for the next call. In that graph
  variables may have another meaning, so the Python code runs again as a part of the
  graph that is being traced. A function that XLA compiles is traced again. Concrete
  and compiled functions have no Python code here: `called` gets each of their calls and
  returns replacements of variable handles, by id.
  """
  before, _inlining.called = _inlining.called, called
  try:
    yield
  finally:
    _inlining.called = before


@contextlib.contextmanager
def captures_noted(
  note: Callable[[Sequence[tf.Tensor]], None],
) -> Iterator[None]:
  """Calls `note` with the captures of each function before it runs eagerly."""
  before, _inlining.note_captures = _inlining.note_captures, note
  try:
    yield
  finally:
    _inlining.note_captures = before


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


def function_graph(root, name: str):
  """Returns the graph of a function that an operation in or below `root` calls."""
  return _function(root, name).graph


def opaque_functions(root, op, attrs) -> list:
  """Returns the functions, called by an operation, whose graph TensorFlow did
  not keep.

  Its older loops, such as the one in `tf.nn.ctc_loss`, have such functions.
  """
  names = [op.type]
  names += [a.func.name for a in attrs.values() if a.func.name]
  found = [_function(op.graph, n) or _function(root, n) for n in names]
  return [f for f in found if f is not None and not hasattr(f, 'graph')]


def add_functions(functions, graph) -> None:
  """Makes functions callable by the operations of `graph`."""
  for function in functions:
    function.add_to_graph(graph)


def _function(root, name):
  return root._get_function(name)  # pylint: disable=protected-access


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


def create_now(**kwargs):
  """Creates a variable immediately, even while a `tf.function` is being traced."""
  accepted = inspect.signature(ResourceVariable.__init__).parameters
  return ResourceVariable(
    **{name: value for name, value in kwargs.items() if name in accepted}
  )


def spec_of_part(spec: tf.TypeSpec) -> tf.TypeSpec | None:
  """Returns the spec of one replica's part of a batch. None if it is empty."""
  first, *_ = getattr(spec, '_value_specs', (spec,))
  return None if isinstance(first, tf.OptionalSpec) else first


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


def runs_once(graph: tf.Graph, step: tf.Graph) -> bool:
  """Returns whether a graph inside a step runs at most once, outside any loop."""
  while graph is not step:
    if not isinstance(graph, _CondBranchGraph):
      return False
    graph = graph.outer_graph
  return True


def is_in_loop(graph: tf.Graph | None, outer: tf.Graph) -> bool:
  """Returns whether a graph in `outer` belongs to a loop there."""
  while graph is not None and graph is not outer:
    is_control_flow = isinstance(graph, _ControlFlowGraph)
    if is_control_flow and not isinstance(graph, _CondBranchGraph):
      return True
    graph = getattr(graph, 'outer_graph', None)
  return False


def is_function_of_its_own(graph: tf.Graph) -> bool:
  """Returns whether a graph is not a branch or a loop of the one around it."""
  return not isinstance(graph, _ControlFlowGraph)
