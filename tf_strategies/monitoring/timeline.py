"""A run as a Chrome trace: open it in Perfetto or chrome://tracing.

Each task is a process of the trace with three lanes:

* `step`: each step, and below it the parts that `step_breakdown` divides it into:
  input, compute and waits for collectives.
* `collectives`: each bucket of gradients, and every other collective, with the
  bytes, the sequence number and the tensors.
* `other`: input and waits outside steps, and custom spans (`recorder.span`).

Times are microseconds since the first event, by the task's own clock.

Example:

  >>> from tf_strategies.monitoring import recorder, timeline
  >>> events = [recorder.Event('step 1', 'step', 5000, 9000, 1, {})]
  >>> trace = timeline.build(events, rank=0)
  >>> [(e['name'], e['ts'], e['dur']) for e in trace['traceEvents']
  ...   if e['ph'] == 'X']
  [('step 1', 0.0, 4.0), ('compute', 0.0, 4.0)]
"""

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from tf_strategies.monitoring import recorder, step_breakdown

LANES = ('step', 'collectives', 'other')
# Of the parts of a step.
_NAMES = {
  recorder.INPUT: 'input',
  recorder.WAIT: 'wait for collectives',
  step_breakdown.COMPUTE: 'compute',
}

# Lane, name, category, interval in nanoseconds, and details.
_Span = tuple[str, str, str, step_breakdown.Interval, dict[str, Any]]


def build(events: Iterable[recorder.Event], rank: int) -> dict[str, Any]:
  """Returns the trace of one task.

  Args:
    events: events of the recorder, steps among them.
    rank: rank of the task.
  """
  events = sorted(events, key=lambda e: e.begin_ns)
  origin = events[0].begin_ns if events else 0
  names = [('process_name', 0, f'rank {rank}')]
  names += [('thread_name', i, lane) for i, lane in enumerate(LANES)]
  trace: list[dict[str, Any]] = [
    {'ph': 'M', 'name': kind, 'pid': rank, 'tid': lane, 'args': {'name': name}}
    for kind, lane, name in names
  ]
  for lane, name, category, (begin, end), args in _spans(events):
    trace.append(
      {
        'ph': 'X',
        'name': name,
        'cat': category,
        'pid': rank,
        'tid': LANES.index(lane),
        'ts': (begin - origin) / 1e3,
        'dur': (end - begin) / 1e3,
        'args': args,
      }
    )
  return {'displayTimeUnit': 'ms', 'traceEvents': trace}


def path_of(path: str, rank: int, generation: int) -> str:
  """Returns the file of a task: its rank is inserted before the extension.

  Example:

    >>> path_of('run.json', rank=1, generation=1)
    'run-1.json'
    >>> path_of('run.json', rank=1, generation=2)
    'run-1-generation-2.json'
  """
  which = f'{rank}-generation-{generation}' if generation > 1 else f'{rank}'
  root, extension = os.path.splitext(path)
  return f'{root}-{which}{extension}'


def write(trace: dict[str, Any], path: str) -> None:
  """Writes a trace atomically."""
  os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
  with open(f'{path}.new', 'w', encoding='utf-8') as f:
    json.dump(trace, f)
  os.replace(f'{path}.new', path)


def _spans(events: list[recorder.Event]) -> Iterator[_Span]:
  by_step: dict[int, list[recorder.Event]] = {}
  for event in events:
    by_step.setdefault(event.step, []).append(event)
  steps = {e.step: e for e in events if e.category == recorder.STEP}
  for event in events:
    lane, args = 'other', {**event.args, 'step': event.step}
    whole = (event.begin_ns, event.end_ns)
    step = steps.get(event.step)
    if event.category == recorder.COMMUNICATION:
      lane = 'collectives'
      # In the unit of the trace.
      handed = args.pop('handed_ns', event.begin_ns)
      args['waited_in_queue_us'] = (event.begin_ns - handed) / 1e3
    elif event.category == recorder.STEP:
      lane = 'step'
    elif (
      event.category in _NAMES
      and step
      and event.end_ns >= step.begin_ns
      and event.begin_ns <= step.end_ns
    ):
      continue  # Another one belongs to an evaluation, for example.
    yield lane, event.name, event.category, whole, args
    if lane == 'step':
      found = step_breakdown.break_down(whole, by_step[event.step])
      for kind, name in _NAMES.items():
        for part in found[kind]:
          yield lane, name, kind, part, {'step': event.step}
