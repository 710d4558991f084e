"""The state of a run as named arrays, and back, on any strategy.

A variable that replicas share is one array. A variable that is reduced when it
is read (a metric, for example) has one part for each replica; its array stacks
the parts of all replicas of all workers along a first dimension, so that sums
continue in the same order, to the last bit. A variable of workers that train apart
(`LocalSteps`) has parts too, between two averages. A variable that replicas divide
among them (`shard_optimizer_state`) is saved as a whole.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tf_strategies import _keras_internal, errors
from tf_strategies.checkpoint import checkpointer
from tf_strategies.cluster import workers as workers_lib

_Array = TypeVar('_Array')


def check_built(model: keras.Model) -> None:
  """Raises an error for a model that has no variables to save or restore."""
  # Keras never builds a model without `call`, whose train_step calls its layers.
  has_built_layers = model.layers and all(each.built for each in model.layers)
  if not (model.built or has_built_layers):
    raise errors.UnsupportedOptionError(
      f'model={model.name!r} without variables',
      'a built model',
      'begin it with keras.Input(shape), or call model.build(shape)',
    )


def name_variables(
  model: keras.Model, optimizer: keras.optimizers.Optimizer
) -> dict[str, keras.Variable]:
  """Returns the variables that determine how training continues, by name.

  These are weights, the state of random layers and the optimizer's variables. Metrics,
  which restart in each epoch, are not among them.
  """
  for each in _keras_internal.chain(optimizer):
    if hasattr(each, 'own_variables'):
      for variable in each.own_variables(model, optimizer):
        value_of(variable).is_of_worker = True
  return name_objects(state_of(model, optimizer))


def state_of(
  model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None
) -> dict[str, Any]:
  """Returns a model and its optimizers, for `name_objects`.

  Among them are optimizers that a `train_step` of the user's own keeps as attributes.

  Args:
    model: the model.
    optimizer: trains in place of the one that the model was compiled with, if given.
  """
  optimizers = _keras_internal.optimizers_of(model)
  if optimizer is not None:
    compiled = getattr(model, 'optimizer', None)
    others = [o for o in optimizers if o is not optimizer and o is not compiled]
    optimizers = [optimizer, *others]
  found: dict[str, Any] = {'model': model}
  for i, each in enumerate(optimizers):
    found[f'optimizer#{i}' if i else 'optimizer'] = each
  return found


def name_objects(objects: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the variables of models, optimizers and metrics, or single ones."""
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
    return _with_rows(item.weights) + [
      (f'random/{i}', v) for i, v in enumerate(random)
    ]
  if isinstance(item, tf.Variable | keras.Variable):
    is_table = _keras_internal.table_of(item) is not None
    return _with_rows([item]) if is_table else [('', item)]
  named = _with_rows(item.variables)
  if isinstance(item, keras.optimizers.Optimizer):
    named += [(each.path, each) for each in _slots_of_rows(item)]
  return named


def _with_rows(weights) -> list[tuple[str, Any]]:
  """Names weights; a variable that stands for a table gives the table's columns."""
  found = []
  for variable in weights:
    table = _keras_internal.table_of(variable)
    found += [variable] if table is None else table.columns()
  return [(getattr(v, 'path', None) or v.name, v) for v in found]


def _slots_of_rows(optimizer) -> list[Any]:
  """Returns the columns of tables that hold an optimizer's state of their rows."""
  found = []
  *_, owner = _keras_internal.chain(optimizer)
  for variable in _keras_internal.trainable_variables(owner):
    table = _keras_internal.table_of(variable)
    if table is not None and owner not in table.earlier:
      table.adopt(owner, _keras_internal.slots_of(owner, variable))
      found += table.slot_columns()
  return found


