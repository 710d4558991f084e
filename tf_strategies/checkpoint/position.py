"""`Position`: how far a run has come, and where its data continue."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from tf_strategies import option_checks

# Of `tf.data.Dataset.cardinality`; this module needs no TensorFlow.
_UNKNOWN = -2


@dataclasses.dataclass(frozen=True, order=True)
class Position:
  """How far a run has come; unpacks as `epoch, step = position`.

  Attributes:
    epoch: completed epochs.
    step: completed steps of the next epoch.
    splits: completed elements of each split of the data, where workers read
      their own.
  """

  epoch: int = 0
  step: int = 0
  splits: tuple[int, ...] = ()

  def __iter__(self) -> Iterator[int]:
    return iter((self.epoch, self.step))

  def __str__(self) -> str:
    return f'epoch {self.epoch}, step {self.step}'

  @classmethod
  def checked(cls, epoch: Any, step: Any) -> Position:
    """Returns a position that a program gives; raises UnsupportedOptionError."""
    for name, value in (('epoch', epoch), ('step', step)):
      option_checks.check_int(name, value, 0, fix='pass what is completed')
    return cls(int(epoch), int(step))

  def to_json(self) -> dict[str, Any]:
    """Returns what JSON can hold."""
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, value: Mapping[str, Any]) -> Position:
    """Returns the position of `to_json`; other keys are ignored."""
    return cls(value['epoch'], value['step'], tuple(value.get('splits', ())))

  def iterate(
    self, dataset: Any, steps_per_epoch: int | None = None
  ) -> Iterator[Any]:
    """Returns an iterator that starts after the consumed batches.

    Without `steps_per_epoch` each epoch is one pass over the data. If the length of
    the data is unknown and they end early, skipping continues with the next pass.
    """
    cardinality, count = int(dataset.cardinality()), self.step
    # Infinite and unknown cardinalities are negative.
    if steps_per_epoch and not 0 <= cardinality <= steps_per_epoch:
      count += self.epoch * steps_per_epoch
    if cardinality != _UNKNOWN:
      return iter(dataset.skip(count))
    iterator = iter(dataset)
    while count:
      skipped = sum(1 for _ in itertools.islice(iterator, count))
      count -= skipped
      if count:
        iterator = iter(dataset)
        if not skipped:
          break
    for first in iterator:
      return itertools.chain([first], iterator)
    return iter(dataset)  # Its end was reached, and the next pass begins.
