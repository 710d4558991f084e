"""Divides a step's time by the events that it recorded.

A step has three disjoint kinds of time: input (waiting for a batch), waiting for
collectives, and compute, the rest. It waits for collectives while one is in progress:
until a thread that was told of the end runs again it computes, so the part of
communication that is waited for is never more than the communication.

The backward pass runs inside a TensorFlow graph, invisible to Python. Visible is
when the graph submits a bucket of gradients. Buckets are submitted in one order,
each when its last gradient is ready: between the first and the last the backward
pass runs, and after the last the graph waits. Compute before the first is the
forward pass and the start of the backward pass, which cannot be distinguished.

Example:

  >>> from tf_strategies.monitoring import recorder, step_breakdown
  >>> events = [
  ...   recorder.Event('next', 'input', 0, 10, 1, 1, {'rows': 4, 'all_rows': 8}),
  ...   recorder.Event('b/0', 'communication', 52, 80, 2, 1, {
  ...     'kind': 'all_reduce', 'sent': 64, 'handed_ns': 50}),
  ...   recorder.Event('wait', 'wait', 70, 80, 1, 1, {}),
  ... ]
  >>> found = step_breakdown.break_down((0, 100), events)
  >>> found.nanoseconds()
  {'step': 100, 'input': 10, 'communication': 30, 'exposed_communication': 10, 'compute': 80}
  >>> found.all_rows
  8
"""

import dataclasses
from collections.abc import Iterable, Sequence

from tf_strategies.monitoring import recorder

# Parts of compute: before the first bucket of gradients, until the last, after.
FORWARD = 'forward, and backward to the first bucket'
BACKWARD = 'backward, first bucket to last'
UPDATE = 'update and the rest'
COMPUTE = 'compute'

Interval = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Breakdown:
  """One step.

  Attributes:
    whole: its begin and end; all times are nanoseconds of the recorder.
    input: when it waited for a batch.
    wait: when it waited for collectives.
    compute: the rest, as (name, interval).
    backward: from the first submitted bucket to the last, for each update.
    communication: when a collective was in progress, from its submission.
    all_rows: examples of all workers; None if unknown.
  """

  whole: Interval
  input: list[Interval]
  wait: list[Interval]
  compute: list[tuple[str, Interval]]
  backward: list[Interval]
  communication: list[Interval]
  all_rows: int | None

  def nanoseconds(self) -> dict[str, int]:
    """The length of the step and of its parts; communication hidden or not."""
    parts = {
      'step': [self.whole],
      'input': self.input,
      'communication': self.communication,
      'exposed_communication': self.wait,
      'compute': [interval for _, interval in self.compute],
    }
    return {name: length(part) for name, part in parts.items()}


def break_down(whole: Interval, events: Sequence[recorder.Event]) -> Breakdown:
  """Divides a step, `whole`, by the events among which are all of its own."""
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
  # Time that is both counts once.
  wait = [
    piece
    for interval in intersect(times(recorder.WAIT), communication)
    for piece in subtract(interval, waits_for_input)
  ]
  collectives = [e for e in events if e.category == recorder.COMMUNICATION]
  batches = [e.args for e in events if e.category == recorder.INPUT]
  rows = [b['all_rows'] for b in batches if b.get('all_rows') is not None]
  free = subtract(whole, [*waits_for_input, *wait])
  backward = _backward(collectives)
  return Breakdown(
    whole,
    waits_for_input,
    wait,
    _named(free, backward),
    backward,
    communication,
    sum(rows) if rows else None,
  )


def _backward(events: Iterable[recorder.Event]) -> list[Interval]:
  """From the first submitted bucket to the last, for each update."""
  updates: dict[int, list[int]] = {}
  for event in events:
    if event.args.get('update') is not None:
      handed = event.args['handed_ns']
      updates.setdefault(event.args['update'], []).append(handed)
  return sorted((min(handed), max(handed)) for handed in updates.values())


def _named(free, backward):
  def name(begin):
    if any(first <= begin < last for first, last in backward):
      return BACKWARD
    if len(backward) != 1:
      # In a call of several steps it is unknown where one ends.
      return COMPUTE
    return FORWARD if begin < backward[0][0] else UPDATE

  moments = [moment for interval in backward for moment in interval]
  pieces = cut(free, moments)
  return [(name(begin), (begin, end)) for begin, end in pieces]


# Sets of time, as lists of intervals.


def union(parts: Iterable[Interval]) -> list[Interval]:
  """The same times as disjoint intervals, in order."""
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


def intersect(
  parts: Iterable[Interval], others: Iterable[Interval]
) -> list[Interval]:
  """Returns the times that lie in `parts` and in one of `others`."""
  others = list(others)
  return union(piece for part in parts for piece in clip(others, part))


def cut(parts: Iterable[Interval], at: Iterable[int]) -> list[Interval]:
  """The same times, split at the moments `at`."""
  pieces = []
  for begin, end in parts:
    ends = [t for t in sorted(set(at)) if begin < t < end]
    pieces += zip([begin, *ends], [*ends, end], strict=True)
  return pieces


def length(parts: Iterable[Interval]) -> int:
  """The total length of disjoint intervals."""
  return sum(end - begin for begin, end in parts)
