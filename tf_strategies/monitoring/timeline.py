"""A run as a Chrome trace: open it in Perfetto or chrome://tracing.

Each task is a process of the trace with three lanes:

* `step`: steps, and inside of each the input, the compute and the waits for
  collectives, as `step_breakdown` divides them.
* `collectives`: each bucket of gradients, and every other collective, with the
  bytes, the sequence number and the tensors.
* `other`: input and waits outside steps, and custom spans (`recorder.span`).

Times are microseconds from `otherData.origin_ns`, of the task's own clock.

Example:

  >>> from tf_strategies.monitoring import recorder, timeline
  >>> events = [recorder.Event('step 1', 'step', 5000, 9000, 1, 1, {})]
  >>> trace = timeline.build(events, rank=0, world_size=1)
  >>> [(e['name'], e['ts'], e['dur']) for e in trace['traceEvents']
  ...   if e['ph'] == 'X']
  [('step 1', 0.0, 4.0), ('compute', 0.0, 4.0)]
"""

import json
import os
import time
from collections.abc import Iterable
from typing import Any

from tf_strategies.monitoring import recorder, step_breakdown

LANES = ('step', 'collectives', 'other')
_IN_STEP = (recorder.INPUT, recorder.WAIT)


def build(
  events: Iterable[recorder.Event], rank: int, world_size: int
) -> dict[str, Any]:
  """Returns the trace of one task.

  Args:
    events: of the recorder, steps among them.
    rank: of the task.
    world_size: number of tasks.
  """
  events = list(events)
  origin = min((e.begin_ns for e in events), default=recorder.now())
  trace: list[dict[str, Any]] = []

  def name(what, lane, text):
    args = {'name': text}
    trace.append(
      {'ph': 'M', 'name': what, 'pid': rank, 'tid': lane, 'args': args}
    )

  def add(lane, name, category, interval, args):
    """Adds an event of a lane; `interval` is in nanoseconds."""
    begin, end = interval
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

  name('process_name', 0, f'rank {rank}')
  for number, lane in enumerate(LANES):
    name('thread_name', number, lane)
  by_step: dict[int, list[recorder.Event]] = {}
  for event in events:
    by_step.setdefault(event.step, []).append(event)
  steps = [e for e in events if e.category == recorder.STEP]
  for step in steps:
    _add_step(add, step, by_step[step.step])
  _add_events(add, events, steps)
  return {
    'displayTimeUnit': 'ms',
    'otherData': {
      'rank': rank,
      'world_size': world_size,
      'origin_ns': origin,
      # Where two tasks have no collective in common.
      'origin_unix_seconds': time.time() - (recorder.now() - origin) / 1e9,
    },
    'traceEvents': trace,
  }


def path_of(path: str, rank: int, generation: int) -> str:
  """Returns the file of a task: its rank is inserted into the name.

  Example:

    >>> path_of('run.json', rank=1, generation=1)
    'run-1.json'
    >>> path_of('run.{rank}.json', rank=1, generation=2)
    'run.1-generation-2.json'
  """
  which = f'{rank}-generation-{generation}' if generation > 1 else f'{rank}'
  if '{rank}' in path:
    return path.replace('{rank}', which)
  root, extension = os.path.splitext(path)
  return f'{root}-{which}{extension}'


def write(trace: dict[str, Any], path: str) -> None:
  """Writes a trace atomically."""
  os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
  with open(f'{path}.new', 'w', encoding='utf-8') as f:
    json.dump(trace, f)
  os.replace(f'{path}.new', path)


def _add_step(add, step, events):
  whole = (step.begin_ns, step.end_ns)
  about = {'step': step.step}
  found = step_breakdown.break_down(whole, events)
  add('step', step.name, recorder.STEP, whole, {**step.args, **about})
  parts = [('input', recorder.INPUT, i) for i in found.input]
  parts += [('wait for collectives', recorder.WAIT, i) for i in found.wait]
  parts += [('compute', 'compute', i) for i in found.compute]
  for name, category, interval in sorted(parts, key=lambda part: part[2]):
    add('step', name, category, interval, about)


def _add_events(add, events, steps):
  """Adds everything that is not part of a step."""
  ends = {step.step: (step.begin_ns, step.end_ns) for step in steps}
  for event in sorted(events, key=lambda e: e.begin_ns):
    args = {**event.args, 'step': event.step}
    lane = 'other'
    if event.category == recorder.COMMUNICATION:
      lane = 'collectives'
      # In the unit of the trace.
      handed = args.pop('handed_ns', event.begin_ns)
      args['waited_in_queue_us'] = (event.begin_ns - handed) / 1e3
    elif event.category in _IN_STEP:
      begin, end = ends.get(event.step, (0, 0))
      if event.end_ns >= begin and event.begin_ns <= end:
        continue
      # Of an evaluation, for example.
    elif event.category == recorder.STEP:
      continue
    interval = (event.begin_ns, event.end_ns)
    add(lane, event.name, event.category, interval, args)
