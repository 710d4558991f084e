"""`ChiefOnly`: a callback that writes files or prints, on one of several workers."""

import os
import tempfile
from collections.abc import Sequence

import keras
import tensorflow as tf

from tf_strategies import _keras_internal, errors, option_checks
from tf_strategies.cluster import workers as workers_lib

# They change training, so all workers need them. Their logs are the same everywhere.
_CHANGE_TRAINING = (
  keras.callbacks.EarlyStopping,
  keras.callbacks.LearningRateScheduler,
  keras.callbacks.ReduceLROnPlateau,
  keras.callbacks.SwapEMAWeights,
  keras.callbacks.TerminateOnNaN,
)


def _changes_training(callback):
  name = type(callback).__name__
  return errors.UnsupportedOptionError(
    f'ChiefOnly({name})',
    'a callback that only writes or reports',
    f'pass {name} to fit on every worker, without ChiefOnly. It changes the '
    'training, and decides the same everywhere',
  )


@option_checks.has_options
class ChiefOnly(keras.callbacks.Callback):
  """Calls a callback on the chief and nowhere else.

  It is for callbacks that write files and are not Keras's: in `fit`, Keras's
  `ModelCheckpoint`, `BackupAndRestore`, `CSVLogger` and `TensorBoard` need no wrapper.
  The callback must not need the other workers: it may save and read weights, but not
  call `model.evaluate` or read the results of metrics. With
  `BackupAndRestore` the other workers get the chief's state and epoch when
  training begins, so that only the chief needs to see the files.

  Example:

    >>> callback = ChiefOnly(keras.callbacks.ModelCheckpoint('best.keras'))
    >>> type(callback.callback).__name__
    'ModelCheckpoint'

  Args:
    callback: to call on the chief.

  Raises:
    UnsupportedOptionError: `callback` changes training, as EarlyStopping does, or
      runs collectives, as `tfs.Run` does. The other workers would go on
      without the change, or would not take part.
  """

  def __init__(self, callback: keras.callbacks.Callback):
    super().__init__()
    option_checks.check_type(
      'callback',
      callback,
      keras.callbacks.Callback,
      'a Keras callback',
      'pass for instance keras.callbacks.ModelCheckpoint(path)',
    )
    needs_all = getattr(callback, 'needs_all_workers', False)
    if needs_all or isinstance(callback, _CHANGE_TRAINING):
      raise _changes_training(callback)
    self.callback = callback
    self._has_model = False

  def set_params(self, params):
    """Passes the parameters on, on every worker."""
    super().set_params(params)
    self.callback.set_params(params)

  def set_model(self, model):
    """Passes the model on, on the chief: TensorBoard writes as soon as it has one."""
    super().set_model(model)
    self._has_model = False
    self._tell_chief()

  def on_train_begin(self, logs=None):
    """Calls the callback, then shares the restored state."""
    if not isinstance(self.callback, keras.callbacks.BackupAndRestore):
      self._call('on_train_begin', logs)
      return
    optimizer = self.model.optimizer
    if optimizer is not None and not optimizer.built:
      # The callback would create its variables, which takes all workers.
      with self.model.distribute_strategy.scope():
        optimizer.build(self.model.trainable_variables)
    if self._tell_chief():
      self.callback.on_train_begin(logs)
    self._share_state()

  def _share_state(self):
    workers = workers_lib.link_of(self.model.distribute_strategy)
    if workers is None:
      return
    variables = [*self.model.variables]
    if self.model.optimizer is not None:
      variables += self.model.optimizer.variables
    with self.model.distribute_strategy.scope():
      for variable in variables:
        value = tf.convert_to_tensor(variable.numpy())
        variable.assign(workers.from_chief(value, 'share'))
    # What Keras reads after this call to know where to go on.
    epoch = _keras_internal.initial_epoch(self.model)
    epochs = workers.exchange('initial_epoch', epoch)
    _keras_internal.set_initial_epoch(self.model, epochs[0])

  def _tell_chief(self) -> bool:
    """Returns whether this is the chief, whose callback has the model then."""
    is_chief = self.model.distribute_strategy.extended.should_checkpoint
    if is_chief and not self._has_model:
      self.callback.set_model(self.model)
    self._has_model = is_chief
    return is_chief

  def _call(self, event, *args):
    if self._tell_chief():
      before = self._decisions()
      getattr(self.callback, event)(*args)
      if self._decisions() != before:
        raise _changes_training(self.callback)

  def _decisions(self):
    """Returns the state of training that callbacks change and all workers must share.

    None if there are no other workers, and for Keras's own, which change nothing: a
    learning rate would be read for each batch.
    """
    has_others = workers_lib.link_of(self.model.distribute_strategy) is not None
    if not has_others or type(self.callback) in _CHANGE_NOTHING:
      return None
    return self.model.stop_training, _rate_of(self.model)


