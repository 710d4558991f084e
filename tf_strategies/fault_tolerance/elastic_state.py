"""`SharedState`: the state that the workers of an elastic job share.

EarlyStopping, ReduceLROnPlateau and others count epochs and keep the best value or
weights. A worker that joins a running `fit` takes this state from the other workers.
Without it, it would stop or change the learning rate at another time than they do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from absl import logging

from tf_strategies import errors, process_group
from tf_strategies.checkpoint import model_state
from tf_strategies.checkpoint.position import Position

# They keep files open during `fit`, so their attributes describe one process only.
KEEP_FILES_OPEN = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)
# Stand in JSON for an array, by its number, and for a function of Keras, by its name.
_ARRAY, _OP = '__array__', '__op__'


class SharedState:
  """Variables, progress and callbacks of a job; survives changes of the workers.

  Attributes:
    strategy: the strategy of the present call of the training function.
    position: completed epochs, and steps of the next one.
    num_steps: number of completed steps of models.
    scalars: values of the shared scalars after the last of these steps. Callbacks may
      have changed them since, such as the learning rate.
    history: values of the logs of the completed epochs of `fit`, by name.
    group: generation of the last group whose state this worker has, and incarnation of
      its rank 0; None before the first. Two groups of a cut network have two states.
    is_one_fit: True if all steps belong to one model, so that another worker can
      continue in the middle of them.
    fit: epochs and steps of an epoch that `job.fit` was called with.
  """

  def __init__(self):
    self.strategy: Any = None
    self.position = Position()
    self.group: list[Any] | None = None
    # Calls of the optimizer until there.
    self.iterations = 0
    self.num_steps = 0
    self.scalars: list[Any] = []
    self._scalars: list[keras.Variable] = []
    self.history: dict[str, list[float]] = {}
    self.fit: tuple[int, int] | None = None
    # Values at the end of a generation, until a model takes them.
    self._held: list[np.ndarray] | None = None

  def begin(self, strategy) -> None:
    """Starts a call of the training function, with this strategy."""
    self.strategy = strategy
    self.group = None
    self.is_one_fit = True
    self.callbacks: Sequence[keras.callbacks.Callback] = ()
    # Variables, metrics and callbacks of the epoch that this worker enters.
    self._entered_with: tuple[list[np.ndarray], ...] | None = None
    # The model and its optimizers by name; empty before `restore`.
    self._objects: dict[str, Any] = {}
    # Values of the metrics after the last step. Keras may have reset them since.
    self._metrics_of_step: Sequence[Any] = ()

  # Progress.

  @property
  def order(self) -> int:
    """Number by which workers compare progress; 0 for a worker without state."""
    if self._held is None and not self.group:
      return 0
    # Each summand grows with the other two, so their sum compares like each of them.
    epoch, step = self.position
    return 1 + (epoch << 40) + step + self.num_steps

  @property
  def is_in_last_epoch_of_fit(self) -> bool:
    """Returns whether every epoch of `fit` is complete."""
    return self.fit is not None and self.position.epoch >= self.fit[0]

  def move(self, epoch: int, step: int) -> None:
    """Records the position."""
    self.position = Position(epoch, step)
    self.iterations = self._iterations()

  def count_step(self) -> None:
    """Counts a step of a model, and keeps the metrics and scalars that it leaves."""
    self.num_steps += 1
    self.scalars = [v.numpy().item() for v in self._scalars]
    self._metrics_of_step = [
      v.value.values[0].read_value() for v in self._metrics()
    ]

  def continue_at(self, answer: dict[str, Any]) -> None:
    """Takes the progress from the answer of the worker whose state this one has."""
    self.history, self.num_steps = answer['history'], answer['steps']
    self.position = Position(*answer['position'])
    self.iterations, self.scalars = answer['iterations'], answer['scalars']

  def _iterations(self) -> int:
    if not self._objects:
      return 0
    return model_state.iterations(self._objects['optimizer'])

  # Variables.

  def set_objects(self, model: keras.Model, optimizer) -> None:
    """Takes the model and the optimizer whose state the workers share."""
    if self._objects:
      is_same = self.model is model and self._objects['optimizer'] is optimizer
      self.is_one_fit &= is_same
    self._objects = model_state.state_of(model, optimizer)
    # Raises an error if the variables cannot be shared.
    self._scalars = [v for v in self._variables() if not tuple(v.shape)]
    if self._held is None:
      # A model that was loaded has been trained before.
      self.iterations = self._iterations()

  @property
  def model(self) -> keras.Model | None:
    """The model whose state the workers share; None before `restore`."""
    return self._objects.get('model')

  def may_share(self) -> bool:
    """Returns whether the model whose state is shared is known.

    Raises:
      UnsupportedOptionError: there is a model that has not been restored.
    """
    if self._objects:
      return True
    if not self.strategy.extended.has_variables:
      return False
    raise errors.UnsupportedOptionError(
      'a model without it',
      'a call of job.restore',
      'call job.restore(model) before training and job.position',
    )

  def describe(self) -> list[str]:
    """Returns the types of the shared variables.

    Their names may differ between workers, since Keras counts the layers of a process.
    """
    return [f'{v.dtype}{list(v.shape)}' for v in self._variables()]

  def hold(self) -> None:
    """Copies this worker's state to memory, for the next call."""
    if not (self._objects and self.group):
      return  # The previous copy is still valid.
    # Steps may have been applied before the program could record them.
    applied = self._iterations() - self.iterations
    if applied > 0:
      self.move(self.position.epoch, self.position.step + applied)
    self._held = _read(self._variables())
    self._objects = {}

  def take(self, group, root: int, has_it: bool, enters_fit: bool) -> None:
    """Takes the state of rank `root`; all workers call it.

    Args:
      group: the process group.
      root: the rank that has the state.
      has_it: whether this worker has the state already.
      enters_fit: whether this worker enters a `fit` that is running.
    """
    variables = self._variables()
    values = _read(variables) if self._held is None else self._held
    if not _have_shapes(values, variables):
      raise errors.CheckpointMismatchError(
        'Expected the variables that this worker has trained, got others of '
        'the model and its optimizers. Fix: build the same ones in each call '
        'of the training function, before job.restore.'
      )
    metrics = [np.array(value) for value in self._metrics_of_step]
    values = hand_on(group, root, 'variables', values)
    metrics = hand_on(group, root, 'metrics', metrics)
    callbacks = hand_on(group, root, 'callbacks', pack(self.callbacks))
    if not has_it:
      self._assign(variables, values)
      self._assign_metrics(metrics)
    self._metrics_of_step = metrics
    # Not before: the group may fail until here.
    self._held = None
    entered = values, metrics, callbacks
    self._entered_with = entered if enters_fit else None

  def skip_step(self, scalars: list[Any]) -> None:
    """Continues behind a step that the others have done, before their callbacks."""
    self.scalars = scalars
    self._assign(self._scalars, scalars)

  def enter_fit(self) -> None:
    """Continues a `fit` from the state of the others, at its first batch.

    Callbacks have changed variables since, such as the learning rate.
    """
    taken, self._entered_with = self._entered_with, None
    if taken is not None:
      values, metrics, callbacks = taken
      self._assign(self._variables(), values)
      if self.position.step:
        self._assign_metrics(metrics)
      unpack(callbacks, self.callbacks)

  def _variables(self) -> list[keras.Variable]:
    """Returns the shared variables, all of which every worker must have whole."""
    variables = model_state.name_objects(self._objects).values()
    for variable in variables:
      if model_state.has_parts(variable):
        raise errors.UnsupportedOptionError(
          f'variable {variable.path!r}, of which each replica has a part',
          'whole variables in elastic training',
          'train the model by job.fit, or in a loop by strategy.step',
        )
    return list(variables)

  def _metrics(self):
    """Returns the metric variables that every worker holds whole."""
    variables = self.model.metrics_variables if self.model else ()
    return [v for v in variables if vars(v.value).get('holds_whole', False)]

  def _assign_metrics(self, values):
    """Assigns metrics the values of a rank, if that has the same metrics."""
    variables = self._metrics()
    if _have_shapes(values, variables):
      self._assign(variables, values)

  def _assign(self, variables, values):
    with self.strategy.scope():
      for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _read(variables) -> list[np.ndarray]:
  return [np.array(variable.numpy()) for variable in variables]


