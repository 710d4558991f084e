"""`Job`: the state of an elastic job, and what its training function calls."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_strategies import errors
from tf_strategies.checkpoint import model_state
from tf_strategies.checkpoint.position import Position
from tf_strategies.fault_tolerance import elastic_options

MakeBatches = Callable[[int, int], tf.data.Dataset]


class MembershipChange(errors.Error):
  """Other workers wait to join: the group forms again."""


@dataclasses.dataclass(frozen=True)
class Progress:
  """How far a job has come, comparable across global batch sizes.

  Attributes:
    position: completed epochs, and steps of the next one.
    batch_size: rows of these steps; 1 if the job does not know it.
    first_world: workers of the first generation.
    world: workers of the generation that trained these steps.
  """

  position: Position = dataclasses.field(default_factory=Position)
  batch_size: int = 1
  first_world: int = 0
  world: int = 0

  @property
  def rows(self) -> int:
    """Completed rows of the next epoch."""
    return self.position.step * self.batch_size

  @property
  def order(self) -> int:
    """One number that is larger for the more advanced worker."""
    return (self.position.epoch << 40) + self.rows

  def to_json(self) -> bytes:
    """Returns what `from_json` reads."""
    return json.dumps(dataclasses.asdict(self)).encode()

  @classmethod
  def from_json(cls, data: bytes) -> Progress:
    """Returns the progress of another worker."""
    fields = json.loads(data)
    return cls(**{**fields, 'position': Position.from_json(fields['position'])})


@dataclasses.dataclass
class Generation:
  """One group of workers, as seen by one of them; times are `time.time()`.

  Attributes:
    number: of the generation.
    world_size: workers in it.
    rank: this worker's.
    began: when the group formed.
    first_step: when its first step ended; None before that.
    ended: when it ended; None while it runs.
    reason: why it ended; empty at the end of training.
  """

  number: int
  world_size: int
  rank: int
  began: float
  first_step: float | None = None
  ended: float | None = None
  reason: str = ''


class Job:
  """State that survives changes of the workers.

  Attributes:
    strategy: of this generation; build the model in its scope.
    generations: in which this worker took part.
  """

  def __init__(self, options: elastic_options.ElasticOptions):
    self._options = options
    self.strategy: Any = None
    self.generations: list[Generation] = []
    self._progress = Progress()
    self._held: list[np.ndarray] | None = None
    self._variables: list[keras.Variable] | None = None
    self._optimizer = None
    self._batch = 0
    self._epochs: int | None = None
    # Batches that a callback counted, and the optimizer's count before them.
    self._counted = 0
    self._iterations_at_start = 0

  @property
  def state(self) -> Progress:
    """Progress of this worker, independent of the batch of this generation."""
    return self._progress

  @property
  def position(self) -> Position:
    """How far this worker has come, in steps of this generation."""
    return Position(self.epoch, self.step)

  @property
  def progress(self) -> int:
    """What workers compare: 0 for one that has no state."""
    return 0 if self._held is None else 1 + self._progress.order

  @property
  def epoch(self) -> int:
    """Completed epochs."""
    return self._progress.position.epoch

  @property
  def step(self) -> int:
    """Completed batches of the current epoch."""
    return self._progress.rows // (self._batch or 1)

  def begin(self, strategy) -> None:
    """Starts a generation."""
    self.strategy = strategy
    group = strategy.process_group
    self.generations.append(
      Generation(group.generation, group.world_size, group.rank, time.time())
    )
    self._variables = None
    self._batch = 0

  def end(self, reason: str) -> None:
    """Ends a generation."""
    if self.generations and self.generations[-1].ended is None:
      self.generations[-1].ended = time.time()
      self.generations[-1].reason = reason

  def hold(self) -> None:
    """Copies this worker's state to memory, for the next generation."""
    if self._variables is None:
      return  # Not restored yet: the copy of before is still valid.
    self._count_unreported()
    self._held = [_read(v) for v in self._variables]
    self._variables = None

  def restore(self, model: keras.Model, optimizer=None) -> None:
    """Assigns the model the state of the most advanced worker.

    Args:
      model: built; unchanged in the first generation.
      optimizer: of the model, if it is not compiled.

    Raises:
      CheckpointMismatchError: the model has other variables than before.
      UnsupportedOptionError: state of which each replica has only a part.
    """
    optimizer = optimizer or model.optimizer
    with self.strategy.scope():
      optimizer.build(model.trainable_variables)
    variables = _state_of(model, optimizer)
    group = self.strategy.process_group
    best = max(group.members, key=lambda m: (m.progress, -m.rank))
    answers = group.exchange('elastic/position', self._progress.to_json())
    progress = Progress.from_json(answers[best.rank])
    if best.progress:
      self._receive(group, best.rank, variables)
      self._scale_learning_rate(optimizer, progress.world, group.world_size)
      self._held = [_read(v) for v in variables]
    self._progress = dataclasses.replace(
      progress,
      first_world=progress.first_world or group.world_size,
      world=group.world_size,
    )
    self._optimizer = optimizer
    self._start_counting()
    self._variables = variables

  def global_batch_size(self, size: int) -> int:
    """Returns the global batch of this generation; call it after `restore`.

    Args:
      size: the global batch of the first generation.

    Returns:
      `size`; with batch='per_replica', in proportion to the number of workers.
    """
    if not self._progress.first_world:
      raise errors.UnsupportedOptionError(
        'job.global_batch_size before job.restore',
        'a job that knows how many workers it started with',
        'call job.restore(model) first',
      )
    if self._options.batch == 'per_replica':
      size = size * self._progress.world // self._progress.first_world
    self._batch = size
    return size

  def update(self, epoch: int, step: int) -> None:
    """Records the progress of a custom loop; call it after each step.

    Args:
      epoch: completed epochs.
      step: completed batches of the next one.

    Raises:
      MembershipChange: other workers wait to join; `run` handles it.
    """
    is_new_epoch = epoch != self.epoch
    self._set(epoch, step)
    self._start_counting()
    if self._options.join == 'step' or (
      is_new_epoch and self._options.join == 'epoch'
    ):
      self._let_in()

  def callback(self) -> ElasticCallback:
    """Returns a callback for `fit` that records the job's position."""
    return ElasticCallback(self, self.step)

  def fit(
    self,
    model: keras.Model,
    make_batches: MakeBatches,
    epochs: int,
    steps_per_epoch: int,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    **options,
  ) -> keras.callbacks.History | None:
    """Calls `model.fit` for the rest of the job.

    Args:
      model: restored.
      make_batches: called with an epoch and a step; returns the batches from
        there to the end of the job.
      epochs: of the whole job.
      steps_per_epoch: of a whole epoch.
      callbacks: see a single `fit`. Metrics of an interrupted epoch cover its
        last part.
      **options: of `fit`, such as `validation_data`.

    Returns:
      The last history; None if nothing was left to do.
    """
    epoch, step = self.epoch, self.step
    if step >= steps_per_epoch:
      epoch, step = epoch + 1, 0
      self._set(epoch, 0)
    self._epochs = epochs
    parts = _Parts([*callbacks, self.callback()])
    history = None
    while epoch < epochs:
      # The rest of an interrupted epoch, then all the others at once.
      last = epoch + 1 if step else epochs
      history = model.fit(
        make_batches(epoch, step),
        initial_epoch=epoch,
        epochs=last,
        steps_per_epoch=steps_per_epoch - step,
        callbacks=[parts],
        **options,
      )
      if model.stop_training:
        break
      epoch, step = last, 0
    parts.finish()
    return history

  def finish_epoch(self, epoch: int) -> None:
    """Records a completed epoch, and lets waiting workers join."""
    self._set(epoch + 1, 0)
    self._start_counting()
    is_last = self._epochs is not None and epoch + 1 >= self._epochs
    if self._options.join != 'never' and not is_last:
      self._let_in()

  def finish_batch(self, step: int) -> None:
    """Records the completed batches of an epoch."""
    self._counted += step - self.step
    self._set(self.epoch, step)
    if self._options.join == 'step':
      self._let_in()

  def _set(self, epoch, step):
    if self.generations and self.generations[-1].first_step is None:
      self.generations[-1].first_step = time.time()
    self._progress = dataclasses.replace(
      self._progress,
      position=Position(epoch, step),
      batch_size=self._batch or 1,
    )

  def _let_in(self):
    group = self.strategy.process_group
    limit = self._options.max_workers
    members = {member.task for member in group.members}
    outside = [t for t in group.pending_joiners() if t not in members]
    waiting = np.array([len(outside)], np.int32)
    # All decide alike, whoever learned of the new worker first.
    waiting = int(group.all_reduce(waiting, op='max', name='joiners')[0])
    if waiting and (limit is None or group.world_size < limit):
      raise MembershipChange(f'{waiting} workers wait to join.')

  def _start_counting(self):
    self._counted = 0
    self._iterations_at_start = self._iterations()

  def _count_unreported(self):
    """Counts steps that were applied before a callback could record them."""
    applied = self._iterations() - self._iterations_at_start
    if applied > self._counted:
      self._set(self.epoch, self.step + applied - self._counted)

  def _iterations(self) -> int:
    if self._optimizer is None:  # Before `restore`.
      return 0
    return model_state.iterations(self._optimizer)

  def _receive(self, group, root, variables):
    """Receives all variables from one rank, before any is assigned."""
    # Not their names, in which Keras counts the models of a process.
    shapes = [[*v.shape, v.dtype] for v in variables]
    try:
      group.agree(shapes, what='the variables of the model')
    except errors.CollectiveMismatchError as e:
      raise errors.CheckpointMismatchError(str(e)) from e
    values = []
    for i, variable in enumerate(variables):
      value = self._held[i] if group.rank == root else _read(variable)
      flat = np.frombuffer(value.tobytes(), np.uint8)
      flat = group.broadcast(flat, root, name=f'elastic/{i}')
      values.append(
        np.frombuffer(flat.tobytes(), value.dtype).reshape(value.shape)
      )
    with self.strategy.scope():
      for variable, value in zip(variables, values, strict=True):
        variable.assign(value)

  def _scale_learning_rate(self, optimizer, world_before, world):
    """Scales the learning rate with the global batch, as the options say."""
    policy = self._options.learning_rate
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


