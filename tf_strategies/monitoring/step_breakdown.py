"""Divides a step's time by the events that it recorded.

A step has three disjoint kinds of time: input (it waits for a batch), waits for
collectives, and compute, the rest. A wait counts while a collective is in progress. So
a step never waits for longer than it communicates: the time from the end of a
collective until the waiting thread runs again is compute.

Example:

  >>> from tf_strategies.monitoring import recorder, step_breakdown
  >>> events = [
  ...   recorder.Event('next', 'input', 0, 10, 1, {}),
  ...   recorder.Event('b/0', 'communication', 52, 80, 1, {'handed_ns': 50}),
  ...   recorder.Event('wait', 'wait', 70, 85, 1, {}),
  ... ]
  >>> found = step_breakdown.break_down((0, 100), events)
  >>> found['communication'], found['wait'], found['compute']
  ([(50, 80)], [(70, 80)], [(10, 70), (80, 100)])
"""

import collections
from collections.abc import Iterable, Sequence

from tf_strategies.monitoring import recorder

COMPUTE = 'compute'
# The kinds of time that a step divides into.
PARTS = (recorder.INPUT, recorder.WAIT, COMPUTE)

Interval = tuple[int, int]


def break_down(
  whole: Interval, events: Sequence[recorder.Event]
) -> dict[str, list[Interval]]:
  """Divides a step, `whole`, by events, among which are all events of the step.

  Returns:
    The disjoint intervals of each of `PARTS`, and those in which a collective was in
    progress, in nanoseconds of the recorder.
  """
  edges = []
  for event in events:
    # A submitted collective is in progress, also while it waits for its thread.
    begin = event.args.get('handed_ns', event.begin_ns)
    begin, end = max(begin, whole[0]), min(event.end_ns, whole[1])
    if begin < end:
      edges += [(begin, event.category, 1), (end, event.category, -1)]
  found: dict[str, list[Interval]] = {
    kind: [] for kind in (*PARTS, recorder.COMMUNICATION)
  }
  active: collections.Counter[str] = collections.Counter()
  at = whole[0]
  for time, category, change in [*sorted(edges), (whole[1], '', 0)]:
    communicates = active[recorder.COMMUNICATION] > 0
    kind = COMPUTE
    # Time in which it waits for both is input.
    if active[recorder.INPUT]:
      kind = recorder.INPUT
    elif active[recorder.WAIT] and communicates:
      kind = recorder.WAIT
    _add(found[kind], at, time)
    if communicates:
      _add(found[recorder.COMMUNICATION], at, time)
    at = time
    active[category] += change
  return found


def _add(intervals: list[Interval], begin: int, end: int) -> None:
  """Adds an interval at the end, joined with the last one if they touch."""
  if intervals and intervals[-1][1] == begin:
    begin, _ = intervals.pop()
  if begin < end:
    intervals.append((begin, end))


def length(intervals: Iterable[Interval]) -> int:
  """Returns the total length of disjoint intervals."""
  return sum(end - begin for begin, end in intervals)
