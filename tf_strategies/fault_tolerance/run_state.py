"""`WorkerState` and `ServerState`: read and write the state of a run.

With synchronous strategies the workers have the state, and their chief reads and
writes the files. Parameter servers write their own files. `Run` uses both classes in
the same way.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal, errors, option_checks
from tf_strategies.checkpoint import checkpointer, model_state
from tf_strategies.checkpoint.position import Position
from tf_strategies.strategies.multi_worker import strategy as multi_worker


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
    seed, _ = multi_worker.proposed_seed()
    # Compared before this run saves, since reading alone harms nobody.
    self._description = plain(
      {'random seed': seed, **model_state.describe_optimizer(optimizer)}
    )
    self._metric_arrays: dict[str, Any] = {}
    # On the chief: the checkpoint that was restored, until this run saves.
    self._restored: checkpointer.Checkpoint | None = None

  def restore(self) -> Position:
    """Restores the newest whole checkpoint; returns its position."""
    self._restored, self._metric_arrays = None, {}
    header = self._on_chief('restore', self._find)
    if header is None:
      return Position()
    position = Position.from_json(header['position'])
    found = self._restored
    parts = self._access.restore(
      self._variables, found.arrays if found else {}, header['parts']
    )
    self._metric_arrays = {k: v for k, v in parts.items() if _is_metric(k)}
    if self._metrics is not None:  # Otherwise `fit` creates them later.
      self.restore_metrics()
    if self._access.is_chief:
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
    self._access.write(variables, self._metric_arrays)

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
      self._acquire()
      return self._checkpointer.save(
        arrays,
        {
          **position.to_json(),
          'settings': self._settings,
          'description': self._description,
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
      self._acquire()
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
    answer: dict[str, Any] = {}
    error = None
    if self._access.is_chief:
      try:
        answer['value'] = function()
      except (OSError, errors.Error) as e:
        error = e
        answer = {'error': str(e), 'type': type(e).__name__}
    workers = self._access.workers
    if workers is not None:
      # Not a collective of the graph: an error must reach all workers, too.
      answers = workers.exchange('checkpoint', json.dumps(answer).encode())
      answer = json.loads(answers[0])
    if error is not None:
      raise error
    if 'error' in answer:
      error_type = getattr(errors, answer['type'], OSError)
      raise error_type(f'The chief cannot {what}: {answer["error"]}')
    return answer.get('value')

  def _acquire(self) -> None:
    self._checkpointer.acquire()
    if self._restored is not None:
      self._checkpointer.check_description(self._restored, self._description)
      self._restored = None  # Closes its file.

  def _find(self) -> dict[str, Any] | None:
    """Opens the newest checkpoint; raises an error if it is another run's.

    Returns:
      For all workers: its position, and the names, dtypes and shapes of arrays that
      replicas have parts of. None if there is no checkpoint.
    """
    found = self._checkpointer.newest()
    if found is None:
      return None
    self._checkpointer.check_run(found)
    names = model_state.match_names(
      list(self._variables), [k for k in found.arrays if not _is_metric(k)]
    )
    arrays = found.arrays.renamed(names)
    # Checkpoints of parameter servers have no settings.
    different = checkpointer.different_settings(
      found.metadata.get('settings', {}), self._settings
    )
    different += model_state.differences(
      self._variables,
      {k: v for k, v in arrays.specs.items() if not _is_metric(k)},
    )
    if different:
      raise errors.CheckpointMismatchError(
        f'Expected a checkpoint of this run, got {found.path}: '
        f'{"; ".join(different)}. Fix: pass the options that it was made '
        'with, or another directory.'
      )
    self._restored = dataclasses.replace(found, arrays=arrays)
    return {
      'position': Position.from_json(found.metadata).to_json(),
      'parts': [
        (name, spec.dtype, spec.shape)
        for name, spec in arrays.specs.items()
        if _is_metric(name) or model_state.has_parts(self._variables[name])
      ],
    }


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
    return Position(0, self._recovery.counts.before)

  def begin_fit(
    self, position: Position | None, steps_per_epoch: int | None
  ) -> Position | None:
    """Restores; tells Keras and the data set where to continue."""
    del position  # It counts the steps of all epochs.
    if not self._is_restored:
      with self._strategy.scope():
        if not self._model.optimizer.built:
          self._model.optimizer.build(self._model.trainable_variables)
      objects = model_state.state_of(self._model)
      self._found = self._recovery.restore(objects, self._settings)
    position, self._is_restored = self._found, False
    self._recovery.expect_data(steps=steps_per_epoch)
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
    self._recovery.expect_data(False)
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
    'fit, or the context of the Run, before it',
    'a call of run.restore()',
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
