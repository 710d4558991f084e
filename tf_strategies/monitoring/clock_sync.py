"""By how much the clock of one task is ahead of another's.

From the collectives that both took part in. One in which everybody needs
something of everybody (an all-reduce, an all-gather) can end nowhere before it has
begun everywhere. With clock B ahead of clock A by d, each such collective says

  begin_B - end_A <= d <= end_B - begin_A

and all of them together leave an interval in which d must lie: no assumption
about the network, nothing measured besides. The middle is taken; half of the
width is how wrong that can be, about half of the shortest collective.

Clocks of two hosts drift apart, by some microseconds a second. Where no single d
fits all collectives, d is a line over time, fitted to the ends, and the accuracy
covers what the line leaves over.

Example:

  >>> from tf_strategies.monitoring import clock_sync
  >>> a = {1: (0.0, 10.0), 2: (20.0, 24.0)}
  >>> b = {1: (105.0, 112.0), 2: (121.0, 125.0)}
  >>> found = clock_sync.align(a, b)
  >>> found.ahead_by(110.0), found.accuracy, found.collectives
  (101.0, 4.0, 2)
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Hashable, Mapping

Span = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Alignment:
  """How far a clock is ahead of a reference.

  Attributes:
    offset: at time 0 of the clock.
    drift: by how much more with each unit of the clock.
    accuracy: the most that it can be wrong by; None if that is not known.
    collectives: from how many it was found.
  """

  offset: float
  drift: float = 0.0
  accuracy: float | None = None
  collectives: int = 0

  def ahead_by(self, time: float) -> float:
    """How far it is ahead when it shows `time`."""
    return self.offset + self.drift * time


def align(
  reference: Mapping[Hashable, Span], other: Mapping[Hashable, Span]
) -> Alignment | None:
  """Compares two clocks.

  Args:
    reference: begin and end of each collective, by what it is known by.
    other: the same of another task, by its own clock.

  Returns:
    How far the other's clock is ahead; None without a common collective.
  """
  common = [(reference[key], other[key]) for key in other if key in reference]
  if not common:
    return None
  low, high = _bounds(common, Alignment(0.0))
  if low <= high:
    return Alignment((low + high) / 2, 0.0, (high - low) / 2, len(common))
  line = _line(common)
  low, high = _bounds(common, line)
  return Alignment(
    line.offset + (low + high) / 2,
    line.drift,
    abs(high - low) / 2,
    len(common),
  )


def _bounds(common, line: Alignment) -> tuple[float, float]:
  """What must be added to `line`: at least, and at most."""
  low = max(b[0] - line.ahead_by(b[0]) - a[1] for a, b in common)
  high = min(b[1] - line.ahead_by(b[1]) - a[0] for a, b in common)
  return low, high


def _line(common) -> Alignment:
  ends = [b[1] for _, b in common]
  ahead = [b[1] - a[1] for a, b in common]
  if len(set(ends)) < 2:
    return Alignment(statistics.fmean(ahead))
  slope, intercept = statistics.linear_regression(ends, ahead)
  return Alignment(intercept, slope)
