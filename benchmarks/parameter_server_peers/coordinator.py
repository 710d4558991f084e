"""The process of a coordinator, which trains models on the servers of its cluster."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from benchmarks.parameter_server_peers import (
  catalogue,
  loops,
  models,
)


class Coordinator:
  """The coordinator of a cluster. `pool_worker` calls the methods.

  Args:
    rank: always 0.
  """

  def __init__(self, rank: int):
    del rank
    self._model_name = ''
    self._initial: list[Any] = []

  def connect(
    self,
    peer: Mapping[str, Any],
    cluster: Mapping[str, Sequence[str]],
  ) -> None:
    """Connects to the servers.

    Args:
      peer: fields of a `catalogue.Peer`.
      cluster: addresses of the tasks by job.
    """
    entry = catalogue.Peer(**peer)
    make = loops.FitLoop if entry.is_fit else loops.StockLoop
    self._loop = make(entry, cluster)

  def set_up(
    self, model: str, steps_per_execution: int, batch_rows: int
  ) -> dict[str, float]:
    """Builds a model on the servers.

    Args:
      model: name of the model.
      steps_per_execution: number of steps per call on a worker.
      batch_rows: number of rows per step.

    Returns:
      `parameter_bytes`, `num_variables`, and the `loss` before training.
    """
    self._model_name = model
    self._loop.build(model, steps_per_execution, batch_rows)
    self._initial = [v.numpy() for v in self._loop.variables]
    trainable = self._loop.model.trainable_variables
    return {
      'parameter_bytes': sum(4 * math.prod(v.shape) for v in trainable),
      'num_variables': len(trainable),
      'loss': self._loss(),
    }

  def run(self, blocks: int, steps: int) -> dict[str, Any]:
    """Trains from the initial weights: a warm-up block, then the measured blocks.

    Args:
      blocks: number of measured blocks.
      steps: number of steps per block.

    Returns:
      `samples`, the seconds of each block, the optimizer's `iterations`, and the
      `loss` of the trained model.
    """
    self._restore()
    samples = self._loop.train(1 + blocks, steps)[1:]
    iterations = int(self._loop.optimizer.iterations.numpy())
    return {
      'samples': samples,
      'iterations': iterations,
      'loss': self._loss(),
    }

  def release(self) -> None:
    """Deletes the model."""
    self._loop.release()
    self._initial = []
    keras.backend.clear_session()
    gc.collect()

  def _restore(self) -> None:
    for variable, value in zip(
      self._loop.variables, self._initial, strict=True
    ):
      variable.assign(value)

  def _loss(self) -> float:
    """Computes the loss of all data in this process."""
    twin = models.build(self._model_name)
    twin.set_weights(self._loop.model.get_weights())
    images, classes = models.arrays()
    return float(models.loss()(classes, twin(images, training=False)))
