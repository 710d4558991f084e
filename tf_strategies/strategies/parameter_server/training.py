"""Steps that run on workers: Keras's `fit`, `evaluate`, `predict`, and loops."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import (
  _keras_internal,
  _tf_internal,
  errors,
  option_checks,
)
from tf_strategies.checkpoint import model_state
from tf_strategies.keras import optimizer_checks
from tf_strategies.strategies.parameter_server import (
  batch_message,
  input,
  splits,
  step_task,
)
from tf_strategies.strategies.parameter_server import engine as engine_lib


class StepFunction:
  """What Keras calls in place of its own train, test or predict function."""

  def __init__(self, strategy, keras_step: _keras_internal.KerasStep):
    self._strategy = strategy
    self._model = keras_step.model
    self._predicts = keras_step.kind == 'predict'
    self._has_begun = self._has_reported = False
    # Predictions of a round of a source that were not returned yet.
    self._predicted_of: splits.Source | None = None
    self._predicted: list[Any] = []
    trains = keras_step.kind == 'train'
    option_checks.check(
      not self._model.jit_compile,
      'jit_compile=True',
      f'jit_compile=False of model {self._model.name!r} under '
      'ParameterServerStrategy',
      'compile the model with jit_compile=False, since XLA cannot reach '
      'variables on servers. Decorate a function that its train_step calls '
      'with tf.function(jit_compile=True)',
    )
    optimizers = ()
    if trains:
      with strategy.scope():
        optimizer = optimizer_checks.built_optimizer(self._model)
      optimizers = () if optimizer is None else (optimizer,)
    self._step = step_task.Step(
      run=in_replica(strategy, keras_step.run),
      trains=trains,
      optimizers=optimizers,
      counters=lambda: self._model.metrics_variables,
      results=_keras_internal.results_of(self._model, keras_step.kind),
    )

  def __call__(self, iterator: Any) -> Any:
    """Begins the next steps.

    Returns what the newest step that is done reported; for prediction, the
    outputs of these batches.
    """
    if self._predicts:
      return tf.nest.map_structure(
        tf.constant, _joined(self._predict(iterator))
      )
    data = [
      _keras_internal.without_optionals(batch)
      for batch in itertools.islice(iterator, self._model.steps_per_execution)
    ]
    if not data:
      raise StopIteration
    # A group at the end of the data may be shorter. A `fit` cannot continue in the
    # middle of a group.
    is_whole = len(data) == self._model.steps_per_execution
    hides_rows = getattr(iterator, 'hides_rows', True)
    work = input.steps_on(data, hides_rows)
    if not self._has_begun:
      self._look(work[0])
      self._has_begun = True
    report = self._strategy.begin(self._step, work, is_whole)
    if report is None and not self._has_reported:
      raise errors.DataError(
        'Expected data from the function given to '
        'distribute_datasets_from_function, got none for any of '
        f'{len(work[0].splits)} workers. Fix: see what it returns for their '
        '`InputContext`s.'
      )
    if report is None:
      raise StopIteration  # Nobody had anything left to read.
    self._has_reported = True
    return report

  def _look(self, work: engine_lib.Work) -> None:
    """Writes the first checkpoint, and traces the step, which may make variables."""
    strategy = self._strategy
    if self._step.trains and not strategy.recovery.is_told:
      strategy.track(**model_state.state_of(self._model))
    load = strategy.extended.placement.load
    is_read = isinstance(work, splits.Source)
    layout = work.dataset.layout if is_read else work.layout

    def look():
      # It may be traced with what an earlier call has lost, and then sent.
      strategy.liveness.wait_for_answers()
      strategy.engine.look(self._step, layout)

    strategy.recovery.with_recovery(look)
    if self._step.trains and strategy.extended.placement.load != load:
      strategy.save()  # Checkpoints have the new variables too.

  def _predict(self, data):
    source = input.source_of(data)
    if source is not None:
      return self._predict_read(source, len(data))
    batches = [
      batch_message.Batch(_keras_internal.without_optionals(d), hides_rows=True)
      for d in data
    ]

    def call_and_wait():
      tasks = [self._strategy.engine.call(self._step, b) for b in batches]
      return [task.result() for task in tasks]

    return self._strategy.recovery.with_recovery(call_and_wait)

  def _predict_read(self, source, steps):
    """Returns the next predictions of data that workers read, in one device's order."""
    if source is not self._predicted_of:
      self._predicted_of, self._predicted = source, []
    found = []
    for _ in range(steps):
      if not self._predicted:
        tasks = self._strategy.recovery.with_recovery(
          lambda: self._strategy.engine.read_round(self._step, source, True)
        )
        self._predicted = [task.outputs for task in tasks]
      count = len(self._predicted) if source.dataset.by_rounds else 1
      found += self._predicted[:count]
      del self._predicted[:count]
    if not found:
      raise StopIteration
    return found


def _joined(results: Sequence[Any]) -> Any:
  """The outputs of several batches as those of one."""
  return tf.nest.map_structure(
    lambda *parts: np.concatenate(parts, 0), *results
  )


def in_replica(strategy, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
  """A step that enters the strategy's scope and its replica context."""

  def run_in_replica(batch):
    with strategy.scope():
      return strategy.extended.call_for_each_replica(run, args=(batch,))

  return run_in_replica


class RemoteStep:
  """A step that workers run; made by `ParameterServerStrategy.step`.

  Example:

    train = strategy.step(train_fn, [optimizer])
    for batch in dataset:
      results = train(batch)
    strategy.join()
  """

  def __init__(
    self, strategy, fn: Callable[[Any], Any], optimizers: Sequence[Any] = ()
  ):
    optimizer_checks.check_step(fn, optimizers)
    self._strategy = strategy
    self._step = step_task.Step(
      run=in_replica(strategy, _tf_internal.inlined(fn)),
      trains=bool(optimizers),
      optimizers=tuple(optimizers),
    )

  def __call__(self, batch: Any) -> Any:
    """Begins a step; waits only while too many are running.

    Args:
      batch: a structure of arrays or tensors, or what an iterator over
        `distribute_datasets_from_function` yields.

    Returns:
      In 'sync', what this step returned; None if no worker had anything left to
      read. In other modes, what the newest step that is done returned, read when it
      is used as a float: of this step after `strategy.join()`.
    """
    return self._strategy.begin(self._step, input.steps_on([batch]))

  def call(self, batch: Any) -> step_task.StepTask:
    """Begins a step whose result is wanted: `.result()` waits for it."""
    batch = batch_message.Batch(batch)
    return self._strategy.recovery.with_recovery(
      lambda: self._strategy.engine.call(self._step, batch)
    )