def matched(
  found: checkpointer.Checkpoint,
  variables: Mapping[str, Any],
  arrays: Mapping[str, _Array],
  settings: Mapping[str, Any] | None = None,
) -> dict[str, _Array]:
  """Returns arrays of a checkpoint, or their specs, by this run's names.

  Args:
    found: the checkpoint.
    variables: the variables of this run, by name.
    arrays: those arrays, or specs, that must be there for these variables.
    settings: what the checkpoint must have been made with; None for anything.

  Raises:
    CheckpointMismatchError: it belongs to another run. Names every difference.
  """
  names = match_names(list(variables), list(arrays))
  renamed = {names.get(name, name): each for name, each in arrays.items()}
  different = []
  if settings is not None:
    saved = found.metadata.get('settings', {})
    different += [
      f'{name} was {saved.get(name)!r} and is {settings.get(name)!r}'
      for name in sorted({*saved, *settings})
      # As text: a nan equals no other.
      if json.dumps(saved.get(name)) != json.dumps(settings.get(name))
    ]
  different += differences(variables, renamed)
  if different:
    raise errors.CheckpointMismatchError(
      f'Expected a checkpoint of this run, got {found.path}: '
      f'{"; ".join(different)}. Fix: build the model, and pass the options, that it '
      'was made with, or pass another directory.'
    )
  return renamed


def match_names(names: Sequence[str], saved: Sequence[str]) -> dict[str, str]:
  """Returns this run's name for each saved name that has one.

  Keras counts the models and layers of a process in their names, so the second
  model built by the same code has other names. If names differ only in such
  numbers, they are matched in the order of their numbers. The order of the arrays
  does not count: in a checkpoint tables come last.
  """
  if set(names) != set(saved):
    here, there = sorted(names, key=_place), sorted(saved, key=_place)
    if [*map(_uncounted, here)] == [*map(_uncounted, there)]:
      return dict(zip(there, here, strict=True))
  return {name: name for name in names if name in set(saved)}


def _place(name: str) -> tuple[str, list[int]]:
  # The number behind each word of the name.
  words = re.findall(r'[^\W\d_][^/_#]*(?:_(\d+)(?=[_/#]|$))?', name)
  return _uncounted(name), [int(number or 0) for number in words]


def _uncounted(name: str) -> str:
  # 'adam_1/sequential_2_dense_3_kernel' is 'adam/sequential_dense_kernel'.
  return re.sub(r'_\d+(?=[_/#]|$)', '', name)


def iterations(optimizer: keras.optimizers.Optimizer) -> int:
  """Returns the optimizer's count of calls, accumulation steps included."""
  for variable in optimizer.variables:
    # Others are named after a slot and the updated variable.
    if variable.path.split('/')[-1] == 'iteration':
      return int(variable.numpy())
  return 0


def has_parts(variable: Any) -> bool:
  """Returns whether each replica has its own part of the variable."""
  return _reduction(variable) is not None


def _reduction(variable: Any) -> str | None:
  """Returns how parts make one value, 'mean' or 'sum'; None without parts."""
  value = value_of(variable)
  if vars(value).get('is_of_worker'):
    return 'mean'
  on_read = tf.VariableSynchronization.ON_READ
  if getattr(value, 'synchronization', None) != on_read:
    return None
  is_mean = value.aggregation == tf.VariableAggregation.MEAN
  return 'mean' if is_mean else 'sum'


def is_divided(variable: Any) -> bool:
  """Returns whether each replica stores a piece of the variable."""
  return vars(value_of(variable)).get('shard') is not None


def reductions(variables: Mapping[str, Any]) -> dict[str, str]:
  """Returns 'mean' or 'sum' for each variable of which replicas have parts."""
  found = {name: _reduction(v) for name, v in variables.items()}
  return {name: each for name, each in found.items() if each}


def reduce_parts(array: np.ndarray, reduction: str) -> np.ndarray:
  """Returns the one value of the parts of all replicas."""
  reduce = array.mean if reduction == 'mean' else array.sum
  return reduce(0, dtype=array.dtype)