def _have_shapes(values, variables) -> bool:
  """Returns whether arrays have the shapes of variables."""
  return [v.shape for v in values] == [tuple(v.shape) for v in variables]


def pack(callbacks: Sequence[keras.callbacks.Callback]) -> list[np.ndarray]:
  """Returns the numbers, texts and arrays among the attributes of callbacks.

  Returns:
    JSON text as uint8 [n], and the arrays that the text refers to.

  Example:

    >>> from tf_strategies.fault_tolerance import elastic_state
    >>> stop = keras.callbacks.EarlyStopping()
    >>> stop.wait = 3
    >>> packed = elastic_state.pack([stop])
    >>> other = keras.callbacks.EarlyStopping()
    >>> elastic_state.unpack(packed, [other])
    >>> other.wait
    3
  """
  arrays: list[np.ndarray] = []

  def to_json(value):
    if isinstance(value, np.generic):
      return value.item()
    if isinstance(value, np.ndarray):
      arrays.append(value)
      return {_ARRAY: len(arrays) - 1}
    return {_OP: value.__name__}

  told = []
  for callback in map(_inner, callbacks):
    keeps_open = isinstance(callback, KEEP_FILES_OPEN)
    attributes = {
      name: value
      for name, value in vars(callback).items()
      if not keeps_open and name != 'params' and _is_packed(value)
    }
    told.append([type(callback).__name__, attributes])
  text = json.dumps(told, default=to_json).encode()
  return [np.frombuffer(text, np.uint8), *arrays]


