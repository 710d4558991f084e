"""The only importer of `tensorflow.python`: each symbol with why it is needed.

TensorFlow exports the classes that *use* a strategy, not those that one is
made of. Everything private that this package leans on is loaded here, under
one roof, so that a new TensorFlow release is checked in one place: a missing
symbol ends in one sentence that names it, not in a traceback from the depths.

Supported: TensorFlow 2.18 to 2.21.
"""

import importlib
from typing import Any

import tensorflow as tf

_SUPPORTED = 'TensorFlow 2.18 to 2.21'


def _load(module: str, name: str, why: str) -> Any:
  """Returns `tensorflow.python.<module>.<name>`, or says what is missing.

  Args:
    module: path of the module below `tensorflow.python`.
    name: the attribute to load from it.
    why: what this package needs it for; part of the error.

  Returns:
    The symbol.

  Raises:
    ImportError: this TensorFlow has no such module or attribute.
  """
  try:
    return getattr(importlib.import_module(f'tensorflow.python.{module}'), name)
  except (ImportError, AttributeError):
    raise ImportError(
      f'tf_strategies needs {module}.{name} of TensorFlow ({why}), which '
      f'TensorFlow {tf.__version__} does not have; supported is {_SUPPORTED}.'
    ) from None


MirroredExtended = _load(
  'distribute.mirrored_strategy',
  'MirroredExtended',
  'the base of every strategy that mirrors variables',
)
call_for_each_replica = _load(
  'distribute.mirrored_run',
  'call_for_each_replica',
  'runs a function once per replica, one thread each',
)
MirroredReplicaThread = _load(
  'distribute.mirrored_run',
  '_MirroredReplicaThread',
  'to know the graph that a replica was started in',
)
PerReplica = _load('distribute.values', 'PerReplica', 'one value a replica')
Mirrored = _load('distribute.values', 'Mirrored', 'equal values everywhere')
MirroredVariable = _load(
  'distribute.values', 'MirroredVariable', 'variables with one copy a replica'
)
SyncOnReadVariable = _load(
  'distribute.values', 'SyncOnReadVariable', 'metrics, reduced when read'
)
is_mirrored = _load(
  'distribute.distribute_utils',
  'is_mirrored',
  'a mean over equal values is the value',
)
regroup = _load(
  'distribute.distribute_utils',
  'regroup',
  'makes one distributed value of its components',
)
get_devices_from = _load(
  'distribute.cross_device_ops',
  'get_devices_from',
  'the devices that a destination stands for',
)
reduce_non_distributed_value = _load(
  'distribute.cross_device_ops',
  'reduce_non_distributed_value',
  'the rule for a value that is the same on every replica',
)
resolve_device = _load(
  'distribute.device_util', 'resolve', 'the full name of a device'
)
ResourceVariable = _load(
  'ops.resource_variable_ops',
  'ResourceVariable',
  'a counter that no strategy scope may turn into a mirrored variable',
)
Function = _load(
  'eager.polymorphic_function.polymorphic_function',
  'Function',
  'to see that strategy.run got a tf.function',
)
_graph_or_parents_in_xla = _load(
  'ops.control_flow_util',
  'GraphOrParentsInXlaContext',
  'XLA cannot call back into Python',
)
_control_status_ctx = _load(
  'autograph.core.ag_ctx',
  'control_status_ctx',
  'converts the user function as stock strategies do',
)
_tf_convert = _load(
  'autograph.impl.api',
  'tf_convert',
  'converts the user function as stock strategies do',
)
_unwrap_decorators = _load(
  'util.tf_decorator', 'unwrap', 'to reach the function that Keras passed'
)


def autograph_convert(fn):
  """Returns `fn` converted by AutoGraph as the caller's context asks for."""
  return _tf_convert(fn, _control_status_ctx())


def unwrap(fn):
  """Returns the Python function below every TensorFlow and functools wrapper.

  Args:
    fn: any callable.

  Returns:
    The innermost callable; `fn` itself if nothing wraps it.
  """
  _, target = _unwrap_decorators(fn)
  while hasattr(target, '__wrapped__'):
    target = target.__wrapped__
  return target


def clone_function(function, python_function):
  """Returns a `tf.function` like `function`, but of another Python function."""
  return function._clone(python_function=python_function)  # pylint: disable=protected-access


def is_compiled(function) -> bool:
  """Whether a `tf.function` was made with `jit_compile=True`."""
  return bool(function._jit_compile)  # pylint: disable=protected-access


def in_xla_context() -> bool:
  """Whether the graph being built is going to be compiled by XLA."""
  return _graph_or_parents_in_xla(tf.compat.v1.get_default_graph())
