"""`RunCheckpoint`: all that a run needs to continue exactly where it was."""

from __future__ import annotations

import dataclasses
import json
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
from absl import logging

from tf_strategies import errors, option_checks
from tf_strategies.checkpoint import checkpointer, model_state
from tf_strategies.checkpoint.position import Position
from tf_strategies.strategies.multi_worker import elastic
from tf_strategies.strategies.multi_worker import strategy as multi_worker

# Exchanges of each group of workers, which their numbers name: all workers restore
# and save in the same order. Each generation of an elastic job is a new group.
_exchanges: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@option_checks.has_options
class RunCheckpoint:
  """The state of a run in one directory: the same weights at its end.

  Saves the variables of the model and the optimizer, the state of random
  layers, the metrics of an epoch in progress, and the position from which the
  data continue: `make_dataset(..., start=...)` starts anywhere. Not saved is what
  has no variable in the model: random ops outside of Keras layers, the state of
  other callbacks.

  Checkpoints are atomic. A damaged one is skipped with a warning, and an older
  one is used. On several workers all of them call `restore` and `save`; the
  chief alone reads and writes files.

  A directory belongs to one run. The chief locks it for the life of its process, when
  `fit` begins with `ResumeFit` or `PreemptionCheckpoint`, a `Preemption` is entered, or
  at the first `save`. A run that the launcher restarts (TFS_RUN_ID) does not continue
  checkpoints that another run has written meanwhile. A run that begins goes on from
  the checkpoints that it finds, if they were made with the same model, optimizer,
  random seed and `settings`; to continue others, delete `owner.json` there.

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
    >>> tuple(before), tuple(after)
    ((0, 0), (2, 5))

  Attributes:
    position: what `restore` returned last; None before.

  Args:
    directory: of the checkpoints; created if it is missing.
    model: a built model.
    optimizer: its optimizer; None for the one it is compiled with.
    settings: whatever makes two runs different, such as the seed; saved, and
      compared by `restore`.
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
    if optimizer is None:
      optimizer = getattr(model, 'optimizer', None)
    self.strategy = model.distribute_strategy
    _check(self.strategy, model, optimizer)
    if not optimizer.built:
      with self.strategy.scope():
        optimizer.build(model.trainable_variables)
    self._checkpointer = checkpointer.Checkpointer(directory, max_to_keep)
    self._access = model_state.VariableAccess(self.strategy)
    self._is_elastic = isinstance(self.strategy, elastic.ElasticRingStrategy)
    self._variables = model_state.name_variables(model, optimizer)
    self._model = model
    self._metrics = metrics
    self._settings = _as_json_returns_it({} if settings is None else settings)
    seed, _ = multi_worker.proposed_seed()
    # Compared before this run saves, since reading alone harms nobody.
    self._description = _as_json_returns_it(
      {'random seed': seed, **model_state.describe_optimizer(optimizer)}
    )
    self._metric_arrays: dict[str, Any] = {}
    self._restored: checkpointer.Checkpoint | None = None
    self.position: Position | None = None

  def restore(self) -> Position:
    """Restores the newest checkpoint that is whole, if any.

    Returns:
      The position; (0, 0) in an empty directory.

    Raises:
      CheckpointMismatchError: it belongs to another model or another run; the
        message names every difference.
      TakenOverError: another run has written there since this one began.
      DataError: there are checkpoints and all are damaged.
      StorageError: the chief cannot read a file.
    """
    self._restored = None
    header = self._on_chief('restore', self._find)
    found = self._restored
    self._metric_arrays = {}
    self.position = Position.from_json(header)
    if not header['is_found']:
      return self.position
    parts = self._access.restore(
      self._variables, found.arrays if found else {}, header['parts']
    )
    self._metric_arrays = {k: v for k, v in parts.items() if _is_metric(k)}
    if self._metrics is not None:  # Otherwise `fit` creates them later.
      self.restore_metrics()
    if self._access.is_chief:
      self._checkpointer.log_restored(found, self.position)
    return self.position

  def restore_metrics(self) -> None:
    """Assigns metrics the values of the epoch in progress, if there is one.

    For `fit`, which creates metrics late and resets them in each epoch; `restore`
    does it too for what was passed as `metrics`.
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

  def own(self) -> None:
    """Makes this run the only one that saves; the first `save` does it too.

    On several workers all of them call it, and all raise the chief's error.

    In an elastic job only a `save` does it: all workers take part in that, so an
    earlier chief gives the directory away.

    Raises:
      InUseError: a live process of another run writes into the directory.
      TakenOverError: another process has become the writer.
      CheckpointMismatchError: the restored checkpoint was made with another
        optimizer or random seed.
    """
    if not self._is_elastic:
      self._on_chief('save', self._acquire)

  def save(self, epoch: int, step: int = 0) -> str | None:
    """Saves the state on the chief; every worker calls it.

    Args:
      epoch: completed epochs.
      step: completed steps of the next one.

    Returns:
      The path of the checkpoint, on the chief.

    Raises:
      StorageError: it cannot be written; the previous checkpoints are untouched. All
        workers raise the chief's errors, except in an elastic job.
      InUseError, TakenOverError, CheckpointMismatchError: as `own`.
      UnsupportedOptionError: not a position.
    """
    for name, value in (('epoch', epoch), ('step', step)):
      option_checks.check_int(name, value, 0, fix='pass what is completed')
    position = Position(int(epoch), int(step))
    began = time.monotonic()
    variables = dict(self._variables)
    if step:
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

    # The members of an elastic job go on without a chief that cannot save.
    path = self._on_chief('save', write, tells_all=not self._is_elastic)
    if not self._access.is_chief:
      return None
    logging.info(
      'Saved %s at %s in %.2f s.', path, position, time.monotonic() - began
    )
    return path

  def mark_finished(self, is_finished: bool = True) -> None:
    """Tells a `SidecarEvaluator` whether more checkpoints will follow."""
    option_checks.check_bool('is_finished', is_finished)
    self.own()
    if self._access.is_chief:
      self._checkpointer.mark_finished(is_finished)

  def _metric_variables(self):
    metrics = self._model.metrics if self._metrics is None else self._metrics
    variables = [v for metric in metrics for v in metric.variables]
    return {f'metrics/{i}': v for i, v in enumerate(variables)}

  def _on_chief(
    self, what: str, function: Callable[[], Any], tells_all: bool = True
  ) -> Any:
    """Calls a function on the chief; all workers return its value or raise its error.

    Args:
      what: the function does, for the error.
      function: returns a value for JSON.
      tells_all: False if the chief alone returns the value or raises.
    """
    answer: dict[str, Any] = {}
    error = None
    if self._access.is_chief:
      try:
        answer['value'] = function()
      except (OSError, errors.Error) as e:
        error = e
        answer = {'error': str(e), 'type': type(e).__name__}
    else:
      self._checkpointer.release()
    workers = self._access.workers
    if workers is not None and tells_all:
      number = _exchanges.get(workers, 0)
      _exchanges[workers] = number + 1
      # Not a collective of the graph: an error must reach all workers, too.
      answers = workers.exchange(
        f'checkpoint/{number}', json.dumps(answer).encode()
      )
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

  def _find(self) -> dict[str, Any]:
    """Opens the newest checkpoint; raises if it is another run's.

    Returns:
      What all workers need to know of the checkpoint.
    """
    self._checkpointer.warn_if_in_use()
    found = self._checkpointer.newest()
    if found is None:
      return {'is_found': False, **Position().to_json()}
    self._checkpointer.check_run(found)
    names = model_state.match_names(
      list(self._variables), [k for k in found.arrays if not _is_metric(k)]
    )
    found = dataclasses.replace(found, arrays=found.arrays.renamed(names))
    specs = found.arrays.specs
    # Those of parameter servers have none.
    different = checkpointer.different_settings(
      found.metadata.get('settings', {}), self._settings
    )
    different += model_state.differences(
      self._variables, {k: v for k, v in specs.items() if not _is_metric(k)}
    )
    if different:
      raise errors.CheckpointMismatchError(
        f'{found.path} is not a checkpoint of this run: '
        f'{"; ".join(different)}. Fix: pass the options that it was made with, '
        'or another directory.'
      )
    parts = [
      (name, spec.dtype, spec.shape)
      for name, spec in specs.items()
      if _is_metric(name) or model_state.has_parts(self._variables[name])
    ]
    self._restored = found
    position = Position.from_json(found.metadata).to_json()
    return {'is_found': True, **position, 'parts': parts}


