"""`Job`: the state of an elastic job, and what its training function calls."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal, errors
from tf_strategies.checkpoint import model_state
from tf_strategies.checkpoint.position import Position
from tf_strategies.fault_tolerance import (
  elastic_callbacks,
  elastic_members,
  elastic_options,
)
from tf_strategies.keras import chief_only

MakeBatches = Callable[[int, int], tf.data.Dataset]


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


class Job:
  """State that survives changes of the workers.

  Attributes:
    strategy: build the model in its scope. The other workers are asked for when
      something needs them: `epoch`, `step`, `fit`, a loop of one's own.
    generations: in which this worker took part.
    state: progress of this worker, whatever the batch of this generation.
  """

  def __init__(
    self,
    options: elastic_options.ElasticOptions,
    members: elastic_members.Members,
  ):
    self._options, self._members = options, members
    self.strategy: Any = None
    self.state = Progress()
    # Values at the end of a generation, until a model takes them.
    self._held: list[np.ndarray] | None = None
    # The same of what this worker alone has: what it has not sent of gradients.
    self._held_rests: list[np.ndarray] = []
    self._objects: dict[str, Any] | None = None  # Of which the state is shared.
    self._model: Any = None
    self._optimizer: Any = None
    self._batch = 1
    self._epochs: int | None = None
    self._steps_per_epoch = 0
    # Batches that a callback counted, and the optimizer's count before them.
    self._counted = 0
    self._iterations_at_start = 0
    # Steps of models that are done, and the metrics before they were reset, with
    # how many steps were done then.
    self.num_steps = 0
    self._before_reset: tuple[int, list[np.ndarray]] | None = None
    # The state and the metrics in the epoch that this worker enters.
    self._entered_with: tuple[list[np.ndarray], Any] | None = None
    members.job = self

  @property
  def generations(self) -> list[elastic_members.Generation]:
    """The groups in which this worker took part."""
    return self._members.generations

  @property
  def position(self) -> Position:
    """Returns how far this worker has come, in steps of this generation."""
    return Position(self.epoch, self.step)

  @property
  def epochs_and_steps(self) -> tuple[int, int] | None:
    """Returns the epochs and steps that `fit` was called with."""
    return self._epochs and (self._epochs, self._steps_per_epoch)

  @property
  def progress(self) -> int:
    """What workers compare: 0 for one that has no state."""
    if self._held is None and not self._members.is_shared:
      return 0
    # None of the three is less where another one is more.
    return 1 + (self.state.epoch << 40) + self.state.rows + self.num_steps

  @property
  def epoch(self) -> int:
    """Completed epochs."""
    self._members.join()
    return self.state.epoch

  @property
  def step(self) -> int:
    """Completed batches of the current epoch."""
    self._members.join()
    return self.state.rows // self._batch

  @property
  def files(self) -> list[tuple[str, str | None]]:
    """Returns the files that callbacks of `fit` write."""
    written = [
      (type(c).__name__, chief_only.path_of(c)) for c in self._callbacks
    ]
    return [each for each in written if each[1] is not None]

  def begin(self, strategy) -> None:
    """The training function is called, with this strategy."""
    self.strategy = strategy
    self._members.begin()
    self._objects = self._model = self._optimizer = None
    # Whether steps are all of one model, so that others can go on in the middle.
    self.is_one_fit = self._options.batch == 'global'
    self._callbacks: Sequence[keras.callbacks.Callback] = ()
    self._callbacks_of_others: np.ndarray | None = None
    # Whether the workers agree on the files of callbacks: the chief writes them.
    self.files_are_common: bool | None = None
    self._batch = 1

  def hold(self) -> None:
    """Copies this worker's state to memory, for the next call."""
    if self._objects is None or not self._members.is_shared:
      return  # The copy of before is still valid.
    # Steps may have been applied before a callback could record them.
    applied = self._iterations() - self._iterations_at_start
    if applied > self._counted:
      step = self.state.rows // self._batch + applied - self._counted
      self._set(self.state.epoch, step)
    self._held = [elastic_members.read(v) for v in self._variables()]
    rests = self._rests()
    self._held_rests = [elastic_members.read(v) for v in rests]
    self._objects = None

  def restore(self, model: keras.Model, optimizer=None) -> None:
    """Gives a built model the state of the most advanced worker, if any.

    That happens when this worker joins the others: now if it has, or later. The
    state is that of the model, of `optimizer` (or the one that it was compiled
    with), and of optimizers that are attributes of the model.

    Raises:
      CheckpointMismatchError: the model has other variables than before.
      UnsupportedOptionError: state of which each replica has only a part.
    """
    optimizer = optimizer or model.optimizer
    with self.strategy.scope():
      optimizer.build(model.trainable_variables)
    if self._model is not None:
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
    self._members.share()

  def global_batch_size(self, size: int) -> int:
    """Returns the global batch of this generation; call it after `restore`.

    That is `size`, the one of the first generation; with batch='per_replica', in
    proportion to the number of workers.
    """
    if self._objects is None:
      raise errors.UnsupportedOptionError(
        'job.global_batch_size before job.restore',
        'a job that knows how many workers it started with',
        'call job.restore(model) first',
      )
    elastic_options.check_count('size', size, 1)
    if self._options.batch == 'per_replica':
      self._members.join()
      size = size * self.state.world // self.state.first_world
    self._batch = size
    return size

  def update(self, epoch: int, step: int) -> None:
    """Records the position of a custom loop; call it after each step.

    Raises:
      MembershipChange: other workers wait to join; `run` handles it.
    """
    elastic_options.check_position(epoch, step)
    self._members.join()
    is_new_epoch = epoch != self.state.epoch
    self._start_counting()
    self._set(epoch, step)
    self.let_in(is_new_epoch)

  def callback(self) -> elastic_callbacks.ElasticCallback:
    """Returns a callback for a `fit` that counts from this position on."""
    return elastic_callbacks.ElasticCallback(self, self.step)

  def fit(
    self,
    model: keras.Model,
    make_batches: MakeBatches,
    epochs: int,
    steps_per_epoch: int,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    *,
    verbose: str | int = 'auto',
    validation_data: Any = None,
    validation_steps: int | None = None,
    validation_freq: int | Sequence[int] = 1,
    class_weight: Mapping[int, float] | None = None,
  ) -> keras.callbacks.History | None:
    """Calls `model.fit` for the rest of the job; returns its history, if any.

    The callbacks of a worker that comes later know what those of the others know,
    and hear no events of what was done before; the history is whole. Where the
    training function is called again, callbacks see the completed steps of an
    interrupted epoch, which are skipped; its metrics cover the other ones.

    Args:
      model: restored.
      make_batches: called with an epoch and a step; returns the batches from
        there to the end of the job.
      epochs: of the whole job.
      steps_per_epoch: of a whole epoch, as `make_batches` counts them.
      callbacks: as of `fit`.
      verbose: as of `fit`, and so are those that follow.

    Raises:
      UnsupportedOptionError: `make_batches` has fewer batches than `epochs` of
        `steps_per_epoch`, or counts other epochs.
    """
    elastic_options.check_fit(make_batches, epochs, steps_per_epoch)
    if self._model is not model:
      self.restore(model)
    self._epochs, self._steps_per_epoch = epochs, steps_per_epoch
    self._callbacks = list(callbacks)
    if not any(isinstance(c, keras.callbacks.History) for c in callbacks):
      # Keras's own would not know the epochs before a worker came.
      self._callbacks.append(keras.callbacks.History())
    if self._members.is_fitting:
      self.files_are_common = False  # The next `fit`: they were not compared.
    self._members.is_fitting = True
    metrics = [v.value for v in model.metrics_variables]
    self.strategy.extended.hold_sums(metrics)
    batches = make_batches(0, 0)
    elastic_options.check_length(batches, make_batches, epochs, steps_per_epoch)
    self._join_with_steps(model, batches, steps_per_epoch, class_weight)
    epoch, step = self.position
    if step >= steps_per_epoch:
      epoch, step = epoch + 1, 0
    step -= step % model.steps_per_execution
    if Position(epoch, step) != self.position:
      self._set(epoch, step)
    if epoch >= epochs:
      return None
    batches = make_batches(epoch, step)
    reads = not isinstance(batches, tf.data.Dataset)
    # Keras counts skipped batches, and begins again after as many as it knows of:
    # so the data have them too, or an unknown length.
    if step and reads:
      batches = make_batches(epoch, 0)
    elif step:
      batches = batches.filter(lambda *_: True)
    callbacks = [
      elastic_callbacks.FilesOfJob(callback, self._members)
      if self.files_are_common and chief_only.path_of(callback)
      else callback
      for callback in self._callbacks
    ]
    return model.fit(
      batches,
      initial_epoch=epoch,
      epochs=epochs,
      steps_per_epoch=steps_per_epoch,
      callbacks=[
        *callbacks,
        elastic_callbacks.ElasticCallback(self, 0, step, reads),
      ],
      shuffle=False,  # `make_batches` says which batch a step has.
      verbose=verbose,
      validation_data=validation_data,
      validation_steps=validation_steps,
      validation_freq=validation_freq,
      class_weight=class_weight,
    )

  def _join_with_steps(self, model, batches, steps_per_epoch, weights):
    """Joins when the step of the model has been built: nobody waits for that."""
    if self.strategy.extended.communicator.is_member:
      return
    if isinstance(batches, tf.data.Dataset):
      spec = _keras_internal.element_spec_of_fit(
        model, batches, steps_per_epoch, weights
      )
      model.make_train_function()
      prepare = getattr(model.train_function, 'prepare', None)
      if prepare is not None:
        with self.strategy.scope():
          prepare(spec)
    else:
      logging.warning(
        'make_batches returns a %s, from which the step of a worker that comes '
        'later cannot be built before it joins: the others wait for it, and its '
        'metrics of that epoch are not theirs. Return a tf.data.Dataset.',
        type(batches).__name__,
      )
    self._members.join_in_fit()

  # What callbacks say.

  def finish_batch(self, step: int) -> None:
    """Records the completed batches of an epoch of `fit`."""
    self._counted += step - self.state.rows // self._batch
    self._set(self.state.epoch, step)

  def finish_epoch(self, epoch: int) -> None:
    """Records that an epoch of `fit` is complete."""
    self._start_counting()
    self._set(epoch, 0)

  def begin_fit(self) -> Sequence[keras.callbacks.Callback]:
    """Lets callbacks know what those of the others know; returns those that do."""
    taken, self._callbacks_of_others = self._callbacks_of_others, None
    if taken is None or not elastic_callbacks.unpack(taken, self._callbacks):
      return ()
    return self._callbacks

  def begin_epoch(self) -> None:
    """Goes on as the others, for whom the epoch had begun.

    What callbacks did at its begin, to the learning rate, say, they have done.
    """
    taken, self._entered_with = self._entered_with, None
    if taken is None:
      return
    values, metrics = taken
    self._assign(self._variables(), values)
    if metrics is not None and self.state.step:
      self._assign(self._metrics(), metrics)

  def _set(self, epoch, step):
    if self.generations and self.generations[-1].first_step is None:
      self.generations[-1].first_step = time.time()
    self.state = self.state._replace(
      epoch=epoch, step=step, batch_size=self._batch
    )

  # What `Members` asks.

  @property
  def place(self) -> Position:
    """The position, as it is known without the others."""
    return Position(self.state.epoch, self.state.rows // self._batch)

  def let_in(self, is_new_epoch: bool | None = None) -> None:
    """Raises MembershipChange if workers wait to join and may."""
    if is_new_epoch is None:
      is_new_epoch = not self.state.step
    join, group = self._options.join, self.strategy.process_group
    is_last = self._epochs is not None and self.state.epoch >= self._epochs
    if is_last or join == 'never' or (join == 'epoch' and not is_new_epoch):
      return
    limit = self._options.max_workers
    members = {member.task for member in group.members}
    outside = [t for t in group.pending_joiners() if t not in members]
    if outside and (limit is None or group.world_size < limit):
      raise elastic_members.MembershipChange(
        f'{len(outside)} workers wait to join.'
      )

  def finish_step(self) -> None:
    """Counts a step of a model that is done."""
    self.num_steps += 1

  def hold_metrics(self, model) -> None:
    """Keeps what metrics say before they are reset, for who is a step behind."""
    if model is self._model:
      values = [elastic_members.read(v) for v in self._metrics()]
      self._before_reset = self.num_steps, values

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
      'call job.restore(model) before training, job.epoch and job.step',
    )

  def describe(self) -> list[str]:
    """The variables that workers share; not their names, which Keras counts."""
    return [f'{v.dtype}{list(v.shape)}' for v in self._variables()]

  def take(self, group, root: int, is_missing: bool, is_entering: bool) -> None:
    """Receives the state of a rank, and keeps it if it `is_missing` here.

    It `is_entering` a `fit` in which others are already.
    """
    variables = self._variables()
    is_root = group.rank == root
    held = self._held if is_root and not self._members.is_shared else None
    if held is None:
      held = [elastic_members.read(v) for v in variables]
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
      values.append(elastic_members.like(flat, value))
    metrics = self._take_metrics(group, root)
    if is_missing:
      self._assign(variables, values)
    if is_missing and metrics is not None:
      self._assign(self._metrics(), metrics)
    self._held = None
    self._entered_with = (values, metrics) if is_entering else None

  def _take_metrics(self, group, root):
    """The metrics of a rank; None where they are others."""
    values = [elastic_members.read(v) for v in self._metrics()]
    if self._before_reset and self._before_reset[0] == self.num_steps:
      values = self._before_reset[1]
    flat = np.frombuffer(b''.join(v.tobytes() for v in values), np.uint8)
    flat = elastic_members.broadcast(group, root, flat, 'metrics')
    if not values or flat.size != sum(v.nbytes for v in values):
      return None
    ends = np.cumsum([v.nbytes for v in values])
    parts = np.split(flat, ends[:-1])
    return [
      elastic_members.like(part, value)
      for part, value in zip(parts, values, strict=True)
    ]

  def take_callbacks(self, group, root: int, is_missing: bool) -> None:
    """Receives what the callbacks of a rank know; for those that begin here."""
    packed = elastic_callbacks.pack(self._callbacks)
    packed = elastic_members.broadcast(group, root, packed, 'callbacks')
    self._callbacks_of_others = packed if is_missing else None

  def go_on_at(self, state, num_steps: int) -> None:
    """Is at the place of the others."""
    state, world = Progress(*state), self.strategy.num_workers
    if state.world:
      self._scale_learning_rate(self._optimizer, state.world, world)
    self.state = state._replace(
      first_world=state.first_world or world, world=world
    )
    self.num_steps = num_steps
    self._start_counting()

  def _variables(self) -> list[keras.Variable]:
    """The variables that are shared, all of which every worker must have whole."""
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
    """Returns the variables with what this worker has not sent of gradients."""
    communicator = self.strategy.extended.communicator
    return [
      *communicator.gradient_state(self._model.trainable_variables).values()
    ]

  def _metrics(self):
    """The metrics of which every worker has all, as models' steps make them."""
    variables = self._model.metrics_variables
    return [v for v in variables if vars(v.value).get('holds_whole', False)]

  def _assign(self, variables, values):
    with self.strategy.scope():
      for variable, value in zip(variables, values, strict=True):
        variable.assign(value)

  def _start_counting(self):
    self._counted = 0
    self._iterations_at_start = self._iterations()

  def _iterations(self) -> int:
    if self._optimizer is None:  # Before `restore`.
      return 0
    return model_state.iterations(self._optimizer)

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
