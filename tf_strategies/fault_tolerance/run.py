"""`Run`: a training run that continues exactly where it was interrupted."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal, errors, option_checks
from tf_strategies.checkpoint import checkpointer, model_state
from tf_strategies.checkpoint.position import Position
from tf_strategies.cluster import exit_codes
from tf_strategies.fault_tolerance import preemption
from tf_strategies.strategies.multi_worker import elastic


@option_checks.has_options
class Run(keras.callbacks.Callback):
  """A run in a directory: it saves, exits on SIGTERM, and continues exactly.

  Saves the variables of the model and its optimizers, the state of random layers,
  the metrics of an interrupted epoch, and the position in the data, at which
  `make_dataset(..., start=...)` can start. Does not save the state of other callbacks
  or of random operations outside of Keras layers.

  * With `fit`: pass the run as the last callback, and all batches from the start
    of the restored epoch. The run drops the batches of completed steps, and
    metrics continue from their values. It saves after each epoch and, on SIGTERM,
    after the current step. If the signal arrives in or after the last step of an
    epoch, this epoch is not evaluated. If `fit` raises an error, the next run that
    listens handles the signal.
  * With a custom loop: train in the context of the run, call `exit_if_preempted`
    after each step and `save` after each epoch.

  On SIGTERM all workers save after the same step, and exit with the status 143, on
  which launchers restart them. At the end of `fit`, or of the context, the run tells
  a `SidecarEvaluator` that it has finished.

  Checkpoints are atomic. A damaged one is skipped with a warning, and an older
  one is used. All workers must call each method; only the chief reads and
  writes files.

  A directory belongs to one run. When `fit` or the context begins, or at the first
  `save`, the chief locks it until its process ends. A later run continues from a
  checkpoint in it, if variables and `settings` are the same.

  On parameter servers `directory` is the strategy's `checkpoint_dir`. The strategy
  saves every `checkpoint_steps` steps, and keeps three checkpoints. `restore` returns
  epoch 0 and the number of all completed steps. Pass the whole data set to `fit`, which
  finds the position. A custom loop uses `divmod(step, steps_per_epoch)`.

  Example:

    >>> import tempfile
    >>> import keras
    >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    >>> model.compile('adam', 'mse')
    >>> run = Run(tempfile.mkdtemp(), model, settings={'seed': 1})
    >>> epoch, first = run.restore()
    >>> with run:
    ...   for step in range(first, 9):  # Train here; a signal comes.
    ...     signal.raise_signal(signal.SIGTERM)
    ...     run.exit_if_preempted(epoch, step + 1)
    Traceback (most recent call last):
    SystemExit: 143
    >>> tuple(run.restore())
    (0, 1)

  With `fit`:

    epoch, _ = run.restore()
    model.fit(
      tfs.data.make_dataset(
        train, options, training=True, epochs=3, start=(epoch, 0),
        steps_per_epoch=100),
      initial_epoch=epoch, epochs=3, steps_per_epoch=100, callbacks=[run])

  Args:
    directory: directory of the checkpoints; created if it is missing.
    model: a built model.
    optimizer: its optimizer; None for the one it is compiled with.
    settings: values that make two runs different, such as the seed. They are saved,
      and compared by `restore`.
    metrics: metrics of the epoch in progress; None for the model's.
    max_to_keep: number of checkpoints to keep.

  Raises:
    UnsupportedOptionError: a model without variables or optimizer; parameter
      servers with another `checkpoint_dir`; an elastic job. When `fit` or the
      context begins: a run that was not restored, a `fit` of another model or
      optimizer, a `fit` that does not start at the position of the checkpoint, or
      a `steps_per_execution` that does not divide its step.
  """

  needs_all_workers = True  # See `ChiefOnly`.

  def __init__(
    self,
    directory: str | os.PathLike[str],
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer | None = None,
    settings: Mapping[str, Any] | None = None,
    metrics: Sequence[keras.metrics.Metric] | None = None,
    max_to_keep: int = 2,
  ):
    super().__init__()
    option_checks.check_type(
      'model', model, keras.Model, 'a keras.Model', 'pass the model to save'
    )
    option_checks.check(
      metrics is None
      or (
        isinstance(metrics, Sequence)
        and all(isinstance(m, keras.metrics.Metric) for m in metrics)
      ),
      f'metrics={metrics!r}',
      'a list of Keras metrics, or None',
      "leave it out for the model's",
    )
    settings = plain({} if settings is None else settings)
    optimizer = _optimizer_of(model, optimizer)
    self._strategy = model.distribute_strategy
    if not optimizer.built:
      with self._strategy.scope():
        optimizer.build(model.trainable_variables)
    objects = model_state.state_of(model, optimizer)
    self._known = list(objects.values())
    self._state: WorkerState | ServerState
    if hasattr(self._strategy, 'recovery'):
      objects |= {f'metrics/{i}': m for i, m in enumerate(metrics or ())}
      self._state = ServerState(directory, model, objects, settings)
    else:
      option_checks.check(
        not isinstance(self._strategy, elastic.ElasticRingStrategy),
        'a Run in an elastic job',
        'a strategy whose workers stay the same',
        'leave it out: job.restore takes the state of the other workers',
      )
      for each in objects.values():
        option_checks.check(
          each is model or each.built,
          f'optimizer {each.name!r} without variables',
          'optimizers whose state can be saved',
          'call optimizer.build(variables) before tfs.Run',
        )
      self._state = WorkerState(
        directory, model, optimizer, settings, metrics, max_to_keep
      )
    self._preemption = preemption.Preemption(self._strategy)
    self._resumed_from: Position | None = None
    self._is_first_epoch = False
    self._epoch = 0
    self.position: Position | None = None

  def restore(self) -> Position:
    """Restores the newest checkpoint that is whole, if any.

    Returns:
      The position, also in `position`; (0, 0) in an empty directory.

    Raises:
      CheckpointMismatchError: it belongs to another model, or to a run with other
        settings. The message names every difference.
      DataError: there are checkpoints and all are damaged.
      StorageError: the chief cannot read a file.
    """
    self.position = None
    self.position = self._state.restore()
    return self.position

  def save(self, epoch: int, step: int = 0) -> str | None:
    """Saves the state on the chief; every worker calls it.

    Args:
      epoch: completed epochs.
      step: completed steps of the next one.

    Returns:
      The path of the checkpoint, on the chief.

    Raises:
      StorageError: it cannot be written; the previous checkpoints are untouched.
        All workers raise the chief's errors.
      InUseError: a live process of another run writes into the directory.
      TakenOverError: another process has become the writer.
      UnsupportedOptionError: not a position.
    """
    return self._state.save(Position.checked(epoch, step))

  # In a custom loop.

  def __enter__(self) -> Run:
    check_restored(self.position)
    self._state.mark_finished(False)
    self._preemption.listen()
    return self

  def __exit__(self, error_type, *unused):
    is_unseen = self._preemption.stop()
    if error_type is None:
      self._state.mark_finished()
      if is_unseen:
        signal.raise_signal(signal.SIGTERM)

  def exit_if_preempted(
    self, epoch: int, step: int, at_once: bool = False
  ) -> None:
    """Saves, closes the strategy and exits if a worker got SIGTERM.

    Call it after each step on all workers: all exit at the same position.

    Args:
      epoch: completed epochs.
      step: completed steps of the next one.
      at_once: whether workers look for a signal now, not only at intervals: after
        the last step, or before an evaluation.

    Raises:
      SystemExit: with the status 143, so that `with` and `finally` run. Also if
        saving fails, which is logged; the previous checkpoint remains.
      UnsupportedOptionError: an invalid position.
    """
    position = Position.checked(epoch, step)
    if self._preemption.is_requested(at_once):
      self._save_and_exit(position)

  def _save_and_exit(self, position: Position) -> NoReturn:
    began = time.monotonic()
    try:
      self._state.save(position, at_once=True)
      is_saved = True
    except OSError:
      logging.exception('The checkpoint could not be saved.')
      is_saved = False
    workers = self._preemption.workers
    if workers is not None:
      flag = tf.constant(int(is_saved), tf.int64)
      number = workers.sum(flag, 'preemption/saved').numpy()
      is_saved = number == workers.world_size
      # Without it, the others would take the exit for a failure.
      self._strategy.close()
    logging.warning(
      'Preempted at %s: %s in %.2f s. Exiting with status %d.',
      position,
      'saved' if is_saved else 'NOT saved',
      time.monotonic() - began,
      exit_codes.RESTARTABLE_EXIT_CODE,
    )
    raise SystemExit(exit_codes.RESTARTABLE_EXIT_CODE)

  # In `fit`.

  def on_train_begin(self, logs=None):
    """Finds the position where `fit` continues."""
    objects = model_state.state_of(self.model)
    known = {id(each) for each in self._known}
    if _keras_internal.results_of(self.model, 'train') is None:
      # The user's own `train_step` may leave the compiled optimizer out.
      known.add(id(self.model.optimizer))
    option_checks.check(
      known.issuperset(map(id, objects.values())),
      f'a fit of {self.model.name!r} with the Run of another model or optimizer',
      'the model and the optimizers that the run saves',
      'make the Run of this model, after compile',
    )
    position = self._state.begin_fit(self.position, self.params.get('steps'))
    if position is not None and self._resumed_from is not position:
      self._resumed_from, self._is_first_epoch = position, True
      named = model_state.name_objects(objects).values()
      self._scalars = [(v, v.numpy()) for v in named if not tuple(v.shape)]

  def on_epoch_begin(self, epoch, logs=None):
    """Skips the completed steps of an interrupted epoch; listens for SIGTERM."""
    self._epoch = epoch
    self._state.begin_epoch(epoch)
    if self._is_first_epoch:
      self._check_start(epoch)
      self._is_first_epoch = False
      if self._resumed_from.step:
        # Other callbacks, which began this epoch once before, changed them again.
        with self._strategy.scope():
          for variable, value in self._scalars:
            variable.assign(value)
        self._state.restore_metrics()
        _keras_internal.skip_steps(self._resumed_from.step)
    if not self._preemption.is_listening:
      self._preemption.listen(in_fit=True)

  def _check_start(self, epoch):
    position, steps = self._resumed_from, self.params.get('steps')
    group = self.model.steps_per_execution
    done = f'after {position.step} steps of an epoch were restored'
    option_checks.check(
      epoch == position.epoch,
      f'initial_epoch={epoch} after {position} was restored',
      f'initial_epoch={position.epoch}',
      f'write initial_epoch={position.epoch}',
    )
    option_checks.check(
      steps is None or steps > position.step,
      f'steps_per_epoch={steps} {done}',
      f'more than {position.step} steps in an epoch',
      'pass the steps_per_epoch that the run started with',
    )
    option_checks.check(
      not position.step % group,
      f'steps_per_execution={group} {done}',
      f'a divisor of {position.step}',
      'compile with the steps_per_execution that the run started with',
    )

  def on_train_batch_end(self, batch, logs=None):
    """Saves and exits if a worker was signalled."""
    if self._preemption.is_requested():
      position, steps = (
        Position(self._epoch, batch + 1),
        self.params.get('steps'),
      )
      if steps is not None and position.step >= steps:
        position = Position(self._epoch + 1)
      self._save_and_exit(position)

  def on_test_batch_end(self, batch, logs=None):
    """Saves and exits during an evaluation by `fit`, too."""
    if self._preemption.is_requested(in_evaluation=True):
      self._save_and_exit(Position(self._epoch + 1))

  def on_epoch_end(self, epoch, logs=None):
    """Saves; exits if a worker was signalled since the last step."""
    if self._preemption.is_requested(at_once=True):
      self._save_and_exit(Position(epoch + 1))
    self._state.end_epoch(epoch)

  def on_train_end(self, logs=None):
    """Stops listening; raises a signal again that was not seen."""
    self._state.end_fit()
    if self._preemption.listens_in_fit and self._preemption.stop():
      signal.raise_signal(signal.SIGTERM)


def _optimizer_of(
  model: keras.Model, optimizer: keras.optimizers.Optimizer | None
) -> keras.optimizers.Optimizer:
  """Returns the optimizer of a run, or raises if the run has none."""
  model_state.check_built(model)
  if optimizer is None:
    optimizer = getattr(model, 'optimizer', None)
  if optimizer is None:
    raise errors.UnsupportedOptionError(
      f'optimizer=None with model={model.name!r}, which is not compiled',
      'an optimizer, or a compiled model',
      'pass optimizer=..., or compile the model',
    )
  option_checks.check_type(
    'optimizer',
    optimizer,
    keras.optimizers.Optimizer,
    'a Keras optimizer',
    'leave it out for the one that the model is compiled with',
  )
  return optimizer


class WorkerState:
  """The state of a run on one worker or several; all of them call each method.

  Args:
    directory: the directory of the checkpoints.
    model: a built model.
    optimizer: its optimizer, with variables.
    settings: values of JSON that a run must have been started with to continue.
    metrics: metrics of the epoch in progress; None for the model's.
    max_to_keep: number of checkpoints to keep.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    settings: Mapping[str, Any],
    metrics: Sequence[keras.metrics.Metric] | None,
    max_to_keep: int,
  ):
    self._checkpointer = checkpointer.Checkpointer(directory, max_to_keep)
    self._access = model_state.VariableAccess(model.distribute_strategy)
    self._variables = model_state.name_variables(model, optimizer)
    self._model = model
    self._metrics = metrics
    self._settings = settings
    self._metric_arrays: dict[str, Any] = {}

  def restore(self) -> Position:
    """Restores the newest whole checkpoint; returns its position."""
    self._metric_arrays = {}
    found: checkpointer.Checkpoint | None = None

    def find():
      nonlocal found
      found = self._find()
      return found and (found.metadata, found.arrays.specs)

    header = self._on_chief('restore', find)
    if header is None:
      return Position()
    metadata, specs = header
    position = Position.from_json(metadata)
    # Their names may differ between workers.
    variables = iter(self._variables.values())
    arrays = found.arrays if found else {}
    for name, array in self._access.share(arrays, specs):
      if _is_metric(name):
        self._metric_arrays[name] = array
      else:
        self._access.write(next(variables), array)
    if self._metrics is not None:  # Otherwise `fit` creates them later.
      self.restore_metrics()
    if found is not None:
      self._checkpointer.log_restored(found, position)
    return position

  def restore_metrics(self) -> None:
    """Assigns metrics their values in the interrupted epoch.

    For `fit`, which creates metrics late and resets them in each epoch.
    """
    if not self._metric_arrays:
      return
    variables = self._metric_variables()
    differences = model_state.differences(variables, self._metric_arrays)
    if differences:
      logging.warning(
        'Metrics of the interrupted epoch cover only its last part: %s',
        '; '.join(differences),
      )
      return
    for name, variable in variables.items():
      self._access.write(variable, self._metric_arrays[name])

  def begin_fit(
    self, position: Position | None, steps_per_epoch: int | None
  ) -> Position | None:
    """Returns the position at which `fit` must begin.

    Args:
      position: the position that was restored; None if nothing was.
      steps_per_epoch: number of steps of an epoch, if known.
    """
    del steps_per_epoch
    check_restored(position)
    self.mark_finished(False)
    return position

  def begin_epoch(self, epoch: int) -> None:
    """Does nothing: `save` gets the position."""

  def end_epoch(self, epoch: int) -> None:
    """Saves after an epoch of `fit`."""
    self.save(Position(epoch + 1))

  def end_fit(self) -> None:
    """Tells readers that no checkpoint will follow."""
    self.mark_finished()

  def save(self, position: Position, at_once: bool = False) -> str | None:
    """Saves the state; returns the path of the checkpoint on the chief."""
    del at_once
    began = time.monotonic()
    variables = dict(self._variables)
    if position.step:
      variables.update(self._metric_variables())
    arrays = self._access.read(variables)

    def write():
      return self._checkpointer.save(
        arrays,
        {
          **position.to_json(),
          'settings': self._settings,
          'parts': model_state.reductions(variables),
        },
      )

    path = self._on_chief('save', write)
    if not self._access.is_chief:
      return None
    logging.info(
      'Saved %s at %s in %.2f s.', path, position, time.monotonic() - began
    )
    return path

  def mark_finished(self, is_finished: bool = True) -> None:
    """Tells a `SidecarEvaluator` whether more checkpoints will follow."""

    def mark():
      self._checkpointer.acquire()
      self._checkpointer.mark_finished(is_finished)

    self._on_chief('save', mark)

  def _metric_variables(self):
    metrics = self._model.metrics if self._metrics is None else self._metrics
    variables = [v for metric in metrics for v in metric.variables]
    return {f'metrics/{i}': v for i, v in enumerate(variables)}

  def _on_chief(self, what: str, function: Callable[[], Any]) -> Any:
    """Calls a function on the chief; all workers return its value or raise its error.

    Args:
      what: verb for the error.
      function: returns a value for JSON.
    """
    value, error = None, None
    if self._access.is_chief:
      try:
        value = function()
      except (OSError, errors.Error) as e:
        error = e
    answer = value, error and [type(error).__name__, str(error)]
    workers = self._access.workers
    if workers is not None:
      # Not a collective of the graph: an error must reach all workers, too.
      answer = workers.exchange('checkpoint', answer)[0]
    if error is not None:
      raise error
    value, failure = answer
    if failure:
      kind, message = failure
      error_type = getattr(errors, kind, OSError)
      raise error_type(f'The chief cannot {what}: {message}')
    return value

  def _find(self) -> checkpointer.Checkpoint | None:
    """Opens the newest checkpoint; raises an error if it is another run's.

    Returns:
      It with the arrays by this run's names, those of metrics last.
    """
    found = self._checkpointer.newest()
    if found is None:
      return None
    saved = found.arrays.specs
    metrics = {k: v for k, v in saved.items() if _is_metric(k)}
    others = {k: v for k, v in saved.items() if not _is_metric(k)}
    specs = model_state.matched(found, self._variables, others, self._settings)
    specs = {name: specs[name] for name in self._variables} | metrics
    return dataclasses.replace(found, arrays=found.arrays.with_specs(specs))


