"""Estimates the offset between the clocks of two tasks.

Uses the collectives in which both took part. A collective in which every rank
needs data of every other (all-reduce, all-gather) cannot end anywhere before it
has begun everywhere. With clock B ahead of clock A by d, each of them implies

  begin_B - end_A <= d <= end_B - begin_A

Together they bound d, without assumptions about the network or further
measurements. The estimate is the middle; its accuracy is half of the width, about
half of the shortest collective.

Clocks of two hosts drift apart by microseconds a second. If no single d fits all
collectives, d is a line over time, fitted to the ends, and the accuracy covers
the residuals.

Example:

  >>> from tf_strategies.monitoring import clock_sync
  >>> a = {1: (0.0, 10.0), 2: (20.0, 24.0)}
  >>> b = {1: (105.0, 112.0), 2: (121.0, 125.0)}
  >>> found = clock_sync.estimate(a, b)
  >>> found.ahead_by(110.0), found.accuracy, found.collectives
  (101.0, 4.0, 2)
"""

import dataclasses
import statistics
from collections.abc import Hashable, Mapping

Span = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class ClockOffset:
  """How far a clock is ahead of a reference."""

  # At time 0 of the clock, and its change per unit of the clock.
  offset: float
  drift: float = 0.0
  # The largest possible error; None if unknown.
  accuracy: float | None = None
  # How many it was estimated from.
  collectives: int = 0

  def ahead_by(self, time: float) -> float:
    """The offset when the clock shows `time`."""
    return self.offset + self.drift * time


def estimate(
  reference: Mapping[Hashable, Span], other: Mapping[Hashable, Span]
) -> ClockOffset | None:
  """The offset of the other's clock; None without a common collective.

  Args:
    reference: begin and end of each collective, by its key.
    other: the same of another task, by its own clock.
  """
  common = [(reference[key], other[key]) for key in other if key in reference]
  if not common:
    return None
  line = ClockOffset(0.0)
  low, high = _bounds(common, line)
  if low > high:
    line = _line(common)
    low, high = _bounds(common, line)
  offset = line.offset + (low + high) / 2
  return ClockOffset(offset, line.drift, abs(high - low) / 2, len(common))


def _bounds(common, line: ClockOffset) -> tuple[float, float]:
  """The least and the most that must be added to `line`."""
  low = max(b[0] - line.ahead_by(b[0]) - a[1] for a, b in common)
  high = min(b[1] - line.ahead_by(b[1]) - a[0] for a, b in common)
  return low, high


def _line(common) -> ClockOffset:
  ends = [b[1] for _, b in common]
  ahead = [b[1] - a[1] for a, b in common]
  if len(set(ends)) < 2:
    return ClockOffset(statistics.fmean(ahead))
  slope, intercept = statistics.linear_regression(ends, ahead)
  return ClockOffset(intercept, slope)
