"""How old the state was that each gradient was computed on."""

from __future__ import annotations

import collections


class Staleness:
  """Counts updates between the start and the end of each step.

  A step's staleness is the number of other steps that were applied while it was
  computed (Ho et al. 2013, "More Effective Distributed ML via a Stale
  Synchronous Parallel Parameter Server"). Zero for a single worker.

  Example:

    >>> staleness = Staleness()
    >>> staleness.start('a'); staleness.start('b')
    >>> staleness.end('a'); staleness.end('b')
    >>> staleness.histogram
    {0: 1, 1: 1}
  """

  def __init__(self):
    self._applied = 0
    self._started: dict[object, int] = {}
    self._histogram = collections.Counter()

  @property
  def histogram(self) -> dict[int, int]:
    """Number of steps by staleness."""
    return dict(sorted(self._histogram.items()))

  def start(self, worker: object) -> None:
    """A worker begins a step."""
    self._started[worker] = self._applied

  def end(self, worker: object, steps: int = 1) -> None:
    """A worker's step, or several in one task, have been applied."""
    began = self._started.pop(worker, self._applied)
    self._histogram[self._applied - began] += steps
    self._applied += steps