class ServerState:
  """The state of a run on parameter servers, which the strategy reads and writes.

  The strategy saves every `checkpoint_steps` steps, and skips the data of completed
  steps.

  Args:
    directory: the `checkpoint_dir` of the strategy.
    model: a built model.
    objects: models, optimizers and metrics to save, by name.
    settings: values of JSON that a run must have been started with to continue.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    model: keras.Model,
    objects: Mapping[str, Any],
    settings: Mapping[str, Any],
  ):
    self._strategy: Any = model.distribute_strategy
    self._recovery = self._strategy.recovery
    self._model = model
    self._objects = objects
    self._settings = settings
    own = self._strategy.options.checkpoint_dir
    option_checks.check(
      own is not None and os.path.abspath(own) == os.path.abspath(directory),
      f'directory={os.fspath(directory)!r} for a Run of '
      f'{type(self._strategy).__name__}(checkpoint_dir={own!r})',
      'the directory in which the strategy saves',
      'pass one directory to both',
    )
    # The position in the data, and whether `fit` must look for it.
    self._found: Position | None = None
    self._is_restored = False

  def restore(self) -> Position:
    """Restores the newest checkpoint; returns the steps of all earlier runs."""
    if not self._recovery.is_open:
      self._found = self._recovery.restore(self._objects, self._settings)
      if self._found is None:
        self._strategy.track(**self._objects)
      self._is_restored = True
    return Position(0, self._recovery.begun_before)

  def begin_fit(
    self, position: Position | None, steps_per_epoch: int | None
  ) -> Position | None:
    """Restores; tells Keras and the data set where to continue."""
    del position  # It counts the steps of all epochs.
    if not self._is_restored:
      self._found = self._recovery.restore(self._objects, self._settings)
    position, self._is_restored = self._found, False
    if position is not None:
      if position.step == steps_per_epoch:  # It was written at the very end.
        position = Position(position.epoch + 1, 0, position.splits)
      # As Keras's own BackupAndRestore does.
      _keras_internal.set_initial_epoch(self._model, position.epoch)
      self._recovery.resume(position, steps_per_epoch)
      # Where nothing is left to do, no epoch begins.
      self._recovery.begin_epoch(position.epoch)
    self.mark_finished(False)
    return position

  def restore_metrics(self) -> None:
    """Does nothing: the metrics of `fit` cover the steps after the resume."""

  def begin_epoch(self, epoch: int) -> None:
    """Tells the strategy which epoch later checkpoints belong to."""
    self._recovery.begin_epoch(epoch)

  def end_epoch(self, epoch: int) -> None:
    """Tells the strategy that later checkpoints belong to the next epoch."""
    self._recovery.begin_epoch(epoch + 1)

  def end_fit(self) -> None:
    """Writes the last checkpoint."""
    # Otherwise the next `fit` starts in that epoch too, and the next data set is
    # read from there.
    _keras_internal.set_initial_epoch(self._model, 0)
    self._recovery.take_resumed()
    self._strategy.save()
    self.mark_finished()

  def save(self, position: Position, at_once: bool = False) -> str | None:
    """Saves; with `at_once`, fails if a server is gone as well."""
    del position  # The strategy counts the steps that it begins.
    try:
      return self._strategy.save(recovers=not at_once)
    except (errors.Error, tf.errors.OpError) as e:
      if not at_once:
        raise
      raise errors.StorageError(f'the variables cannot be read: {e}') from e

  def mark_finished(self, is_finished: bool = True) -> None:
    """Tells a `SidecarEvaluator` whether more checkpoints will follow."""
    self._recovery.mark_finished(is_finished)


def check_restored(position: Position | None) -> None:
  """Raises UnsupportedOptionError if a run begins without a position."""
  option_checks.check(
    position is not None,
    'fit, or `with run:`, without it',
    'run.restore() first',
    'write epoch, step = run.restore() first',
  )


def plain(settings: object) -> dict[str, Any]:
  """Returns settings as JSON returns them, so that they compare equal to saved ones."""
  fix = "pass a dict of numbers and strings, such as {'seed': 1}"
  option_checks.check_type('settings', settings, Mapping, 'a dict', fix)
  try:
    return json.loads(json.dumps(dict(settings), default=option_checks.plain))
  except (TypeError, ValueError) as e:
    raise errors.UnsupportedOptionError(
      f'settings={settings!r} ({e})', 'values that JSON can hold', fix
    ) from e


def _is_metric(name: str) -> bool:
  return name.startswith('metrics/')