def _rate_of(model) -> float | None:
  """Returns the learning rate of a model's optimizer; None without one."""
  rate = getattr(model.optimizer, 'learning_rate', None)
  return None if rate is None else float(keras.ops.convert_to_numpy(rate))


def _forward(event):
  def method(self, *args, **kwargs):
    self._call(event, *args, *kwargs.values())

  method.__name__ = event
  method.__doc__ = f'Calls the callback, on the chief (`{event}`).'
  return method


for _event in dir(keras.callbacks.Callback):
  # Those of every batch are called by Keras's own `on_train_batch_begin`.
  is_event = _event.startswith('on_') and not _event.startswith('on_batch_')
  if is_event and _event not in vars(ChiefOnly):
    setattr(ChiefOnly, _event, _forward(_event))


class _FilesOfChief(ChiefOnly):
  """Calls one of Keras's callbacks on the chief, if all workers have the same one.

  All workers wait until the chief has written, so that they find whole files.
  """

  def _save_divided(self, event, args):
    """Takes part in a save, which reads the optimizer state of all workers."""
    self.callback.set_model(self.model)
    path = self.callback.filepath
    with tempfile.TemporaryDirectory() as directory:
      self.callback.filepath = os.path.join(directory, os.path.basename(path))
      try:
        getattr(self.callback, event)(*args)
      finally:
        self.callback.filepath = path

  def _call(self, event, *args):
    super()._call(event, *args)
    extended = self.model.distribute_strategy.extended
    is_other = not extended.should_checkpoint
    saves = isinstance(self.callback, keras.callbacks.ModelCheckpoint)
    if extended.state_shards is not None and is_other and saves:
      self._save_divided(event, args)
    if event in ('on_epoch_end', 'on_train_end'):
      best = getattr(self.callback, 'best', None)
      answers = extended.communicator.exchange('files', best)
      if saves:
        # The program may read it, on any worker.
        self.callback.best = answers[0]


# What Keras's callbacks write, by the attribute that says where.
_WRITERS = {
  keras.callbacks.ModelCheckpoint: 'filepath',
  keras.callbacks.BackupAndRestore: 'backup_dir',
  keras.callbacks.CSVLogger: 'filename',
  keras.callbacks.TensorBoard: 'log_dir',
}
_CHANGE_NOTHING = {*_WRITERS, keras.callbacks.ProgbarLogger}


def path_of(callback: keras.callbacks.Callback) -> str | None:
  """Returns where one of Keras's callbacks writes; None for any other callback."""
  for writer, name in _WRITERS.items():
    if isinstance(callback, writer):
      return str(getattr(callback, name))
  return None


def files_of(
  callbacks: Sequence[keras.callbacks.Callback],
) -> list[list[str]]:
  """Returns class and path of each of Keras's callbacks that write, for JSON."""
  return [[type(c).__name__, path_of(c)] for c in callbacks if path_of(c)]


def _share_output(model, callbacks, length, is_auto):
  """Returns callbacks of which the chief alone shows progress and writes common files.

  With another `verbose` than 'auto', all workers show their progress.
  Workers with other callbacks or other paths keep theirs: the program has said
  who writes what. So does BackupAndRestore of divided optimizer state, which every
  worker has to load. Elastic jobs have callbacks of their own.

  Raises:
    CollectiveMismatchError: workers would train with other learning rates, or
      longer than others.
  """
  extended = model.distribute_strategy.extended
  link = workers_lib.link_of(model.distribute_strategy)
  if link is None or link.capacity == 1:
    return callbacks
  if is_auto:
    progress = keras.callbacks.ProgbarLogger
    callbacks = [ChiefOnly(c) if type(c) is progress else c for c in callbacks]
  if length is None or link.is_elastic:
    return callbacks
  same = {
    'the learning rate of the optimizer': _rate_of(model),
    'run_eagerly': model.run_eagerly,
    'steps_per_execution': model.steps_per_execution,
    **length,
  }
  files = files_of(callbacks)
  said = link.exchange(workers_lib.BEGIN_OF_FIT, [same, files])
  for what in same:
    link.check_same(
      [values[what] for values, _ in said],
      what,
      'call fit with the same settings and the whole data on every worker',
    )
  if any(files != said[0][1] for _, files in said):
    return callbacks
  # Every worker loads its part of divided state.
  apart = keras.callbacks.BackupAndRestore if extended.state_shards else ()
  return [
    _FilesOfChief(c) if path_of(c) and not isinstance(c, apart) else c
    for c in callbacks
  ]


_keras_internal.before_callbacks(_share_output)
