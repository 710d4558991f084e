"""Divides a step's time by the events that it recorded.

A step has three disjoint kinds of time: input (it waits for a batch), waits for
collectives, and compute, the rest. A wait counts while a collective is in progress. So
a step never waits for longer than it communicates: the time from the end of a
collective until the waiting thread runs again is compute.

Example:

  >>> from tf_strategies.monitoring import recorder, step_breakdown
  >>> events = [
  ...   recorder.Event('next', 'input', 0, 10, 1, {'all_rows': 8}),
  ...   recorder.Event('b/0', 'communication', 52, 80, 1, {
  ...     'kind': 'all_reduce', 'sent': 64, 'handed_ns': 50}),
  ...   recorder.Event('wait', 'wait', 70, 80, 1, {}),
  ... ]
  >>> found = step_breakdown.break_down((0, 100), events)
  >>> found.communication, found.wait, found.compute
  ([(50, 80)], [(70, 80)], [(10, 70), (80, 100)])
  >>> found.all_rows
  8
"""

import dataclasses
from collections.abc import Iterable, Sequence

from tf_strategies.monitoring import recorder

Interval = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Breakdown:
  """One step; all times are nanoseconds of the recorder.

  Attributes:
    input: times in which it waited for a batch.
    wait: times in which it waited for collectives.
    compute: the rest.
    communication: times in which a collective was in progress, from its submission.
    all_rows: number of examples of all workers; None if unknown.
  """

  input: list[Interval]
  wait: list[Interval]
  compute: list[Interval]
  communication: list[Interval]
  all_rows: int | None


def break_down(whole: Interval, events: Sequence[recorder.Event]) -> Breakdown:
  """Divides a step, `whole`, by events, among which are all events of the step."""
  begin, end = whole
  events = [e for e in events if e.end_ns >= begin and e.begin_ns <= end]

  def times(category):
    # A submitted collective is in progress, also while it waits for its thread.
    spans = [
      (e.args.get('handed_ns', e.begin_ns), e.end_ns)
      for e in events
      if e.category == category
    ]
    return union(clip(spans, whole))

  waits_for_input = times(recorder.INPUT)
  communication = times(recorder.COMMUNICATION)
  # Time in which it waits for both is input.
  wait = [
    piece
    for waiting in times(recorder.WAIT)
    for busy in clip(communication, waiting)
    for piece in subtract(busy, waits_for_input)
  ]
  batches = [e.args for e in events if e.category == recorder.INPUT]
  rows = [b['all_rows'] for b in batches if b.get('all_rows') is not None]
  return Breakdown(
    waits_for_input,
    wait,
    subtract(whole, [*waits_for_input, *wait]),
    communication,
    sum(rows) if rows else None,
  )


# Sets of time, as lists of intervals.


def union(parts: Iterable[Interval]) -> list[Interval]:
  """Returns the same times as disjoint intervals, in order."""
  merged: list[Interval] = []
  for begin, end in sorted(parts):
    if end <= begin:
      continue
    if merged and begin <= merged[-1][1]:
      merged[-1] = (merged[-1][0], max(merged[-1][1], end))
    else:
      merged.append((begin, end))
  return merged


def clip(parts: Iterable[Interval], whole: Interval) -> list[Interval]:
  """Returns the intersections of `parts` with `whole`."""
  begin, end = whole
  clipped = [(max(b, begin), min(e, end)) for b, e in parts]
  return [(b, e) for b, e in clipped if b < e]


def subtract(whole: Interval, parts: Iterable[Interval]) -> list[Interval]:
  """Returns the times of `whole` that lie in none of `parts`."""
  left, at = [], whole[0]
  for begin, end in union(clip(parts, whole)):
    if at < begin:
      left.append((at, begin))
    at = end
  if at < whole[1]:
    left.append((at, whole[1]))
  return left


def length(parts: Iterable[Interval]) -> int:
  """Returns the total length of disjoint intervals."""
  return sum(end - begin for begin, end in parts)
