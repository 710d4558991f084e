"""`RunCheckpoint`: all that a run needs to go on exactly where it was."""

from __future__ import annotations

import dataclasses
import json
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
from absl import logging

from tf_strategies import errors
from tf_strategies.checkpoint import checkpointer, model_state

# Meetings that each group of workers has had, by which they are named: all
# restore in the same order. Of an elastic job each generation is a new group.
_restores: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class Position(NamedTuple):
  """Where a run is.

  Attributes:
    epoch: epochs that are done.
    step: steps of the next one that are done.
  """

  epoch: int = 0
  step: int = 0


class RunCheckpoint:
  """The state of a run in one directory: the same weights at its end.

  That takes the model's and the optimizer's variables, the state of its random
  layers, metrics of an epoch in progress, and the (epoch, step) from which the
  data go on: `tfs.data.make_epochs` begins anywhere. Options that make two runs
  different are saved too, and compared on restoring. What has no variable in
  the model is not: random ops outside of Keras layers, the state of other
  callbacks.

  A checkpoint is whole or not there, see `Checkpointer`; one that was
  damaged later is skipped with a warning, and the one before it is used. A run
  does not begin anew where there are checkpoints and none is whole.

  On several workers all of them call `restore` and `save`; the chief alone
  reads and writes files.

  Example:

    >>> import tempfile
    >>> import keras
    >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    >>> model.compile('adam', 'mse')
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   checkpoint = RunCheckpoint(directory, model, settings={'seed': 1})
    ...   before = checkpoint.restore()
    ...   path = checkpoint.save(epoch=2, step=5)
    ...   after = checkpoint.restore()
    >>> before, after
    (Position(epoch=0, step=0), Position(epoch=2, step=5))

  Args:
    directory: where; made when the first checkpoint is written.
    model: a built model.
    optimizer: its optimizer; None for the one that it is compiled with.
    settings: whatever makes two runs different, such as the seed. A run with
      other settings may not go on from this directory.
    metrics: whose values belong to an epoch in progress; None for the model's.
    max_to_keep: how many checkpoints are kept.

  Raises:
    UnsupportedOptionError: a model without variables or optimizer, or on
      parameter servers, whose strategy saves by itself.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer | None = None,
    settings: Mapping[str, Any] | None = None,
    metrics: Sequence[keras.metrics.Metric] | None = None,
    max_to_keep: int = 2,
  ):
    self.strategy = model.distribute_strategy
    optimizer = optimizer or getattr(model, 'optimizer', None)
    _check(self.strategy, model, optimizer)
    if not optimizer.built:
      with self.strategy.scope():
        optimizer.build(model.trainable_variables)
    self._directory = os.fspath(directory)
    self._store = checkpointer.Checkpointer(directory, max_to_keep)
    self._access = model_state.VariableAccess(self.strategy)
    self._variables = model_state.name_variables(model, optimizer)
    self._model = model
    self._metrics = metrics
    # As JSON returns it, so that what was written compares equal.
    self._settings = json.loads(json.dumps(dict(settings or {})))
    self._metric_arrays: dict[str, Any] = {}
    self._position: Position | None = None

  @property
  def position(self) -> Position | None:
    """What `restore` returned last; None before."""
    return self._position

  def restore(self) -> Position:
    """Restores the newest checkpoint that is whole, if any.

    Returns:
      The epochs that are done, and the steps of the next one; (0, 0) in an
      empty directory.

    Raises:
      CheckpointMismatchError: it is another model's or another run's; the
        message names every difference. (Numbers that Keras gave to models and
        layers of this process are none.) Or none of those that are there is
        whole.
      OSError: the chief cannot read what is there.
    """
    found, header, error = None, None, None
    if self._access.is_chief:
      try:
        found = self._find()
        header = self._describe(found)
      except OSError as e:
        error, header = e, {'cannot_read': str(e)}
    if self._access.workers is not None:
      header = self._hear_from_chief(header)
    if error is not None:
      raise error
    if 'cannot_read' in header:
      raise OSError(f'The chief cannot restore: {header["cannot_read"]}')
    if 'error' in header:
      raise errors.CheckpointMismatchError(header['error'])
    self._metric_arrays = {}
    self._position = Position(header['epoch'], header['step'])
    if not header['is_found']:
      return self._position
    arrays = found.arrays if found else {}
    self._write(arrays, header['parts'])
    if self._metrics is not None:  # Else `fit` is yet to make them.
      self.restore_metrics()
    if self._access.is_chief:
      logging.info('Restored %s: %s.', found.path, self._position)
    return self._position

  def restore_metrics(self) -> None:
    """Gives metrics the values of the epoch in progress.

    For `fit`, which makes metrics late and begins each epoch with a reset; what
    was passed as `metrics` is restored by `restore` too. Nothing happens after a
    checkpoint at the end of an epoch.
    """
    if not self._metric_arrays:
      return
    variables = self._metric_variables()
    differences = self._differences(variables, self._metric_arrays)
    if differences:
      logging.warning(
        'Metrics of the interrupted epoch count its last part alone: %s',
        '; '.join(differences),
      )
      return
    self._access.write(variables, self._metric_arrays)

  def save(self, epoch: int, step: int = 0) -> str | None:
    """Saves the state, on the chief; every worker calls it.

    Args:
      epoch: epochs that are done.
      step: steps of the next one that are done.

    Returns:
      The path of the checkpoint; None on workers that write none.

    Raises:
      OSError: it cannot be written; the checkpoints before are untouched.
    """
    began = time.monotonic()
    variables = dict(self._variables)
    if step:
      variables.update(self._metric_variables())
    if not self._access.is_chief:
      # What it has a part of, the chief needs.
      variables = {
        k: v for k, v in variables.items() if model_state.has_parts(v)
      }
    arrays = self._access.read(variables)
    if not self._access.is_chief:
      return None
    path = self._store.save(
      arrays, {'epoch': epoch, 'step': step, 'settings': self._settings}
    )
    logging.info(
      'Saved %s at epoch %d, step %d in %.2f s.',
      path,
      epoch,
      step,
      time.monotonic() - began,
    )
    return path

  def _metric_variables(self):
    metrics = self._model.metrics if self._metrics is None else self._metrics
    variables = [v for metric in metrics for v in metric.variables]
    return {f'metrics/{i}': v for i, v in enumerate(variables)}

  def _find(self) -> checkpointer.StoredCheckpoint | None:
    """The newest checkpoint, with this run's names."""
    found = self._store.newest()
    if found is None:
      return None
    saved = [name for name in found.arrays if not name.startswith('metrics/')]
    names = model_state.match_names(list(self._variables), saved)
    arrays = {names.get(k, k): v for k, v in found.arrays.items()}
    return dataclasses.replace(found, arrays=arrays)

  def _describe(self, found) -> dict[str, Any]:
    """What the chief tells the others of a checkpoint."""
    if found is None:
      return self._describe_none()
    differences = self._different_settings(found.metadata['settings'])
    saved = {
      k: v for k, v in found.arrays.items() if not k.startswith('metrics/')
    }
    differences += self._differences(self._variables, saved)
    if differences:
      return {
        'error': f'{found.path} is not a checkpoint of this run: '
        f'{"; ".join(differences)}. Pass the options that it was made with, or '
        'another directory.'
      }
    parts = [
      (name, array.dtype.name, array.shape)
      for name, array in found.arrays.items()
      if name not in self._variables
      or model_state.has_parts(self._variables[name])
    ]
    return {
      'is_found': True,
      'epoch': found.metadata['epoch'],
      'step': found.metadata['step'],
      'parts': parts,
    }

  def _describe_none(self) -> dict[str, Any]:
    if self._store.paths():
      return {
        'error': f'None of the checkpoints in {self._directory} is whole: the '
        'log says what each of them lacks. Bring back what is missing, or, to '
        'begin anew, delete the directory.'
      }
    return {'is_found': False, 'epoch': 0, 'step': 0}

  def _hear_from_chief(self, header) -> dict[str, Any]:
    # Beside the collectives: an error must reach all, too.
    workers = self._access.workers
    number = _restores.get(workers, 0)
    _restores[workers] = number + 1
    answers = workers.exchange(
      f'checkpoint/{number}', json.dumps(header).encode()
    )
    return json.loads(answers[0])

  def _write(self, arrays, specs) -> None:
    variables = self._variables
    shared = {
      k: v for k, v in variables.items() if not model_state.has_parts(v)
    }
    if self._access.is_chief:
      self._access.write(shared, arrays)
    if self._access.workers is not None:
      arrays = self._access.share(shared.values(), arrays, specs)
    self._access.write(
      {k: v for k, v in variables.items() if k not in shared}, arrays
    )
    self._metric_arrays = {
      k: v for k, v in arrays.items() if k.startswith('metrics/')
    }

  def _different_settings(self, saved) -> list[str]:
    return [
      f'{name} was {saved.get(name)!r} and is {self._settings.get(name)!r}'
      for name in sorted({*saved, *self._settings})
      if saved.get(name) != self._settings.get(name)
    ]

  def _differences(self, variables, arrays) -> list[str]:
    found = []
    for name, variable in variables.items():
      if name not in arrays:
        found.append(f'it lacks variable {name}')
        continue
      here = self._access.shape_in_file(variable)
      there = list(arrays[name].shape)
      if here and here[0] is None and there:
        there[0] = None
      if here != there:
        found.append(f'variable {name} has shape {there} there and {here} here')
      dtype = arrays[name].dtype.name
      if variable.dtype != dtype:
        found.append(
          f'variable {name} is {dtype} there and {variable.dtype} here'
        )
    return found + [
      f'variable {name} is not in this run'
      for name in sorted(set(arrays) - set(variables))
    ]


def _check(strategy, model, optimizer) -> None:
  if hasattr(strategy, 'recovery'):
    raise errors.UnsupportedOptionError(
      f'a RunCheckpoint with {type(strategy).__name__}',
      'a strategy that does not write checkpoints by itself',
      'pass checkpoint_dir to the strategy, and callbacks=[tfs.ResumeFit('
      'strategy), tfs.PreemptionCheckpoint(strategy)] to fit',
    )
  if not model.built:
    raise errors.UnsupportedOptionError(
      f'model={model.name!r}, which has no variables yet',
      'a built model',
      'begin it with keras.Input(shape), or call model.build(shape)',
    )
  if optimizer is None:
    raise errors.UnsupportedOptionError(
      f'optimizer=None with model={model.name!r}, which is not compiled',
      'the optimizer that trains it',
      'pass optimizer=..., or compile the model',
    )
