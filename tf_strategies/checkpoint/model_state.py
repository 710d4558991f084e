"""The state of a run as named arrays, and back, whatever the strategy.

A variable that replicas share is one array. Of a variable that is reduced when
it is read (a metric, say) each replica has a part; its array holds the parts of
all replicas of all workers along a first dimension, so that sums go on in the
same order, to the last bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf


def name_variables(
  model: keras.Model, optimizer: keras.optimizers.Optimizer
) -> dict[str, keras.Variable]:
  """The variables that decide how training goes on, by name.

  Weights, the state of random layers and the optimizer's variables; not the
  metrics, which start anew in each epoch.
  """
  others = {id(v) for v in [*model.weights, *model.metrics_variables]}
  random = [v for v in model.variables if id(v) not in others]
  named = [(f'model/{v.path}', v) for v in model.weights]
  named += [(f'optimizer/{v.path}', v) for v in optimizer.variables]
  # Keras numbers seed generators through a process: their place in the model
  # is a name that lasts.
  named += [(f'model/random/{i}', v) for i, v in enumerate(random)]
  variables: dict[str, keras.Variable] = {}
  for name, variable in named:
    unique, count = name, 2
    while unique in variables:
      unique, count = f'{name}#{count}', count + 1
    variables[unique] = variable
  return variables


def match_names(names: Sequence[str], saved: Sequence[str]) -> dict[str, str]:
  """Finds out which saved variable is which of this run.

  Keras counts the models and layers of a process in their names, so the same
  model has other ones the second time. Where names differ in such numbers alone,
  the place decides.

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


class VariableAccess:
  """Reads and writes variables of a strategy.

  Args:
    strategy: what they were created in.
  """

  def __init__(self, strategy: tf.distribute.Strategy):
    self._strategy = strategy
    self.workers = getattr(strategy.extended, 'communicator', None)

  @property
  def is_chief(self) -> bool:
    """Whether this process is the one that reads and writes files."""
    return self.workers is None or self.workers.rank == 0

  def read(self, variables: Mapping[str, keras.Variable]) -> dict:
    """Returns arrays; a collective where workers have parts of their own."""
    return {name: self._read(variable) for name, variable in variables.items()}

  def _read(self, variable) -> np.ndarray:
    if not has_parts(variable):
      return np.asarray(variable.value.numpy())
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
    """Gives each variable the array of its name, on this process alone."""
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
    return self._strategy.experimental_local_results(variable.value)

  def shape_in_file(self, variable: keras.Variable) -> list[int | None]:
    """Of the variable's array; None where the number of replicas stands."""
    shape = list(variable.shape)
    return [None, *shape] if has_parts(variable) else shape

  def share(
    self,
    variables: Iterable[keras.Variable],
    arrays: Mapping[str, np.ndarray],
    specs: Iterable[tuple[str, str, list[int]]],
  ) -> dict[str, np.ndarray]:
    """Gives all workers the chief's values and arrays.

    Args:
      variables: that replicas share; the chief has written its own already.
      arrays: on the chief, those to be shared besides.
      specs: name, dtype and shape of these, the same on every worker.

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


def has_parts(variable: keras.Variable) -> bool:
  """Whether each replica has a part of its own."""
  synchronization = getattr(variable.value, 'synchronization', None)
  return synchronization == tf.VariableSynchronization.ON_READ


def _share_out(variable, array, count):
  """What other numbers of replicas had, for `count` of them."""
  shared = np.zeros([count, *array.shape[1:]], array.dtype)
  if variable.value.aggregation == tf.VariableAggregation.MEAN:
    shared[:] = array.mean(0, dtype=array.dtype)
  else:
    shared[0] = array.sum(0, dtype=array.dtype)
  return shared