def value_of(variable: Any) -> Any:
  """Returns the variable of TensorFlow that Keras's one holds."""
  is_keras = isinstance(variable, keras.Variable)
  return variable.value if is_keras else variable


def differences(
  variables: Mapping[str, keras.Variable], specs: Mapping[str, Any]
) -> list[str]:
  """Returns how saved arrays, or their specs, differ from variables."""
  found = []
  for name, variable in variables.items():
    if name not in specs:
      found.append(f'it lacks variable {name}')
      continue
    here, there = list(variable.shape), list(specs[name].shape)
    if has_parts(variable):  # The number of replicas may differ.
      here = [None, *here]
    if here[:1] == [None]:  # As many rows as there are.
      there = there and [None, *there[1:]]
    if here != there:
      found.append(f'variable {name} has shape {there} there and {here} here')
    dtype, here = str(specs[name].dtype), tf.as_dtype(variable.dtype).name
    if here != dtype:
      found.append(f'variable {name} is {dtype} there and {here} here')
  return found + [
    f'variable {name} is not in this run'
    for name in sorted(set(specs) - set(variables))
  ]


class VariableAccess:
  """Reads and writes the variables of a strategy, on one worker or several."""

  def __init__(self, strategy: tf.distribute.Strategy):
    self._strategy = strategy
    self.workers = workers_lib.link_of(strategy)

  @property
  def is_chief(self) -> bool:
    """Returns whether this process reads and writes the files."""
    return self.workers is None or self.workers.rank == 0

  def read(
    self, variables: Mapping[str, keras.Variable]
  ) -> Iterator[tuple[str, np.ndarray]]:
    """Returns names and arrays; a shared variable is read when its turn comes.

    All workers call it. Parts and pieces are gathered at once, so that no worker
    waits for a caller that stops early. Only the chief may use the result.
    """
    gathered = {}
    for name, variable in variables.items():
      if has_parts(variable):
        with tf.device('CPU:0'):
          parts = tf.stack([p.read_value() for p in self._parts(variable)])
        if self.workers is not None:
          parts = self.workers.all_gather(parts, 'checkpoint/parts')
        gathered[name] = parts.numpy()
      elif is_divided(variable):
        whole = value_of(variable).numpy()
        if self.is_chief:
          gathered[name] = whole
    return (
      (k, gathered[k] if k in gathered else np.asarray(value_of(v).numpy()))
      for k, v in variables.items()
    )

  def write(self, variable: keras.Variable, array: np.ndarray) -> None:
    """Assigns a variable its array, in this process alone."""
    if not has_parts(variable):
      with self._strategy.scope():
        variable.assign(array)
      return
    parts = self._parts(variable)
    rank, world_size = 0, 1
    if self.workers is not None:
      rank, world_size = self.workers.rank, self.workers.world_size
    count = len(parts) * world_size
    if len(array) != count:  # Of another number of replicas.
      reduction = _reduction(variable)
      value = reduce_parts(array, reduction)
      array = np.zeros([count, *value.shape], value.dtype)
      array[: count if reduction == 'mean' else 1] = value
    for part, value in zip(parts, array[rank * len(parts) :], strict=False):
      part.assign(value)

  def share(
    self,
    arrays: Mapping[str, np.ndarray],
    specs: Mapping[str, Sequence[Any]],
  ) -> Iterator[tuple[str, np.ndarray]]:
    """Yields names and arrays of the chief on all workers, one by one.

    Args:
      arrays: the arrays, on the chief.
      specs: their `ArraySpec`s, on all workers, in the order of the arrays.
    """
    for name, (dtype, shape, _) in specs.items():
      array = arrays[name] if self.is_chief else np.zeros(shape, dtype)
      if self.workers is not None:
        tensor = tf.constant(array)
        array = self.workers.from_chief(tensor, 'checkpoint/parts').numpy()
      yield name, array

  def _parts(self, variable):
    return self._strategy.experimental_local_results(value_of(variable))