def _as_json_returns_it(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Settings of which what was written compares equal."""
  fix = "pass a dict of numbers and strings, such as {'seed': 1}"
  option_checks.check_type('settings', settings, Mapping, 'a dict', fix)
  try:
    return json.loads(json.dumps(dict(settings), default=option_checks.plain))
  except (TypeError, ValueError) as e:
    raise errors.UnsupportedOptionError(
      f'settings={settings!r} ({e})', 'what JSON can hold', fix
    ) from e


def _is_metric(name: str) -> bool:
  return name.startswith('metrics/')


def _check(strategy, model, optimizer) -> None:
  if hasattr(strategy, 'recovery'):
    raise errors.UnsupportedOptionError(
      f'a RunCheckpoint with {type(strategy).__name__}',
      'a strategy that does not write checkpoints by itself',
      'pass checkpoint_dir to the strategy, and callbacks=[tfs.ResumeFit('
      'strategy), tfs.PreemptionCheckpoint(strategy)] to fit',
    )
  model_state.check_built(model)
  if optimizer is not None:
    option_checks.check_type(
      'optimizer',
      optimizer,
      keras.optimizers.Optimizer,
      'a Keras optimizer',
      'leave it out for the one that the model is compiled with',
    )
  if optimizer is None:
    raise errors.UnsupportedOptionError(
      f'optimizer=None with model={model.name!r}, which is not compiled',
      'the optimizer that trains it',
      'pass optimizer=..., or compile the model',
    )
