"""A run as a Chrome trace: open it in Perfetto or chrome://tracing.

Each task is a process of the trace with three lanes:

* `step`: each step.
* `collectives`: each bucket of gradients, and every other collective, with the
  bytes, the sequence number and the tensors.
* `other`: waits for input and for collectives, and custom spans (`recorder.span`).

Times are microseconds since the first event, by the task's own clock.

Example:

  >>> from tf_strategies.monitoring import recorder, timeline
  >>> events = [recorder.Event('step 1', 'step', 5000, 9000, {})]
  >>> trace = timeline.build(events, rank=0)
  >>> [(e['name'], e['ts'], e['dur']) for e in trace['traceEvents']
  ...   if e['ph'] == 'X']
  [('step 1', 0.0, 4.0)]
"""

import json
import os
from collections.abc import Iterable
from typing import Any

from tf_strategies.monitoring import recorder

LANES = ('step', 'collectives', 'other')
_LANE_OF = {recorder.STEP: 'step', recorder.COMMUNICATION: 'collectives'}


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
  for event in events:
    args = dict(event.args)
    if event.category == recorder.COMMUNICATION:
      # In the unit of the trace.
      handed = args.pop('handed_ns', event.begin_ns)
      args['waited_in_queue_us'] = (event.begin_ns - handed) / 1e3
    trace.append(
      {
        'ph': 'X',
        'name': event.name,
        'cat': event.category,
        'pid': rank,
        'tid': LANES.index(_LANE_OF.get(event.category, 'other')),
        'ts': (event.begin_ns - origin) / 1e3,
        'dur': (event.end_ns - event.begin_ns) / 1e3,
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
