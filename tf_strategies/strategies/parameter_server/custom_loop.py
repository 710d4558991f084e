"""Steps of a custom loop that run on workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tf_strategies import _keras_internal
from tf_strategies.strategies.parameter_server import engine as engine_lib
from tf_strategies.strategies.parameter_server import training, worker_input


class RemoteStep:
  """A step that workers run; made by `ParameterServerStrategy.remote_step`.

  Example:

    train = strategy.remote_step(train_fn, [optimizer])
    for batch in dataset:
      results = train(batch)
    strategy.join()

  Args:
    strategy: a `ParameterServerStrategy`.
    fn: takes a batch.
    optimizers: those that it applies.
  """

  def __init__(
    self, strategy, fn: Callable[[Any], Any], optimizers: Sequence[Any] = ()
  ):
    self._strategy = strategy
    self._trains = bool(optimizers)
    self._step = engine_lib.Step(
      run=training.in_replica(strategy, fn),
      optimizers=tuple(optimizers),
      capture=_keras_internal.capture_apply,
    )

  def __call__(self, batch: Any) -> Any:
    """Begins a step; waits only while too many are on the way.

    Args:
      batch: a structure of arrays or tensors, or what an iterator over
        `distribute_datasets_from_function` yields.

    Returns:
      What the newest step that is done returned, read when it is used as a
      float: of this step after `strategy.join()`.
    """
    source = worker_input.source_of(batch)
    if source is not None:
      if self._trains:
        return self._strategy.train_worker_input(self._step, source, 1)
      return self._guard(
        lambda: self._strategy.engine.draw(self._step, source, 1)
      )
    batch = engine_lib.Batch(batch)
    if self._trains:
      return self._strategy.train_batches(self._step, [batch])
    return self._guard(lambda: self._strategy.engine.run(self._step, [batch]))

  def _guard(self, action):
    return self._strategy.recovery.with_recovery(action)

  def call(self, batch: Any) -> engine_lib.PendingCall:
    """Begins a step whose result is wanted: `.result()` waits for it."""
    return self._strategy.engine.call(self._step, engine_lib.Batch(batch))
