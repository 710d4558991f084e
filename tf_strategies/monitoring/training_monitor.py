"""`TrainingMonitor`: measures the steps of a training loop.

`tfs.MonitorCallback` calls it from Keras's `fit`. A custom loop calls it itself:

  monitor = tfs.monitoring.TrainingMonitor(timeline='run.json')
                                 # before data sets are distributed
  monitor.start(strategy)
  iterator = iter(batches)
  for _ in range(steps):
    with monitor.step():         # with next() in it: input is measured there
      train_step(next(iterator))
  print(monitor.logs())          # {'examples/s': 5120.0, 'communication': 0.4}
  monitor.close()
"""

import atexit
import collections
import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

from tf_strategies import option_checks
from tf_strategies.monitoring import recorder
from tf_strategies.monitoring import timeline as timeline_lib

# At half a kilobyte each. The newest are kept.
_MAX_EVENTS = 100_000


@option_checks.has_options
class TrainingMonitor:
  """Measures the steps of one run.

  It turns the recorder on. Create it before data sets are distributed, or the time
  in `next()` is not measured. A new monitor closes the previous one.

  Example:

    >>> monitor = TrainingMonitor()
    >>> monitor.start()
    >>> for _ in range(2):
    ...   with monitor.step():
    ...     pass  # A step without input, in one process: nothing to tell.
    >>> monitor.logs()
    {}
    >>> monitor.close()

  Args:
    timeline: file for a Chrome trace of each task; None to write none. The rank is
      inserted before the extension: rank 1 writes 'run-1.json' for 'run.json'. Each
      generation of an elastic group has a file of its own.

  Raises:
    UnsupportedOptionError: `timeline` is no path of a local file.
  """

  def __init__(self, timeline: str | os.PathLike | None = None):
    if timeline is not None:
      option_checks.check_local_path(
        'timeline', timeline, "write timeline='run.json'"
      )
      timeline = os.fspath(timeline)
    if isinstance(recorder.sink, TrainingMonitor):
      recorder.sink.close()
    self._timeline = timeline
    # The events of the running step.
    self._events: list[recorder.Event] = []
    most = 0 if timeline is None else _MAX_EVENTS
    self._log: collections.deque = collections.deque(maxlen=most)
    self._is_running = False
    self._step = self._steps = self._first_step = 0
    self._began: int | None = None
    self.begin_epoch()
    atexit.register(self.close)
    recorder.listen(self)

  def append(self, event: recorder.Event) -> None:
    """Takes an event of the recorder."""
    event.args['step'] = self._step
    self._log.append(event)
    if self._began is not None:
      self._events.append(event)

  def start(self, strategy: Any = None, first_step: int = 0) -> None:
    """Starts the measurement of a run.

    Args:
      strategy: the strategy that trains.
      first_step: steps completed before this run.
    """
    option_checks.check_int('first_step', first_step, 0)
    if self._is_running or recorder.sink is not self:
      return
    self._is_running = True
    self._first_step, self._strategy = int(first_step), strategy
    self._join()

  def _join(self) -> None:
    """Reads the place of this process in its group, if it is in one."""
    self._group = getattr(self._strategy, 'process_group', None)
    self._rank = getattr(self._strategy, 'rank', 0)
    self._generation = getattr(self._group, 'generation', 1)
    self.begin_epoch()

  def _write(self) -> None:
    """Writes the timeline of a group."""
    if self._timeline is None:
      return
    trace = timeline_lib.build(self._log, self._rank)
    timeline_lib.write(
      trace,
      timeline_lib.path_of(self._timeline, self._rank, self._generation),
    )

  @contextlib.contextmanager
  def step(self) -> Iterator[None]:
    """Context of one step: the call of `next()` and of the training on its batch."""
    self.begin_step()
    try:
      yield
    except BaseException:
      self._began = None
      raise
    self.end_step()

  def begin_step(self) -> None:
    """Starts a step."""
    if not self._is_running:
      return
    self._step = self._first_step + self._steps + 1
    self._events.clear()
    self._began = recorder.now()

  def end_step(self, num_steps: int = 1) -> None:
    """Ends a step, or a call of several steps."""
    if self._began is None:
      return
    whole = (self._began, recorder.now())
    self._began = None
    if self._group is not getattr(self._strategy, 'process_group', None):
      # The workers have changed: the steps go on in another group.
      self._write()
      self._log.clear()
      self._join()
    self._steps += num_steps
    number = self._first_step + self._steps
    recorder.add(
      f'step {number}' if num_steps == 1 else f'{num_steps} steps to {number}',
      recorder.STEP,
      *whole,
      steps=num_steps,
    )
    if self._steps == num_steps:  # The first step traces the graph.
      self.begin_epoch()
      return
    self._step_ns += whole[1] - whole[0]
    self._communication_ns += _communication_ns(whole, self._events)
    rows = [
      event.args.get('all_rows')
      for event in self._events
      if event.category == recorder.INPUT
    ]
    if not rows or None in rows:
      self._rows = None
    elif self._rows is not None:
      self._rows += sum(rows)

  def begin_epoch(self) -> None:
    """Begins the averages of `logs`."""
    self._epoch_began = time.monotonic()
    self._step_ns = self._communication_ns = 0
    # None if a batch had an unknown number of rows.
    self._rows: int | None = 0

  def logs(self) -> dict[str, float]:
    """Returns the means of the epoch's steps so far, by names for people.

    `examples/s` counts the examples of all workers, in the time since the epoch
    began: a worker whose callbacks are slow has the others wait in their steps.
    `communication` is the share of the steps' time in which collectives were in
    progress, most of it hidden behind the backward pass. A value that was not
    measured is left out, and so is the first step of the run, which traces the graph.
    """
    if not self._is_running or not self._step_ns:
      return {}
    found = {}
    if self._rows is not None:
      seconds = time.monotonic() - self._epoch_began
      found['examples/s'] = self._rows / seconds
    if self._group is not None:
      found['communication'] = self._communication_ns / self._step_ns
    return found

  def close(self) -> None:
    """Writes the rest and turns the recorder off; idempotent."""
    atexit.unregister(self.close)
    if recorder.sink is self:
      recorder.listen(None)
    if self._is_running:
      self._is_running = False
      self._write()


def _communication_ns(
  whole: tuple[int, int], events: Iterable[recorder.Event]
) -> int:
  """Returns for how long collectives were in progress within `whole`."""
  total, (at, last) = 0, whole
  # A submitted collective is in progress, also while it waits for its thread.
  for begin, end in sorted(
    (event.args.get('handed_ns', event.begin_ns), event.end_ns)
    for event in events
    if event.category == recorder.COMMUNICATION
  ):
    end = min(end, last)
    total += max(0, end - max(begin, at))
    at = max(at, end)
  return total
