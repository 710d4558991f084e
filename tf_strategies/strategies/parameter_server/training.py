"""Keras's `fit`, `evaluate` and `predict` with steps that run on workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import _graph_errors, _keras_internal, errors
from tf_strategies.keras import optimizer_checks
from tf_strategies.strategies.parameter_server import (
  batch_message,
  worker_input,
)
from tf_strategies.strategies.parameter_server import engine as engine_lib


class StepFunction:
  """What Keras calls in place of its own train, test or predict function.

  Args:
    strategy: a `ParameterServerStrategy`.
    keras_step: the step, and whose.
  """

  def __init__(self, strategy, keras_step: _keras_internal.KerasStep):
    self._strategy = strategy
    self.kind = keras_step.kind
    self._model = keras_step.model
    self._report = None
    # Keras counts the steps of an epoch, those before a restart too.
    self._steps_done = 0
    if self.kind == 'train':
      self._steps_done = strategy.recovery.take_steps_done()
    optimizer = None
    if self.kind == 'train':
      with strategy.scope():
        optimizer = optimizer_checks.built_optimizer(self._model)
    self.step = engine_lib.Step(
      run=in_replica(strategy, keras_step.run),
      optimizers=() if optimizer is None else (optimizer,),
      capture=_keras_internal.capture_apply,
      results=_keras_internal.results_of(self._model, self.kind),
    )

  def __call__(self, source: Any) -> Any:
    """Begins the next steps.

    Args:
      source: an iterator of batches; for prediction, a list of them.

    Returns:
      What the newest step that is done reported; for prediction, the outputs of
      these batches.
    """
    if self.kind == 'predict':
      return self._predict(source)
    steps = self._model.steps_per_execution
    if self._steps_done > 0:
      self._steps_done -= steps
      return self._report
    data = list(itertools.islice(source, steps))
    if not data:
      raise StopIteration
    source = worker_input.source_of(data)
    if source is not None:
      return self._draw(source, len(data))
    return self.run([self._batch(d) for d in data])

  def _draw(self, source, steps):
    if self.kind == 'train':
      self._report = self._strategy.train_worker_input(
        self.step, source, steps, self._model
      )
      return self._report
    return self._guard(
      lambda: self._strategy.engine.draw(self.step, source, steps)
    )

  def _guard(self, action):
    return self._strategy.recovery.with_recovery(action)

  def run(self, batches) -> Any:
    """Begins the steps of these batches."""
    if self.kind == 'train':
      self._report = self._strategy.train_batches(
        self.step, batches, self._model
      )
      return self._report
    return self._guard(lambda: self._strategy.engine.run(self.step, batches))

  def _batch(self, data) -> engine_lib.Batch:
    return engine_lib.Batch(
      _keras_internal.without_optionals(data), hides_rows=True
    )

  def _predict(self, data):
    batches = [self._batch(d) for d in data]
    results = self._guard(lambda: self._call(batches))
    return tf.nest.map_structure(
      lambda *parts: tf.constant(np.concatenate(parts, 0)), *results
    )

  def _call(self, batches):
    calls = [self._strategy.engine.call(self.step, b) for b in batches]
    return [call.result() for call in calls]

  def in_graph(self, data) -> Any:
    """The first call of all, which comes from inside a function of Keras's.

    Runs the step by a call back to Python, and installs this object for the
    next ones.
    """
    source = worker_input.source_of(data)
    if source is not None:
      return self._host_call(
        [], source.dataset.element_spec, lambda: self._draw(source, 1)
      )
    data = _keras_internal.without_optionals(data)
    flat = [t for t in tf.nest.flatten(data) if t is not None]
    structure = tf.nest.map_structure(
      lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype), data
    )

    def run_batch(*arrays):
      # Copies: what TensorFlow passes is its own memory, for this call only.
      data = batch_message.pack(structure, [np.array(a) for a in arrays])
      batch = engine_lib.Batch(data, hides_rows=True)
      if self.kind == 'predict':
        return self._guard(lambda: self._call([batch]))[0]
      return self.run([batch])

    return self._host_call(flat, structure, run_batch)

  def _host_call(self, flat, structure, run):
    """Tensors in a graph that a call of `run` makes."""
    outputs = self._strategy.engine.outputs(self.step, structure)
    specs = tf.nest.flatten(outputs)

    def call(*arrays):
      try:
        result = run(*arrays)
      except errors.Error as e:
        _graph_errors.raise_through_graph(e)
      return [
        np.asarray(value, spec.dtype.as_numpy_dtype)
        for value, spec in zip(tf.nest.flatten(result), specs, strict=True)
      ]

    results = tf.nest.flatten(
      tf.numpy_function(call, flat, [s.dtype for s in specs])
    )
    for result, spec in zip(results, specs, strict=True):
      result.set_shape(spec.shape)
    return tf.nest.pack_sequence_as(outputs, results)


def in_replica(strategy, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
  """A step that enters the strategy's scope and its replica context."""

  def run_in_replica(batch):
    with strategy.scope():
      return strategy.extended.call_for_each_replica(run, args=(batch,))

  return run_in_replica
