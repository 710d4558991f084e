"""`ResumeFit`: a `fit` that continues where an earlier run stopped."""

from __future__ import annotations

import itertools
import types

import keras
import tensorflow as tf

from tf_strategies import _keras_internal, errors, option_checks
from tf_strategies.checkpoint import model_state
from tf_strategies.checkpoint.position import Position
from tf_strategies.fault_tolerance import run_checkpoint


@option_checks.has_options
class ResumeFit(keras.callbacks.Callback):
  """Continues `fit` in the epoch and at the step of a checkpoint.

  * With a `ParameterServerStrategy(checkpoint_dir=...)`, which writes a
    checkpoint every `checkpoint_steps` steps by itself: restores the newest one
    when `fit` starts; the data set skips what was done. When `fit` ends, writes a
    last one. Without `checkpoint_dir`, or on another strategy, it does nothing.
  * With a `RunCheckpoint` that was restored: give `fit` the batches of whole
    epochs, from the restored epoch on. Those of completed steps are read and
    dropped, though callbacks see them, and metrics continue from their values.
    `PreemptionCheckpoint` does this too, and saves.

  Both tell a `SidecarEvaluator` when `fit` has ended.

  Example:

    model.fit(dataset, epochs=3, callbacks=[tfs.ResumeFit(strategy)])

  Raises:
    UnsupportedOptionError: when `fit` starts: a run that was not restored, does
      not start at the position of the checkpoint, or has groups of steps
      (`steps_per_execution`) of which none ends there.
  """

  needs_all_workers = True  # See `ChiefOnly`.

  def __init__(
    self, checkpoint: run_checkpoint.RunCheckpoint | tf.distribute.Strategy
  ):
    super().__init__()
    self._checkpoint = self._strategy = None
    check_checkpoint(checkpoint)
    if isinstance(checkpoint, run_checkpoint.RunCheckpoint):
      self._checkpoint = checkpoint
    elif hasattr(checkpoint, 'recovery') and checkpoint.recovery.is_enabled:
      self._strategy = checkpoint
    self._resumed_from: Position | None = None
    self._is_first_epoch = False

  def on_train_begin(self, logs=None):
    """Restores, and tells Keras and the data set where to continue."""
    if self._strategy is not None:
      self._restore_servers()
      self._strategy.mark_finished(False)
    elif self._checkpoint is not None:
      self._checkpoint.mark_finished(False)
      position = self._checkpoint.position
      if position is None:
        raise errors.UnsupportedOptionError(
          f'{type(self).__name__}(checkpoint) before checkpoint.restore()',
          'a fit that starts at the position of the newest checkpoint',
          'write epoch, _ = checkpoint.restore() before fit',
        )
      if self._resumed_from is not position:
        self._resumed_from = position
        self._is_first_epoch = True

  def _restore_servers(self):
    with self._strategy.scope():
      if not self.model.optimizer.built:
        self.model.optimizer.build(self.model.trainable_variables)
    position = self._strategy.recovery.restore(model_state.state_of(self.model))
    steps_per_epoch = self.params.get('steps')
    self._strategy.recovery.expect_data(steps=steps_per_epoch)
    if position is None:
      return
    if position.step == steps_per_epoch:  # It was written at the very end.
      position = Position(position.epoch + 1, 0, position.splits)
    # As Keras's own BackupAndRestore does.
    _keras_internal.set_initial_epoch(self.model, position.epoch)
    self._strategy.recovery.resume(position, steps_per_epoch)
    # Where nothing is left to do, no epoch begins.
    self._strategy.recovery.begin_epoch(position.epoch)
    self._resumed_from, self._is_first_epoch = position, True

  def on_epoch_begin(self, epoch, logs=None):
    """Skips the completed steps of an interrupted epoch."""
    if self._strategy is not None:
      self._strategy.recovery.begin_epoch(epoch)
    if self._is_first_epoch:
      self._check_start(epoch)
      self._is_first_epoch = False
      if self._resumed_from.step:
        if self._checkpoint is not None:
          self._checkpoint.restore_metrics()
        skip_steps(self.model, self._resumed_from.step)

  def _check_start(self, epoch):
    position, steps = self._resumed_from, self.params.get('steps')
    group = self.model.steps_per_execution
    done = f'after {position.step} steps of an epoch were restored'
    if epoch != position.epoch:
      raise errors.UnsupportedOptionError(
        f'initial_epoch={epoch} after {position} was restored',
        f'{position.epoch}',
        f'write initial_epoch={position.epoch}',
      )
    if steps is not None and steps <= position.step:
      raise errors.UnsupportedOptionError(
        f'steps_per_epoch={steps} {done}',
        'the steps of a whole epoch',
        'pass to steps_per_epoch what the run started with',
      )
    if position.step % group:
      raise errors.UnsupportedOptionError(
        f'steps_per_execution={group} {done}',
        f'a divisor of {position.step}',
        'pass to compile the steps_per_execution that the run started with',
      )

  def on_epoch_end(self, epoch, logs=None):
    """A checkpoint from now on belongs to the next epoch."""
    if self._strategy is not None:
      self._strategy.recovery.begin_epoch(epoch + 1)

  def on_train_end(self, logs=None):
    """Writes the last checkpoint, where the strategy does so."""
    if self._strategy is not None:
      # Otherwise the next `fit` starts in that epoch too, and whatever reads data
      # next begins there.
      _keras_internal.set_initial_epoch(self.model, 0)
      self._strategy.recovery.take_resumed()
      self._strategy.recovery.expect_data(False)
      self._strategy.save()
      self._strategy.mark_finished()
    elif self._checkpoint is not None:
      self._checkpoint.mark_finished()


def check_checkpoint(checkpoint: object) -> None:
  """Refuses what is neither a `RunCheckpoint` nor a strategy."""
  option_checks.check_type(
    'checkpoint',
    checkpoint,
    (run_checkpoint.RunCheckpoint, tf.distribute.Strategy),
    'a RunCheckpoint, or the strategy of parameter servers',
    'pass tfs.RunCheckpoint(directory, model), or the strategy',
  )


def skip_steps(model: keras.Model, steps: int, reads: bool = True) -> None:
  """Makes `fit` leave out the completed steps of an epoch that has just begun.

  Keras counts the batches of a data set, and would end early with fewer. They are
  read and dropped, unless the data set begins after them.
  """
  if _keras_internal.is_skipped(model, 0):
    return  # Another callback has done it.
  results = model.get_metrics_result()
  done = 0

  def skip(iterator):
    nonlocal done
    if done < steps:
      done += model.steps_per_execution
      for _ in range(model.steps_per_execution if reads else 0):
        next(iterator)
      return results
    _keras_internal.swap_train_function(model, function)
    if reads and isinstance(iterator, types.GeneratorType):
      # Keras's function fails if it has ended: nothing else was left to do.
      iterator = itertools.chain([next(iterator)], iterator)
    return function(iterator)

  skip.skips = lambda batch: batch < steps
  function = _keras_internal.swap_train_function(model, skip)
