"""`State`: what the workers of an elastic job have in common, on one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_strategies import errors
from tf_strategies.checkpoint import model_state
from tf_strategies.checkpoint.position import Position
from tf_strategies.fault_tolerance import elastic_callbacks
from tf_strategies.keras import chief_only


class Progress(NamedTuple):
  """How far a job has come, comparable across global batch sizes."""

  epoch: int = 0
  step: int = 0
  batch_size: int = 1  # Rows of these steps; 1 if the job does not know it.
  first_world: int = 0  # Workers of the first generation.
  world: int = 0  # Workers of the generation that trained these steps.

  @property
  def rows(self) -> int:
    """Completed rows of the next epoch."""
    return self.step * self.batch_size


class State:
  """Variables, progress and callbacks of a job; survives changes of the workers.

  Attributes:
    strategy: of the present call of the training function.
    progress: of this worker.
    num_steps: completed steps of models.
    is_shared: True once this worker has the state of the group that it is in.
    is_one_fit: True if all steps belong to one model, so that another worker can
      continue in the middle of them.
    fit: epochs and steps of an epoch that `job.fit` was called with.
    files_are_common: True if the workers agree on the files that callbacks write,
      so that the chief writes them; None before they have compared them.
  """

  def __init__(self, learning_rate: str = 'keep'):
    self._learning_rate = learning_rate
    self.strategy: Any = None
    self.progress = Progress()
    self.num_steps = 0
    self.fit: tuple[int, int] | None = None
    # Values at the end of a generation, until a model takes them; and the gradients
    # that this worker has not sent.
    self._held: list[np.ndarray] | None = None
    self._held_rests: list[np.ndarray] = []
    self._objects: dict[str, Any] | None = (
      None  # By name, of which it is the state.
    )
    # Batches that a callback counted, and the optimizer's count before them.
    self._counted = 0
    self._iterations_at_start = 0
    # Metrics before they were reset, and `num_steps` then.
    self._before_reset: tuple[int, list[np.ndarray]] | None = None
    # Variables and metrics of the epoch that this worker enters.
    self._entered_with: tuple[list[np.ndarray], Any] | None = None

  def begin(self, strategy, is_one_fit: bool) -> None:
    """Starts a call of the training function, with this strategy."""
    self.strategy = strategy
    self.is_shared = False
    self.is_one_fit = is_one_fit
    self.batch_size = 1
    self.callbacks: Sequence[keras.callbacks.Callback] = ()
    self.files_are_common: bool | None = None
    self._callbacks_of_others: np.ndarray | None = None
    self._objects = self._model = self._optimizer = None

  # Progress.

  @property
  def order(self) -> int:
    """Number by which workers compare progress; 0 for one that has no state."""
    if self._held is None and not self.is_shared:
      return 0
    # None of the three is less where another one is more.
    return 1 + (self.progress.epoch << 40) + self.progress.rows + self.num_steps

  @property
  def position(self) -> Position:
    """Completed epochs, and steps of this generation's batch size."""
    return Position(self.progress.epoch, self.progress.rows // self.batch_size)

  @property
  def is_in_last_epoch_of_fit(self) -> bool:
    """Returns whether every epoch of `fit` is complete."""
    return self.fit is not None and self.progress.epoch >= self.fit[0]

  def move(self, epoch: int, step: int) -> None:
    """Sets the position."""
    self.progress = self.progress._replace(
      epoch=epoch, step=step, batch_size=self.batch_size
    )

  def finish_batch(self, step: int) -> None:
    """Records the completed batches of an epoch of `fit`."""
    self._counted += step - self.position.step
    self.move(self.progress.epoch, step)

  def start_at(self, epoch: int, step: int) -> None:
    """Sets the position, and counts batches from there."""
    self._start_counting()
    self.move(epoch, step)

  def continue_at(self, progress: Sequence[int], num_steps: int) -> None:
    """Takes the progress of the other workers."""
    taken, world = Progress(*progress), self.strategy.num_workers
    if taken.world:
      self._scale_learning_rate(taken.world, world)
    self.progress = taken._replace(
      first_world=taken.first_world or world, world=world
    )
    self.num_steps = num_steps
    self._start_counting()

  def _start_counting(self):
    self._counted = 0
    self._iterations_at_start = self._iterations()

  def _iterations(self) -> int:
    if self._optimizer is None:  # Before `restore`.
      return 0
    return model_state.iterations(self._optimizer)

  def _scale_learning_rate(self, world_before, world):
    """Scales the learning rate with the global batch, as the options say."""
    policy, optimizer = self._learning_rate, self._optimizer
    if policy == 'keep' or world == world_before:
      return
    if not isinstance(optimizer.learning_rate, keras.Variable):
      raise errors.UnsupportedOptionError(
        f'learning_rate={policy!r} with a learning rate schedule',
        'a constant learning rate',
        "write learning_rate='keep', or scale the schedule in the program",
      )
    ratio = world / world_before
    factor = ratio if policy == 'linear' else math.sqrt(ratio)
    with self.strategy.scope():
      optimizer.learning_rate.assign(optimizer.learning_rate.numpy() * factor)

  # Variables.

  def set_objects(self, model: keras.Model, optimizer) -> None:
    """Takes the objects of which this is the state, and gives them the rests."""
    if self._objects is not None:
      is_same = self._model is model and self._optimizer is optimizer
      self.is_one_fit = self.is_one_fit and is_same
    others = {
      name: value
      for name, value in vars(model).items()
      if isinstance(value, keras.optimizers.Optimizer)
      and value not in (optimizer, model.optimizer)
    }
    self._objects = {'model': model, 'optimizer': optimizer, **others}
    self._model, self._optimizer = model, optimizer
    self._variables()  # Raises an error if they cannot be shared.
    rests, held = self._rests(), self._held_rests
    if [v.shape for v in held] == [tuple(v.shape) for v in rests]:
      self._assign(rests, held)
    self._held_rests = []

  @property
  def model(self) -> keras.Model | None:
    """The model of which this is the state; None before `restore`."""
    return self._model

  def may_share(self) -> bool:
    """Returns whether the model is known whose state is shared.

    Raises:
      UnsupportedOptionError: there is one that has not been restored.
    """
    if self._objects is not None:
      return True
    if not self.strategy.extended.has_variables:
      return False
    raise errors.UnsupportedOptionError(
      'a model in an elastic job that job.restore was not called with',
      'a model that has the state of the other workers',
      'call job.restore(model) before training and job.position',
    )

  def describe(self) -> list[str]:
    """Returns the types of the shared variables; not their names, which Keras counts."""
    return [f'{v.dtype}{list(v.shape)}' for v in self._variables()]

  def hold(self) -> None:
    """Copies this worker's state to memory, for the next call."""
    if self._objects is None or not self.is_shared:
      return  # The copy of before is still valid.
    # Steps may have been applied before a callback could record them.
    applied = self._iterations() - self._iterations_at_start
    if applied > self._counted:
      step = self.position.step + applied - self._counted
      self.move(self.progress.epoch, step)
    self._held = _read(self._variables())
    self._held_rests = _read(self._rests())
    self._objects = None

  def take(self, group, root: int, is_missing: bool, is_entering: bool) -> None:
    """Receives the state of a rank.

    Args:
      group: of all workers, which call this.
      root: the rank that has the state.
      is_missing: whether this worker has not.
      is_entering: whether this worker enters a `fit` in which others are already.
    """
    variables = self._variables()
    is_root = group.rank == root
    held = self._held if is_root and not self.is_shared else None
    if held is None:
      held = _read(variables)
    elif [v.shape for v in held] != [tuple(v.shape) for v in variables]:
      raise errors.CheckpointMismatchError(
        'The model and its optimizers have other variables than those that this '
        'worker has trained. Fix: build the same ones in each call of the training '
        'function, before job.restore.'
      )
    values = []
    for i, value in enumerate(held):
      flat = np.frombuffer(value.tobytes(), np.uint8)
      flat = group.broadcast(flat, root, name=f'elastic/{i}')
      values.append(_like(flat, value))
    metrics = self._take_metrics(group, root)
    if is_missing:
      self._assign(variables, values)
    if is_missing and metrics is not None:
      self._assign(self._metrics(), metrics)
    self._held = None
    self._entered_with = (values, metrics) if is_entering else None

  def _take_metrics(self, group, root):
    """Returns the metrics of a rank; None if this worker has other ones."""
    values = _read(self._metrics())
    if self._before_reset and self._before_reset[0] == self.num_steps:
      values = self._before_reset[1]
    flat = np.frombuffer(b''.join(v.tobytes() for v in values), np.uint8)
    flat = _broadcast(group, root, flat, 'metrics')
    if not values or flat.size != sum(v.nbytes for v in values):
      return None
    ends = np.cumsum([v.nbytes for v in values])
    parts = np.split(flat, ends[:-1])
    return [_like(part, v) for part, v in zip(parts, values, strict=True)]

  def hold_metrics(self, model) -> None:
    """Keeps metrics before they are reset, for a worker that is a step behind."""
    if model is self._model:
      self._before_reset = self.num_steps, _read(self._metrics())

  def begin_epoch(self) -> None:
    """Continues as the others, for whom the epoch had begun.

    Callbacks have changed variables at its begin, such as the learning rate.
    """
    taken, self._entered_with = self._entered_with, None
    if taken is None:
      return
    values, metrics = taken
    self._assign(self._variables(), values)
    if metrics is not None and self.progress.step:
      self._assign(self._metrics(), metrics)

  def _variables(self) -> list[keras.Variable]:
    """Returns the shared variables, all of which every worker must have whole."""
    variables = model_state.name_objects(self._objects).values()
    for variable in variables:
      if model_state.has_parts(variable):
        raise errors.UnsupportedOptionError(
          f'variable {variable.path!r}, of which each replica has a part, in '
          'elastic training',
          'state that every worker has whole',
          'train the model by job.fit, or in a loop by strategy.step',
        )
    return list(variables)

  def _rests(self) -> list[tf.Variable]:
    """Returns the variables with the gradients that this worker has not sent."""
    communicator = self.strategy.extended.communicator
    return [
      *communicator.gradient_state(self._model.trainable_variables).values()
    ]

  def _metrics(self):
    """Returns the metrics of which every worker has all, as models' steps make them."""
    variables = self._model.metrics_variables
    return [v for v in variables if vars(v.value).get('holds_whole', False)]

  def _assign(self, variables, values):
    with self.strategy.scope():
      for variable, value in zip(variables, values, strict=True):
        variable.assign(value)

  # Callbacks.

  @property
  def files(self) -> list[tuple[str, str | None]]:
    """Returns the files that callbacks of `fit` write."""
    written = [
      (type(c).__name__, chief_only.path_of(c)) for c in self.callbacks
    ]
    return [each for each in written if each[1] is not None]

  def share_callbacks(self, group, root: int, is_missing: bool) -> None:
    """Receives the attributes of a rank's callbacks, for a worker that comes late."""
    packed = elastic_callbacks.pack(self.callbacks)
    packed = _broadcast(group, root, packed, 'callbacks')
    self._callbacks_of_others = packed if is_missing else None

  def take_callbacks(self) -> None:
    """Gives callbacks the attributes that were received, once."""
    taken, self._callbacks_of_others = self._callbacks_of_others, None
    if taken is not None:
      elastic_callbacks.unpack(taken, self.callbacks)


def _read(variables) -> list[np.ndarray]:
  return [np.array(variable.numpy()) for variable in variables]


def _broadcast(group, root: int, flat: np.ndarray, what: str) -> np.ndarray:
  """Returns the root's bytes, of which only it knows how many there are."""
  size = np.int64([flat.size])
  size = group.broadcast(size, root, name=f'elastic/{what}/size')[0]
  if group.rank != root:
    flat = np.zeros([size], np.uint8)
  return group.broadcast(flat, root, name=f'elastic/{what}')


def _like(flat: np.ndarray, value: np.ndarray) -> np.ndarray:
  """Returns bytes as an array of the dtype and shape of `value`."""
  return np.frombuffer(flat.tobytes(), value.dtype).reshape(value.shape)
