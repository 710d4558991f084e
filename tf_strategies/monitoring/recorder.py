"""Spans of time in this process, for one listener.

Without a listener the recorder is off, and recording costs almost nothing.

Example:

  >>> from tf_strategies.monitoring import recorder
  >>> events = []
  >>> recorder.listen(events)
  >>> with recorder.span('load', recorder.INPUT, rows=32):
  ...   pass
  >>> recorder.listen(None)
  >>> [(e.name, e.category, e.args) for e in events]
  [('load', 'input', {'rows': 32})]
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

# Categories.
STEP = 'step'
INPUT = 'input'
COMMUNICATION = 'communication'
# A step waits for a collective.
WAIT = 'wait'


class Event(NamedTuple):
  """A span of time.

  Attributes:
    name: name of what took the time.
    category: one of this module's constants, or another word.
    begin_ns: begin by the recorder's clock, `now()`.
    end_ns: end by the same clock.
    args: details, as JSON values.
  """

  name: str
  category: str
  begin_ns: int
  end_ns: int
  args: dict[str, Any]


# What takes the events, in the threads that record them, by its `append`, as a list or a
# deque can. None while the recorder is off.
sink: Any = None

# The clock of all events.
now = time.perf_counter_ns


def is_on() -> bool:
  """Returns whether anything listens; check before computing an event."""
  return sink is not None


def listen(new_sink: Any) -> None:
  """Has all further events go to one sink, or to none."""
  global sink
  sink = new_sink


def add(
  name: str, category: str, begin_ns: int, end_ns: int, **args: Any
) -> None:
  """Records a span, by times of `now()`."""
  present = sink  # Another thread may turn the recorder off.
  if present is not None:
    present.append(Event(name, category, begin_ns, end_ns, args))


@contextlib.contextmanager
def span(name: str, category: str, **args: Any) -> Iterator[None]:
  """Context that is recorded as an event, also if it raises."""
  began = now()
  try:
    yield
  finally:
    add(name, category, began, now(), **args)
