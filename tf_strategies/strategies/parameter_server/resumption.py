"""Where in the data a restarted run goes on."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Resumption:
  """What a run had trained on when its checkpoint was written.

  Attributes:
    epoch: in which it was.
    epoch_steps: steps of that epoch that were done.
    steps_per_epoch: where the caller gave it; None if an epoch is one pass.
    splits: elements of each split that were done, where workers read.
  """

  epoch: int
  epoch_steps: int
  steps_per_epoch: int | None = None
  splits: tuple[int, ...] = ()

  def skip(self, cardinality: int) -> int:
    """Batches of a data set to leave out.

    Args:
      cardinality: number of its batches, negative if unknown or infinite.

    >>> Resumption(epoch=2, epoch_steps=3).skip(10)
    3
    >>> Resumption(epoch=2, epoch_steps=3, steps_per_epoch=10).skip(-1)
    23
    """
    if self._spans_epochs(cardinality):
      return self.epoch * self.steps_per_epoch + self.epoch_steps
    return self.epoch_steps

  def _spans_epochs(self, cardinality: int) -> bool:
    """Whether one pass over the data is several epochs."""
    if not self.steps_per_epoch:
      return False
    return cardinality < 0 or cardinality > self.steps_per_epoch
