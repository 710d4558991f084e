"""What a training function of an elastic job holds on to."""

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
from tf_strategies.fault_tolerance import elastic_options

MakeBatches = Callable[[int, int], tf.data.Dataset]


class MembershipChange(errors.Error):
  """Other workers wait to be let in: the ring forms again."""


@dataclasses.dataclass(frozen=True)
class Position:
  """How far a job has come.

  Attributes:
    epoch: epochs that are done.
    rows: rows of the next epoch that are done; batches, if the job does not know
      the batch size.
    first_world: workers of the first generation.
    world: workers of the generation that came so far.
  """

  epoch: int = 0
  rows: int = 0
  first_world: int = 0
  world: int = 0

  @property
  def progress(self) -> int:
    """One number that is larger for whoever has come further."""
    return (self.epoch << 40) + self.rows


@dataclasses.dataclass
class Generation:
  """One group of workers, as one of them saw it; times are `time.time()`.

  Attributes:
    number: of the generation.
    world_size: workers in it.
    rank: this worker's.
    began: when the group had formed.
    first_step: when its first step was done; None before that.
    ended: when it ended; None while it runs.
    reason: why it ended, empty at the end of the training.
  """

  number: int
  world_size: int
  rank: int
  began: float
  first_step: float | None = None
  ended: float | None = None
  reason: str = ''