class ElasticCallback(keras.callbacks.Callback):
  """Records the progress of `fit` in a job.

  Args:
    job: of this process.
    first_step: completed batches of the first epoch.
  """

  def __init__(self, job: Job, first_step: int = 0):
    super().__init__()
    self._job = job
    self._first_step = first_step

  def on_train_batch_end(self, batch, logs=None):
    """Counts a batch."""
    self._job.finish_batch(self._first_step + batch + 1)

  def on_epoch_end(self, epoch, logs=None):
    """Counts an epoch."""
    self._first_step = 0
    self._job.finish_epoch(epoch)


class _Parts(keras.callbacks.CallbackList):
  """Callbacks that see several calls of `fit` as one."""

  _has_begun = False
  _last_logs = None

  def on_train_begin(self, logs=None):
    if not self._has_begun:
      self._has_begun = True
      super().on_train_begin(logs)

  def on_train_end(self, logs=None):
    self._last_logs = logs

  def finish(self) -> None:
    """Ends the training, if it began."""
    if self._has_begun:
      super().on_train_end(self._last_logs)


def _state_of(model, optimizer) -> list[keras.Variable]:
  """The variables of a run, all of which every worker must have whole."""
  variables = model_state.name_variables(model, optimizer).values()
  for variable in variables:
    if model_state.has_parts(variable):
      raise errors.UnsupportedOptionError(
        f'variable {variable.path!r}, of which each replica has a part, in '
        'elastic training',
        'state that every worker has whole',
        'wrap the optimizer: tfs.keras.DistributedOptimizer(optimizer)',
      )
  return list(variables)


def _read(variable) -> np.ndarray:
  return np.array(variable.numpy())
