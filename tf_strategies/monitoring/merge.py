"""Merges the timelines of several tasks, on one clock.

  tfs timeline merge run-0.json run-1.json --output=run.json

The clock is the first file's; the offsets of the others are estimated, and printed
with their accuracy. Tasks without a common collective (parameter servers, for
example) are merged by their wall clocks.
"""

import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from absl import flags

from tf_strategies import errors
from tf_strategies.cluster import command_line
from tf_strategies.monitoring import recorder, timeline

_FLAGS = [
  ('output', None, 'The file to write.'),
]
# The root may end before the others begin.
_ONE_WAY = ('broadcast',)

Span = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class ClockOffset:
  """How far a clock is ahead of a reference."""

  # At time 0 of the clock, and its change per unit of the clock.
  offset: float
  drift: float = 0.0
  # The largest possible error; None if unknown.
  accuracy: float | None = None
  # Number of collectives of which the offset was estimated.
  collectives: int = 0

  def ahead_by(self, time: float) -> float:
    """Returns the offset when the clock shows `time`."""
    return self.offset + self.drift * time


def estimate(
  reference: Mapping[Hashable, Span], other: Mapping[Hashable, Span]
) -> ClockOffset | None:
  """Returns the offset of the other's clock; None without a common collective.

  A collective in which every rank needs data of every other cannot end anywhere
  before it has begun everywhere. With clock B ahead of clock A by d, each implies

    begin_B - end_A <= d <= end_B - begin_A

  The estimate is the middle of the interval that fits all of them, and its accuracy is
  half of the width. Clocks of two hosts drift apart by microseconds a second: if no
  single d fits, the estimate is a line over time, fitted to the ends, and the accuracy
  covers the residuals.

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
  """Returns the least and the most that may be added to `line`."""
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


def merge(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Returns one trace of one or more tasks, on the clock of the first."""
  clocks = [_align(traces[0], trace) for trace in traces]
  aligned = list(zip(traces, clocks, strict=True))
  origin = min(_start(t) - clock.ahead_by(_start(t)) for t, clock in aligned)
  events, tasks = [], []
  # New numbers, because files of two generations have tasks of the same ranks.
  for pid, (trace, clock) in enumerate(aligned):
    start = _start(trace)
    for event in trace['traceEvents']:
      event = {**event, 'pid': pid}
      if 'ts' in event:
        shown = start + event['ts']
        event['ts'] = shown - clock.ahead_by(shown) - origin
      events.append(event)
    tasks.append(
      {
        'rank': trace['otherData']['rank'],
        'clock_ahead_us': clock.ahead_by(start),
        'accuracy_us': clock.accuracy,
        'common_collectives': clock.collectives,
      }
    )
  return {
    'displayTimeUnit': 'ms',
    'otherData': {**traces[0]['otherData'], 'tasks': tasks},
    'traceEvents': events,
  }


def _align(reference, trace) -> ClockOffset:
  if trace is reference:
    return ClockOffset(0.0, 0.0, 0.0)
  found = estimate(_collectives(reference), _collectives(trace))
  if found is not None:
    return found
  about, ours = trace['otherData'], reference['otherData']
  # What both clocks show at one moment of the wall clock.
  apart = about['origin_unix_seconds'] - ours['origin_unix_seconds']
  ahead = _start(trace) - _start(reference) - apart * 1e6
  return ClockOffset(ahead)


def _start(trace) -> float:
  """Returns the origin of a trace by its own clock, in microseconds."""
  return trace['otherData']['origin_ns'] / 1e3


def _collectives(trace) -> dict[tuple[int, int], Span]:
  start = _start(trace)
  spans = {}
  for event in trace['traceEvents']:
    about = event['args']
    if event.get('cat') != recorder.COMMUNICATION or about.get('failed'):
      continue
    if about.get('sequence') and about['kind'] not in _ONE_WAY:
      begin = start + event['ts']
      key = (about['generation'], about['sequence'])
      spans[key] = (begin, begin + event['dur'])
  return spans


def load(path: str) -> dict[str, Any]:
  """Reads a timeline.

  Raises:
    DataError: it is missing, damaged, or not a timeline.
  """
  try:
    with open(path, encoding='utf-8') as f:
      trace = json.load(f)
    trace['otherData']['origin_ns'], trace['otherData']['rank']
    trace['traceEvents'][0]['ph']
  except (OSError, ValueError, KeyError, TypeError, IndexError) as e:
    raise errors.DataError(
      'Expected a file written by --timeline or '
      f'tfs.MonitorCallback(timeline=...), got {path!r} ({type(e).__name__}: '
      f'{e}). Fix: pass such files only.'
    ) from e
  return trace


def _run(values: flags.FlagValues, paths: list[str]) -> int:
  if not paths:
    raise flags.Error('no file: expected one of each task')
  if values.output is None:
    raise flags.Error('no --output')
  try:
    merged = merge([load(path) for path in paths])
  except errors.Error as e:
    print(e, file=sys.stderr)
    return 1
  timeline.write(merged, values.output)
  for path, task in zip(paths, merged['otherData']['tasks'], strict=True):
    print(_describe(os.path.basename(path), task))
  return 0


def main(argv: Sequence[str]) -> int:
  """Merges the files that `argv` names, and prints the accuracy."""
  words = 'run-0.json run-1.json ...'
  return command_line.main(argv, __doc__, _FLAGS, _run, words)


def _describe(name: str, task) -> str:
  if task['accuracy_us'] is None:
    how = 'by the wall clock: no collective in common with the first file'
  elif not task['common_collectives']:
    how = 'the clock of all'
  else:
    how = (
      f'within {task["accuracy_us"]:.1f} us, from '
      f'{task["common_collectives"]:,} collectives'
    )
  ahead = task['clock_ahead_us']
  return f'rank {task["rank"]} ({name}): ahead by {ahead:,.1f} us, {how}'