class Job:
  """State that outlives the workers' comings and goings.

  Attributes:
    strategy: of this generation; a model must be built in its scope.
    generations: what this worker has lived through.
  """

  def __init__(self, options: elastic_options.ElasticOptions):
    self._options = options
    self.strategy: Any = None
    self.generations: list[Generation] = []
    self._position = Position()
    self._held: list[np.ndarray] | None = None
    self._variables: list[keras.Variable] | None = None
    self._optimizer = None
    self._batch = 0
    self._epochs: int | None = None
    # Batches that a callback counted, and the optimizer's count before them.
    self._counted = 0
    self._iterations_at_start = 0

  # Where the job is.

  @property
  def position(self) -> Position:
    """Of this worker."""
    return self._position

  @property
  def progress(self) -> int:
    """What the others compare: 0 for a worker that has no state."""
    return 0 if self._held is None else 1 + self._position.progress

  @property
  def epoch(self) -> int:
    """Epochs that are done."""
    return self._position.epoch

  @property
  def step(self) -> int:
    """Batches of the current epoch that are done."""
    return self._position.rows // (self._batch or 1)

  # What `run` calls.

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
    """Keeps this worker's state in memory, for the next generation."""
    if self._variables is None:
      return  # It had not been restored yet: what was held still counts.
    self._count_unreported()
    self._held = [_read(v) for v in self._variables]
    self._variables = None

  # What a training function calls.

  def restore(self, model: keras.Model, optimizer=None) -> None:
    """Gives a model the state of the member that has come furthest.

    Args:
      model: built; in the first generation it stays as it is.
      optimizer: of the model, if it is not compiled.

    Raises:
      CheckpointMismatchError: the model has other variables than before.
      UnsupportedOptionError: state that only all workers together have.
    """
    optimizer = optimizer or model.optimizer
    with self.strategy.scope():
      optimizer.build(model.trainable_variables)
    variables = _state_of(model, optimizer)
    group = self.strategy.process_group
    best = max(group.members, key=lambda m: (m.progress, -m.rank))
    position = dataclasses.asdict(self._position)
    answers = group.exchange('elastic/position', json.dumps(position).encode())
    position = Position(**json.loads(answers[best.rank]))
    if best.progress:
      self._receive(group, best.rank, variables)
      self._scale_learning_rate(optimizer, position.world, group.world_size)
      self._held = [_read(v) for v in variables]
    self._position = dataclasses.replace(
      position,
      first_world=position.first_world or group.world_size,
      world=group.world_size,
    )
    self._optimizer = optimizer
    self._start_counting()
    self._variables = variables

  def global_batch_size(self, size: int) -> int:
    """The global batch of this generation; call it after `restore`.

    Args:
      size: the global batch of the first generation.

    Returns:
      `size`, or with batch='per_replica' what follows the number of workers.
    """
    if not self._position.first_world:
      raise errors.UnsupportedOptionError(
        'job.global_batch_size before job.restore',
        'a job that knows how many workers it began with',
        'call job.restore(model) first',
      )
    if self._options.batch == 'per_replica':
      size = size * self._position.world // self._position.first_world
    self._batch = size
    return size

  def update(self, epoch: int, step: int) -> None:
    """Tells how far a loop of one's own has come: call it after each step.

    Args:
      epoch: epochs that are done.
      step: batches of the next one that are done.

    Raises:
      Error: other workers wait to be let in; leave it to `run`.
    """
    is_new_epoch = epoch != self._position.epoch
    self._set(epoch, step)
    self._start_counting()
    if self._options.join == 'step' or (
      is_new_epoch and self._options.join == 'epoch'
    ):
      self._let_in()

  def callback(self) -> ElasticCallback:
    """A callback for `fit` that keeps the job's position."""
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
    """Calls `model.fit` for what is left of the job.

    Args:
      model: restored.
      make_batches: called with an epoch and a step; returns the batches from
        there on, to the end of the job.
      epochs: of the whole job.
      steps_per_epoch: of a whole epoch.
      callbacks: of the user, to which this is one `fit`. Metrics of an epoch
        that was interrupted are those of its last part.
      **options: of `fit`, such as `validation_data`.

    Returns:
      The last history; None if nothing was left.
    """
    epoch, step = self.epoch, self.step
    if step >= steps_per_epoch:
      epoch, step = epoch + 1, 0
      self._set(epoch, 0)
    self._epochs = epochs
    parts = _Parts([*callbacks, self.callback()])
    history = None
    while epoch < epochs:
      # What is left of an interrupted epoch, then all the others at once.
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

  # The details.

  def finish_epoch(self, epoch: int) -> None:
    """Counts an epoch as done, and lets others in if they wait."""
    self._set(epoch + 1, 0)
    self._start_counting()
    is_last = self._epochs is not None and epoch + 1 >= self._epochs
    if self._options.join != 'never' and not is_last:
      self._let_in()

  def finish_batch(self, step: int) -> None:
    """Counts the batches of an epoch that are done."""
    self._counted += step - self.step
    self._set(self.epoch, step)
    if self._options.join == 'step':
      self._let_in()

  def _set(self, epoch, step):
    if self.generations and self.generations[-1].first_step is None:
      self.generations[-1].first_step = time.time()
    self._position = dataclasses.replace(
      self._position, epoch=epoch, rows=step * (self._batch or 1)
    )

  def _let_in(self):
    group = self.strategy.process_group
    limit = self._options.max_workers
    members = {member.task for member in group.members}
    outside = [t for t in group.pending_joiners() if t not in members]
    waiting = np.array([len(outside)], np.int32)
    # All decide alike, whoever heard of the newcomer first.
    waiting = int(group.all_reduce(waiting, op='max', name='joiners')[0])
    if waiting and (limit is None or group.world_size < limit):
      raise MembershipChange(f'{waiting} workers wait to be let in.')

  def _start_counting(self):
    self._counted = 0
    self._iterations_at_start = _iterations(self._optimizer)

  def _count_unreported(self):
    """Counts steps that were applied without a callback having heard of it."""
    applied = _iterations(self._optimizer) - self._iterations_at_start
    if applied > self._counted:
      self._set(self.epoch, self.step + applied - self._counted)

  def _receive(self, group, root, variables):
    """Gets all variables from one rank, before any is assigned."""
    # Not their names: Keras counts the models of a process in them.
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
    """Lets the learning rate follow the global batch, as the options say."""
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
  """Tells a job how far `fit` has come.

  Args:
    job: of this process.
    first_step: batches of the first epoch that were done before.
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
  """Callbacks to which several calls of `fit` are one."""

  _has_begun = False
  _last_logs = None

  def on_train_begin(self, logs=None):
    if not self._has_begun:
      self._has_begun = True
      super().on_train_begin(logs)

  def on_train_end(self, logs=None):
    self._last_logs = logs

  def finish(self) -> None:
    """The last part is over, if there was one."""
    if self._has_begun:
      super().on_train_end(self._last_logs)


def _state_of(model, optimizer) -> list[keras.Variable]:
  """What a run consists of: the model's variables and the optimizer's."""
  variables = [*model.variables, *optimizer.variables]
  for variable in variables:
    synchronization = getattr(variable.value, 'synchronization', None)
    if synchronization == tf.VariableSynchronization.ON_READ:
      raise errors.UnsupportedOptionError(
        f'variable {variable.path!r}, of which each replica has a part, in '
        'elastic training',
        'state that every worker has whole',
        'wrap the optimizer: tfs.keras.DistributedOptimizer(optimizer)',
      )
  return variables


def _read(variable) -> np.ndarray:
  return np.array(variable.numpy())


def _iterations(optimizer) -> int:
  """The optimizer's count of calls; accumulation steps count too."""
  if optimizer is None:  # Nothing was restored yet.
    return 0
  for variable in optimizer.variables:
    if variable.path.split('/')[-1] == 'iteration':
      return int(variable.numpy())
  return 0
