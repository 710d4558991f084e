"""Local steps: a worker trains by itself for a while, then sends what it changed.

The variables are read once, `local_steps` steps are done on that copy, and the
difference, divided by the number of workers, is added to the servers'
variables. That is another algorithm than one step at a time: the mean of models
that trained apart for a while (Stich 2019, "Local SGD Converges Fast and
Communicates Little"), without waiting for each other. With one worker it is
exact.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_strategies import errors
from tf_strategies.strategies.parameter_server import engine as engine_lib
from tf_strategies.strategies.parameter_server import (
  traced_step,
  worker_function,
)


class LocalEngine(engine_lib.AsyncEngine):
  """Sends differences every `local_steps` steps.

  Args:
    *args: as `Engine`.
    local_steps: steps between reading and sending.
    **kwargs: as `Engine`.
  """

  def __init__(self, *args, local_steps: int, **kwargs):
    super().__init__(*args, **kwargs)
    self._local_steps = local_steps
    # Batches of training steps that wait until there are enough of them.
    self._waiting: list[engine_lib.Batch] = []
    self._waiting_step: engine_lib.Step | None = None
    self._newest_report: Any = None

  def train(self, step: engine_lib.Step, batches) -> Any:
    """Collects batches, and begins a task when there are enough."""
    if step is not self._waiting_step:
      self._flush()
      self._waiting_step = step
      self._newest_report = None
    for batch in batches:
      if self._waiting and batch.key != self._waiting[0].key:
        self._flush()
      self._waiting.append(batch)
      # The first ones go at once: Keras wants a report.
      if len(self._waiting) == self._local_steps or not self._newest_report:
        self._flush()
    return self._newest_report

  def draw(self, step, source, steps):
    """As `Engine.draw`, for steps without an optimizer."""
    if step.optimizers:
      raise errors.UnsupportedOptionError(
        f'distribute_datasets_from_function with local_steps='
        f'{self._local_steps}',
        'batches that the coordinator hands out',
        'pass the tf.data.Dataset to fit, or leave out local_steps',
      )
    self._flush()
    return super().draw(step, source, steps)

  def run(self, step, batches):
    """Evaluation sees what was trained before."""
    self._flush()
    return super().run(step, batches)

  def drain(self) -> None:
    """Waits until all steps are done, the collected ones too."""
    self._flush()
    super().drain()

  def _flush(self) -> None:
    batches, self._waiting = self._waiting, []
    if batches:
      self._newest_report = super().run(self._waiting_step, batches)

  def _look(self, step, structure):
    return worker_function.discover(
      step.run, structure, holds_updates=bool(step.optimizers)
    )

  def _batch_function(self, step, layout, discovery):
    if not step.optimizers:
      return super()._batch_function(step, layout, discovery)
    share = 1.0 / len(self._workers)
    return LocalFunction(step.run, layout, discovery, self.markers, share=share)


class LocalFunction(worker_function.BatchFunction):
  """All steps of a parcel on one copy of the variables.

  Args:
    *args: as `BatchFunction`.
    share: by which what the updates changed is multiplied.
  """

  def __init__(self, *args, share: float):
    self._share = share
    super().__init__(*args)

  def _trace(self, argument):
    traced = traced_step.TracedStep(self._discovery.access, holds_updates=True)
    with traced.tracing():
      for step in range(self._steps):
        batch, _ = self._batch_and_marker(argument, step)
        outputs = self._run_step(batch)
      reported = worker_function.report(outputs, self._discovery.are_numbers)
    _, mark = self._batch_and_marker(
      argument, tf.constant(self._steps - 1, tf.int64)
    )
    traced.write_as_sums(self._share)
    traced.commit(mark)
    return reported
