"""The state of a run as named arrays, and back, on any strategy.

A variable that replicas share is one array. A variable that is reduced when it
is read (a metric, for example) has one part for each replica; its array stacks
the parts of all replicas of all workers along a first dimension, so that sums
continue in the same order, to the last bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np
import tensorflow as tf

from tf_strategies.cluster import workers as workers_lib


class Spec(Protocol):
  """What is known of a saved array."""

  dtype: str
  shape: Sequence[int]


class ArraySpec(NamedTuple):
  """A `Spec` of an array in memory."""

  dtype: str
  shape: Sequence[int]


def name_variables(
  model: keras.Model, optimizer: keras.optimizers.Optimizer
) -> dict[str, keras.Variable]:
  """Returns the variables that determine how training continues, by name.

  Weights, the state of random layers and the optimizer's variables; not the
  metrics, which restart in each epoch.
  """
  return name_objects({'model': model, 'optimizer': optimizer})


def name_objects(objects: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the variables of several objects by name, as `name_variables`.

  Args:
    objects: models, optimizers, metrics or single variables, by the first part
      of their names.
  """
  variables: dict[str, Any] = {}
  for prefix, item in objects.items():
    for name, variable in _named(item):
      unique = name = f'{prefix}/{name}' if name else prefix
      count = 2
      while unique in variables:
        unique, count = f'{name}#{count}', count + 1
      variables[unique] = variable
  return variables


def _named(item) -> list[tuple[str, Any]]:
  if isinstance(item, keras.Model):
    others = {id(v) for v in [*item.weights, *item.metrics_variables]}
    random = [v for v in item.variables if id(v) not in others]
    # Keras numbers the seed generators of a process: their place in the model
    # is a stable name.
    return [(v.path, v) for v in item.weights] + [
      (f'random/{i}', v) for i, v in enumerate(random)
    ]
  if isinstance(item, tf.Variable | keras.Variable):
    return [('', item)]
  return [(getattr(v, 'path', v.name), v) for v in item.variables]


def match_names(names: Sequence[str], saved: Sequence[str]) -> dict[str, str]:
  """Finds which saved variable is which of this run.

  Keras counts the models and layers of a process in their names, so the second
  model built by the same code has other names. If names differ only in such
  numbers, their order decides.

  Args:
    names: of this run's variables, in order.
    saved: those of a checkpoint, in order.

  Returns:
    This run's name by the saved one; without those that have none.
  """
  if set(names) != set(saved):
    here, there = ([_uncounted(n) for n in ns] for ns in (names, saved))
    if here == there:
      return dict(zip(saved, names, strict=True))
  return {name: name for name in names if name in set(saved)}


def _uncounted(name: str) -> str:
  # 'adam_1/sequential_2_dense_3_kernel' is 'adam/sequential_dense_kernel'.
  return re.sub(r'_\d+(?=[_/#]|$)', '', name)


def iterations(optimizer: keras.optimizers.Optimizer) -> int:
  """Returns the optimizer's count of calls, accumulation steps included."""
  for variable in optimizer.variables:
    if variable.path.split('/')[-1] == 'iteration':
      return int(variable.numpy())
  return 0


def has_parts(variable: Any) -> bool:
  """Returns whether each replica has its own part of the variable."""
  synchronization = getattr(_value(variable), 'synchronization', None)
  return synchronization == tf.VariableSynchronization.ON_READ


def reductions(variables: Mapping[str, Any]) -> dict[str, str]:
  """Returns 'mean' or 'sum' for each variable of which replicas have parts."""
  return {
    name: 'mean'
    if getattr(_value(variable), 'aggregation', None)
    == tf.VariableAggregation.MEAN
    else 'sum'
    for name, variable in variables.items()
    if has_parts(variable)
  }


def reduce_parts(array: np.ndarray, reduction: str) -> np.ndarray:
  """Returns the one value of the parts of all replicas."""
  reduce = array.mean if reduction == 'mean' else array.sum
  return reduce(0, dtype=array.dtype)


def specs(arrays: Mapping[str, np.ndarray]) -> dict[str, Spec]:
  """Returns the dtypes and shapes of arrays, for `differences`."""
  return {k: ArraySpec(v.dtype.name, v.shape) for k, v in arrays.items()}


def _value(variable: Any) -> Any:
  """The variable of TensorFlow that Keras's one holds."""
  is_keras = isinstance(variable, keras.Variable)
  return variable.value if is_keras else variable


