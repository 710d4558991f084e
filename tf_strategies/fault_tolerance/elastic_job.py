"""`Job`: an elastic job, as its training function sees it, and its callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal, option_checks
from tf_strategies.checkpoint.position import Position
from tf_strategies.fault_tolerance import elastic_members, elastic_state
from tf_strategies.keras import chief_only
from tf_strategies.strategies.multi_worker import elastic

MakeBatches = Callable[[int, int], tf.data.Dataset]


class RecordProgress(keras.callbacks.Callback):
  """Records the progress of `fit` in the state of a job; the last callback.

  Args:
    state: the state of the job.
  """

  def __init__(self, state: Any):
    super().__init__()
    self._state = state

  def on_epoch_begin(self, epoch, logs=None):
    """Skips completed steps."""
    if self._state.position.step:
      _keras_internal.skip_steps(self._state.position.step, reads=False)

  def on_train_batch_begin(self, batch, logs=None):
    """Lets a worker that joined continue from the state of the others.

    The others' callbacks were called at the begin of this batch, too.
    """
    self._state.enter_fit()

  def on_train_batch_end(self, batch, logs=None):
    """Counts a batch."""
    self._state.move(self._state.position.epoch, batch + 1)

  def on_epoch_end(self, epoch, logs=None):
    """Counts an epoch, and keeps its logs."""
    self._state.history = self.model.history.history
    self._state.move(epoch + 1, 0)


class FilesOfJob(chief_only.ChiefOnly):
  """Lets the present chief write the files of one of Keras's callbacks.

  At the end of an epoch all workers wait for the chief and take the state of its
  callback. If it dies before that, its successor writes the files of the epoch.

  Args:
    callback: the callback that writes files.
    run_step: runs a function until a group of workers has done it.
    is_new: whether the job has not begun, so that the files are new.
  """

  def __init__(
    self,
    callback: keras.callbacks.Callback,
    run_step: Callable[..., Any],
    is_new: bool,
  ):
    super().__init__(callback)
    self._run_step = run_step
    if isinstance(callback, keras.callbacks.CSVLogger) and not is_new:
      callback.append = True
    self._is_training = False
    self._epoch = 0

  def on_epoch_end(self, epoch, logs=None):
    """Returns when a chief has written the files of the epoch."""
    link = self.model.distribute_strategy.extended.communicator
    has_written = False

    def write():
      nonlocal has_written
      if link.rank == 0 and not has_written:
        is_successor = not self._has_model
        self._tell_chief()
        if not (is_successor and self._has_row(epoch)):
          self.callback.on_epoch_end(epoch, logs)
        has_written = True
      known = elastic_state.hand_on(
        link.group, 0, 'files', elastic_state.pack([self.callback])
      )
      if link.rank:
        elastic_state.unpack(known, [self.callback])

    self._run_step('test', write, lambda: None, tf.constant([epoch]))

  def _has_row(self, epoch):
    """Returns whether a chief that died has written the row of an epoch."""
    if not isinstance(self.callback, keras.callbacks.CSVLogger):
      return False
    with open(self.callback.filename, encoding='utf-8') as file:
      *_, last = ['', *file]
    return last.split(self.callback.sep)[0] == str(epoch)

  def _call(self, event, *args):
    if event == 'on_epoch_begin':
      self._epoch = args[0]
    # Validation does not begin and end on different chiefs.
    if self._has_model or '_test_' not in event:
      super()._call(event, *args)
    if event in ('on_train_begin', 'on_train_end'):
      self._is_training = event == 'on_train_begin'

  def _tell_chief(self):
    """Opens files when this worker becomes the chief; closes them afterwards."""
    was_chief = self._has_model
    is_chief = super()._tell_chief()
    if self._is_training and is_chief != was_chief:
      keeps_open = isinstance(self.callback, elastic_state.KEEP_FILES_OPEN)
      if is_chief:
        if keeps_open:
          self.callback.append = True
          self.callback.on_train_begin()
        self.callback.on_epoch_begin(self._epoch)
      elif keeps_open:
        self.callback.on_train_end()
    return is_chief


class Job(elastic_members.Members):
  """An elastic job: its strategy, its groups of workers, and their state.

  `tfs.elastic.run` makes it.

  Args:
    options: the options of the job.
    rendezvous: forms the groups.
    capacity: the largest number of workers.

  Attributes:
    generations: the groups in which this worker took part.
  """

  @property
  def strategy(self) -> elastic.ElasticRingStrategy:
    """The strategy; build the model in its scope.

    This worker joins the others at its first use of `position`, `fit`, or a step of
    a custom loop.
    """
    return self._state.strategy

  @property
  def position(self) -> Position:
    """Completed epochs, and completed batches of the next one."""
    self._communicator.join_group()
    return self._state.position

  def run(self, train_fn: Callable[[Job], Any], make_strategy: Callable) -> Any:
    """Calls the training function until it returns; see `tfs.elastic.run`."""
    self._check_finished()
    while True:
      try:
        return self._call(train_fn, make_strategy(self))
      except (*elastic_members.RECOVERABLE, elastic_members.CallAgain) as e:
        self._state.hold()
        self._fail(e)
        logging.warning('Calling the training function again: %s', e)

  def _call(self, train_fn, strategy) -> Any:
    try:
      self._state.begin(strategy)
      result = train_fn(self)
      # No worker leaves while another may still need it.
      self._finish()
      return result
    except BaseException as e:
      self._abort(e)
      raise
    finally:
      strategy.close()

  def restore(self, model: keras.Model, optimizer=None) -> None:
    """Gives a built model the state of the most advanced worker, if any.

    This happens now if this worker has joined the others, or when it joins them. The
    state consists of the variables of the model, of `optimizer` (or the one that the
    model was compiled with), and of optimizers that are attributes of the model.

    Raises:
      CheckpointMismatchError: the model has other variables than before.
      UnsupportedOptionError: each replica has only a part of a variable.
    """
    optimizer = optimizer or model.optimizer
    with self.strategy.scope():
      optimizer.build(model.trainable_variables)
    self._state.set_objects(model, optimizer)
    self._share()

  def update(self, epoch: int, step: int) -> None:
    """Records the position of a custom loop; call it after each step.

    Raises:
      MembershipChange: other workers wait to join; `run` handles it.
    """
    position = Position.checked(epoch, step)
    self._communicator.join_group()
    self._state.move(*position)
    self._let_in()

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
  ) -> keras.callbacks.History:
    """Calls `model.fit` for the rest of the job; returns the history of all epochs.

    From its first batch on, a worker that joins later has the state of the others'
    callbacks. If the training function is called again, the metrics of the interrupted
    epoch cover only its remaining steps. If no step is left, callbacks are not called.

    Args:
      model: the restored model.
      make_batches: called with an epoch and a step; returns the batches from
        there to the end of the job.
      epochs: number of epochs of the whole job.
      steps_per_epoch: number of steps of an epoch, as `make_batches` counts them.
      callbacks: as of `model.fit`.
      verbose: as of `model.fit`.
      validation_data: as of `model.fit`.
      validation_steps: as of `model.fit`.
      validation_freq: as of `model.fit`.
      class_weight: as of `model.fit`.

    Raises:
      UnsupportedOptionError: BackupAndRestore is among the callbacks.
      CollectiveMismatchError: this worker has other batches, or other callbacks that
        write files, than the others.
    """
    _check_fit(make_batches, epochs, steps_per_epoch, callbacks)
    state = self._state
    if state.model is not model:
      self.restore(model)
    state.fit = epochs, steps_per_epoch
    is_next = bool(state.callbacks)
    # Keras's own history would not know the epochs before a worker came.
    kind = keras.callbacks.History
    history = next((c for c in callbacks if isinstance(c, kind)), kind())
    state.callbacks = list(callbacks)
    if history not in state.callbacks:
      state.callbacks.append(history)
    batches = make_batches(0, 0)
    self._join_with_steps(model, batches, steps_per_epoch, class_weight)
    epoch, step = state.position
    if step >= steps_per_epoch:
      epoch, step = epoch + 1, 0
    # A group of steps is done as a whole.
    step -= step % model.steps_per_execution
    state.move(epoch, step)
    if not is_next:  # Of what earlier calls of the training function did.
      for name, values in state.history.items():
        history.history[name] = values[:epochs]
    if epoch >= epochs:
      return history
    is_new = state.position == Position()
    callbacks = [
      FilesOfJob(callback, self.run_step, is_new)
      if chief_only.path_of(callback)
      else callback
      for callback in state.callbacks
    ]
    return model.fit(
      make_batches(epoch, step),
      initial_epoch=epoch,
      epochs=epochs,
      steps_per_epoch=steps_per_epoch,
      callbacks=[*callbacks, RecordProgress(state)],
      shuffle=False,  # `make_batches` says which batch a step has.
      verbose=verbose,
      validation_data=validation_data,
      validation_steps=validation_steps,
      validation_freq=validation_freq,
      class_weight=class_weight,
    )

  def _join_with_steps(self, model, batches, steps_per_epoch, weights):
    """Builds the step of the model, and then joins, so that nobody waits for it."""
    if self._communicator.is_member:
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
    self.enter(elastic_members.FIT)


def _check_fit(make_batches, epochs, steps_per_epoch, callbacks) -> None:
  """Raises UnsupportedOptionError for arguments with which `fit` cannot train."""
  option_checks.check_function(
    'make_batches',
    make_batches,
    'pass a function of an epoch and a step that returns batches',
  )
  fix = 'pass the number for all workers together'
  option_checks.check_int('epochs', epochs, 0, fix=fix)
  option_checks.check_int('steps_per_epoch', steps_per_epoch, 1, fix=fix)
  keeps = keras.callbacks.BackupAndRestore
  option_checks.check(
    not any(isinstance(callback, keeps) for callback in callbacks),
    'BackupAndRestore',
    'other callbacks in an elastic job',
    'leave it out: the workers keep the state in memory',
  )