def unpack(
  packed: Sequence[np.ndarray], callbacks: Sequence[keras.callbacks.Callback]
) -> None:
  """Assigns packed attributes to callbacks, if these are of the same classes."""
  text, *arrays = packed

  def from_json(value):
    if _ARRAY in value:
      return arrays[value[_ARRAY]]
    return _op(value[_OP]) if _OP in value else value

  told = json.loads(text.tobytes(), object_hook=from_json)
  callbacks = [_inner(callback) for callback in callbacks]
  classes = [name for name, _ in told]
  if classes != [type(callback).__name__ for callback in callbacks]:
    logging.warning(
      'The callbacks of this worker differ from %s, the callbacks of the other '
      'workers: they start from scratch.',
      classes,
    )
    return
  for callback, (_, attributes) in zip(callbacks, told, strict=True):
    for name, value in attributes.items():
      setattr(callback, name, value)


def hand_on(
  group: process_group.ProcessGroup,
  root: int,
  what: str,
  arrays: Sequence[np.ndarray],
) -> list[np.ndarray]:
  """Returns the arrays of rank `root`; all workers call it.

  The arrays of the other ranks are ignored, and may be of other shapes.
  """
  mine = [(a.dtype.name, a.shape) for a in arrays]
  answers = group.exchange(f'elastic/{what}', mine)
  handed = []
  for i, (dtype, shape) in enumerate(answers[root]):
    array = arrays[i] if group.rank == root else np.zeros(shape, dtype)
    handed.append(group.broadcast(array, root, name=f'elastic/{what}/{i}'))
  return handed


def _inner(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
  """Returns the callback inside a wrapper such as `ChiefOnly`."""
  return getattr(callback, 'callback', callback)


def _op(name: str) -> Any:
  """Returns a function of Keras, such as the comparison that a callback uses."""
  return getattr(keras.ops, name, None)


def _is_packed(value: Any) -> bool:
  """Returns whether `pack` takes an attribute with this value."""
  if isinstance(value, dict):
    return all(isinstance(k, str) and _is_packed(v) for k, v in value.items())
  if isinstance(value, list):
    return all(map(_is_packed, value))
  if isinstance(value, np.ndarray):
    return value.dtype.kind in 'biufV'
  if isinstance(value, np.generic):
    value = value.item()
  is_op = value is _op(getattr(value, '__name__', ''))  # So is None.
  return is_op or isinstance(value, bool | int | float | str)