def differences(
  variables: Mapping[str, keras.Variable], specs: Mapping[str, Spec]
) -> list[str]:
  """Returns how saved arrays differ from variables, a clause each.

  Args:
    variables: of this run, by name.
    specs: dtypes and shapes of the saved arrays, by name.
  """
  found = []
  for name, variable in variables.items():
    if name not in specs:
      found.append(f'it lacks variable {name}')
      continue
    here, there = list(variable.shape), list(specs[name].shape)
    if has_parts(variable):  # The number of replicas may differ.
      here = [None, *here]
      there = there and [None, *there[1:]]
    if here != there:
      found.append(f'variable {name} has shape {there} there and {here} here')
    dtype, here = specs[name].dtype, tf.as_dtype(variable.dtype).name
    if here != dtype:
      found.append(f'variable {name} is {dtype} there and {here} here')
  return found + [
    f'variable {name} is not in this run'
    for name in sorted(set(specs) - set(variables))
  ]


class VariableAccess:
  """Reads and writes the variables of a strategy.

  Args:
    strategy: in whose scope they were created.
  """

  def __init__(self, strategy: tf.distribute.Strategy):
    self._strategy = strategy
    self.workers = workers_lib.link_of(strategy)

  @property
  def is_chief(self) -> bool:
    """Whether this process reads and writes the files."""
    return self.workers is None or self.workers.rank == 0

  def read(
    self, variables: Mapping[str, keras.Variable]
  ) -> Iterator[tuple[str, np.ndarray]]:
    """Returns names and arrays, of which each is read when it is asked for.

    On several workers all of them call it. Parts are gathered at once, so that
    no worker waits for a caller that stops early. Only the chief gets the
    variables that replicas share.
    """
    parts = {k: self._gather(v) for k, v in variables.items() if has_parts(v)}
    if not self.is_chief:
      return iter(parts.items())
    return (
      (k, parts[k] if k in parts else np.asarray(_value(v).numpy()))
      for k, v in variables.items()
    )

  def _gather(self, variable) -> np.ndarray:
    with tf.device('CPU:0'):
      parts = tf.stack([p.read_value() for p in self._parts(variable)])
    if self.workers is not None:
      parts = self.workers.all_gather(parts, 'checkpoint/parts')
    return parts.numpy()

  def write(
    self,
    variables: Mapping[str, keras.Variable],
    arrays: Mapping[str, np.ndarray],
  ) -> None:
    """Assigns each variable the array of its name, in this process alone."""
    with self._strategy.scope():
      for name, variable in variables.items():
        if not has_parts(variable):
          variable.assign(arrays[name])
    for name, variable in variables.items():
      if has_parts(variable):
        self._write_parts(variable, arrays[name])

  def _write_parts(self, variable, array) -> None:
    parts = self._parts(variable)
    rank, world_size = 0, 1
    if self.workers is not None:
      rank, world_size = self.workers.rank, self.workers.world_size
    if len(array) != len(parts) * world_size:
      array = _share_out(variable, array, len(parts) * world_size)
    for i, part in enumerate(parts):
      part.assign(array[rank * len(parts) + i])

  def _parts(self, variable):
    return self._strategy.experimental_local_results(_value(variable))

  def share(
    self,
    variables: Iterable[keras.Variable],
    arrays: Mapping[str, np.ndarray],
    specs: Iterable[tuple[str, str, list[int]]],
  ) -> dict[str, np.ndarray]:
    """Broadcasts the chief's values and arrays to all workers.

    Args:
      variables: that replicas share; the chief has assigned its own already.
      arrays: on the chief, arrays to broadcast as well.
      specs: their names, dtypes and shapes, the same on every worker.

    Returns:
      The arrays, on every worker.
    """
    self._strategy.extended.share_from_chief(list(variables))
    shared = {}
    for name, dtype, shape in specs:
      array = arrays.get(name) if self.is_chief else None
      tensor = (
        tf.zeros(shape, dtype) if array is None else tf.constant(array, dtype)
      )
      shared[name] = self.workers.broadcast(
        tensor, 0, 'checkpoint/parts'
      ).numpy()
    return shared


def _share_out(variable, array, count):
  """Distributes the parts of another number of replicas to `count`."""
  (reduction,) = reductions({'': variable}).values()
  shared = np.zeros([count, *array.shape[1:]], array.dtype)
  shared[: count if reduction == 'mean' else 1] = reduce_parts(array, reduction)
  return shared
