"""`Job`: the state of an elastic job, and what its training function calls."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_strategies import (
  _keras_internal,
  errors,
  option_checks,
  process_group,
)
from tf_strategies.checkpoint import model_state
from tf_strategies.checkpoint.position import Position
from tf_strategies.fault_tolerance import resume_fit

MakeBatches = Callable[[int, int], tf.data.Dataset]

_CHOICES = {
  'batch': ('global', 'per_replica'),
  'learning_rate': ('keep', 'linear', 'sqrt'),
  'join': ('epoch', 'step', 'never'),
}


@dataclasses.dataclass(frozen=True)
class ElasticOptions:
  """Number of workers of an elastic job, and what follows from it.

  Attributes:
    min_workers: with fewer, all wait until the rendezvous' deadline. More than
      half of the cluster prevents that both halves of a split network continue.
    max_workers: at most; None for all of the cluster.
    window_seconds: how long to wait for more than `min_workers`.
    batch: 'global' keeps the global batch, so that the result does not depend
      on the number of workers; 'per_replica' keeps each replica's.
    learning_rate: 'keep', or 'linear' or 'sqrt' in the global batch, for
      batch='per_replica'.
    join: when new workers join: at the end of an 'epoch', after a 'step' (costs
      a small collective in each), or 'never' (only after a failure).
    max_failures: how many consecutive failures without progress end the job.

  Raises:
    UnsupportedOptionError: a value that is not allowed.
  """

  min_workers: int = 1
  max_workers: int | None = None
  window_seconds: float = 5.0
  batch: str = 'global'
  learning_rate: str = 'keep'
  join: str = 'epoch'
  max_failures: int = 10

  def __post_init__(self):
    for field, allowed in _CHOICES.items():
      option_checks.check_choice(field, getattr(self, field), allowed)
    if self.learning_rate != 'keep' and self.batch == 'global':
      raise errors.UnsupportedOptionError(
        f"learning_rate={self.learning_rate!r} with batch='global'",
        "learning_rate='keep': the global batch stays what it was",
        "write batch='per_replica' as well",
      )
    option_checks.check_int('max_failures', self.max_failures, 0)
    # As those of the group, which it passes on.
    process_group.GroupOptions(
      min_workers=self.min_workers,
      max_workers=self.max_workers,
      window_seconds=self.window_seconds,
    )


class MembershipChange(errors.Error):
  """Other workers wait to join: the group forms again."""


class Progress(NamedTuple):
  """How far a job has come, comparable across global batch sizes."""

  epoch: int = 0
  step: int = 0
  batch_size: int = 1  # Of these steps; 1 if the job does not know it.
  first_world: int = 0  # Workers of the first generation.
  world: int = 0  # Workers of the generation that trained these steps.

  @property
  def rows(self) -> int:
    """Completed rows of the next epoch."""
    return self.step * self.batch_size


@dataclasses.dataclass
class Generation:
  """One group of workers, as seen by one of them; times are `time.time()`."""

  number: int
  world_size: int
  rank: int
  began: float
  first_step: float | None = None  # When its first step ended.
  ended: float | None = None
  reason: str = ''  # Why it ended; empty at the end of training.


class Job:
  """State that survives changes of the workers.

  Attributes:
    strategy: of this generation; build the model in its scope.
    generations: in which this worker took part.
    state: progress of this worker, whatever the batch of this generation.
  """

  def __init__(self, options: ElasticOptions):
    self._options = options
    self.strategy: Any = None
    self.generations: list[Generation] = []
    self.state = Progress()
    self._held: list[np.ndarray] | None = None
    self._variables: list[keras.Variable] | None = None
    self._optimizer = None
    self._batch = 1
    self._epochs: int | None = None
    # Batches that a callback counted, and the optimizer's count before them.
    self._counted = 0
    self._iterations_at_start = 0

  @property
  def position(self) -> Position:
    """How far this worker has come, in steps of this generation."""
    return Position(self.epoch, self.step)

  @property
  def progress(self) -> int:
    """What workers compare: 0 for one that has no state."""
    if self._held is None:
      return 0
    return 1 + (self.epoch << 40) + self.state.rows

  @property
  def epoch(self) -> int:
    """Completed epochs."""
    return self.state.epoch

  @property
  def step(self) -> int:
    """Completed batches of the current epoch."""
    return self.state.rows // self._batch

  def begin(self, strategy) -> None:
    """Starts a generation."""
    self.strategy = strategy
    group = strategy.process_group
    self.generations.append(
      Generation(group.generation, group.world_size, group.rank, time.time())
    )
    self._variables = None
    self._batch = 1

  def end(self, reason: str) -> None:
    """Ends a generation."""
    if self.generations and self.generations[-1].ended is None:
      self.generations[-1].ended = time.time()
      self.generations[-1].reason = reason

  def hold(self) -> None:
    """Copies this worker's state to memory, for the next generation."""
    if self._variables is None:
      return  # Not restored yet: the copy of before is still valid.
    # Steps may have been applied before a callback could record them.
    applied = self._iterations() - self._iterations_at_start
    if applied > self._counted:
      self._set(self.epoch, self.step + applied - self._counted)
    self._held = [_read(v) for v in self._variables]
    self._variables = None

  def restore(self, model: keras.Model, optimizer=None) -> None:
    """Assigns a built model the state of the most advanced worker, if any.

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
    answers = group.exchange(
      'elastic/position', json.dumps(self.state).encode()
    )
    state = Progress(*json.loads(answers[best.rank]))
    if best.progress:
      self._receive(group, best.rank, variables)
      self._scale_learning_rate(optimizer, state.world, group.world_size)
      self._held = [_read(v) for v in variables]
    self.state = state._replace(
      first_world=state.first_world or group.world_size, world=group.world_size
    )
    self._optimizer = optimizer
    self._start_counting()
    self._variables = variables

  def global_batch_size(self, size: int) -> int:
    """Returns the global batch of this generation; call it after `restore`.

    That is `size`, the one of the first generation; with batch='per_replica', in
    proportion to the number of workers.
    """
    if not self.state.first_world:
      raise errors.UnsupportedOptionError(
        'job.global_batch_size before job.restore',
        'a job that knows how many workers it started with',
        'call job.restore(model) first',
      )
    if self._options.batch == 'per_replica':
      size = size * self.state.world // self.state.first_world
    self._batch = size
    return size

  def update(self, epoch: int, step: int) -> None:
    """Records the position of a custom loop; call it after each step.

    Raises:
      MembershipChange: other workers wait to join; `run` handles it.
    """
    self._start_counting()
    self._record(epoch, step)

  def callback(self) -> ElasticCallback:
    """Returns a callback for a `fit` that counts from this position on."""
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
    """Calls `model.fit` for the rest of the job; returns its history, if any.

    Callbacks see the completed steps of an interrupted epoch, which are skipped;
    its metrics cover the other ones.

    Args:
      model: restored.
      make_batches: called with an epoch and a step; returns the batches from
        there to the end of the job.
      epochs: of the whole job.
      steps_per_epoch: of a whole epoch.
      callbacks: as of `fit`.
      **options: of `fit`, such as `validation_data`.
    """
    epoch, step = self.position
    if step >= steps_per_epoch:
      epoch, step = epoch + 1, 0
    step -= step % model.steps_per_execution
    if Position(epoch, step) != self.position:
      self._set(epoch, step)
    if epoch >= epochs:
      return None
    self._epochs = epochs
    batches = make_batches(epoch, step)
    reads = not isinstance(batches, tf.data.Dataset)
    # Keras counts skipped batches, and begins again after as many as it knows of:
    # so the data have them too, or an unknown length.
    if step and reads:
      batches = make_batches(epoch, 0)
    elif step:
      batches = batches.filter(lambda *_: True)
    return model.fit(
      batches,
      initial_epoch=epoch,
      epochs=epochs,
      steps_per_epoch=steps_per_epoch,
      callbacks=[*callbacks, ElasticCallback(self, 0, step, reads)],
      **options,
    )

  def finish_batch(self, step: int) -> None:
    """Records the completed batches of an epoch of `fit`."""
    self._counted += step - self.step
    self._record(self.epoch, step)

  def _record(self, epoch, step):
    is_new_epoch = epoch != self.epoch
    self._set(epoch, step)
    join = self._options.join
    is_last = self._epochs is not None and epoch >= self._epochs
    if not is_last and (join == 'step' or (is_new_epoch and join == 'epoch')):
      self._let_in()

  def _set(self, epoch, step):
    if self.generations and self.generations[-1].first_step is None:
      self.generations[-1].first_step = time.time()
    self.state = self.state._replace(
      epoch=epoch, step=step, batch_size=self._batch
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

  Of the first epoch `first_step` batches are done, which this `fit` does not
  count, or `skipped`, which it counts and skips.
  """

  def __init__(
    self, job: Job, first_step: int = 0, skipped: int = 0, reads: bool = True
  ):
    super().__init__()
    self._job = job
    self._first_step = first_step
    self._skipped = skipped
    self._reads = reads

  def on_epoch_begin(self, epoch, logs=None):
    """Skips what was done."""
    if self._skipped:
      resume_fit.skip_steps(self.model, self._skipped, self._reads)
      self._skipped = 0

  def on_train_batch_end(self, batch, logs=None):
    """Counts a batch."""
    if not _keras_internal.is_skipped(self.model, batch):
      self._job.finish_batch(self._first_step + batch + 1)

  def on_epoch_end(self, epoch, logs=None):
    """Counts an epoch."""
    self._first_step = 0
    self._job.update(epoch + 1, 0)


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
