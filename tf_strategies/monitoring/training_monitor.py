"""`TrainingMonitor`: measures the steps of a training loop.

`tfs.MonitorCallback` calls it from Keras's `fit`; a custom loop calls it itself:

  monitor = tfs.monitoring.TrainingMonitor(
    tfs.monitoring.MonitorOptions(log_dir='logs', timeline='run.json')
  )                              # before data sets are distributed
  monitor.start(strategy)
  iterator = iter(batches)
  for _ in range(steps):
    with monitor.step():         # with next() in it: input is measured there
      train_step(next(iterator))
  monitor.close()
"""

import atexit
import contextlib
import dataclasses
import importlib.util
import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import logging

from tf_strategies import errors, option_checks
from tf_strategies.monitoring import (
  recorder,
  step_breakdown,
  step_metrics,
  timeline,
)

# A summary costs as much as a small step.
_SUMMARY_SECONDS = 1.0
_SUMMARIES = (
  'step_seconds',
  'examples_per_second',
  'global_examples_per_second',
  'communication_share',
  'exposed_communication_share',
  'input_share',
  'compute_share',
  'bytes_sent',
  'rss_bytes',
)
# In logs of Keras, whose bar has little room.
_LOGS = {
  'examples/s': 'global_examples_per_second',
  'communication': 'communication_share',
}


@option_checks.has_options
@dataclasses.dataclass(frozen=True)
class MonitorOptions:
  """What is measured, and where it is written. Without a path, nothing is.

  Example:

    >>> MonitorOptions(timeline='run.json').path('timeline', rank=1)
    'run-1.json'

  Attributes:
    log_dir: directory for metrics and TensorBoard; the names of each task's
      files have its rank.
    metrics_jsonl: file for the metrics, instead of one in `log_dir`.
    timeline: file for a Chrome trace of each task. The rank is inserted into
      this name and that of the metrics, at '{rank}' or before the extension.
    profile_steps: (first, last) steps of this run, from 1, that TensorFlow's
      profiler records into `log_dir`. Of a call of several steps, the first
      must be among them.
    metrics_every_steps: steps per line of the metrics.
    progress_seconds: between two lines of progress, on the chief; 0 for none.
    global_batch_size: rows of a step, for rates where the input is not visible.
    timeline_events: how many of the newest are kept, at half a kilobyte each.

  Raises:
    UnsupportedOptionError: a value out of range.
  """

  log_dir: str | None = None
  metrics_jsonl: str | None = None
  timeline: str | None = None
  profile_steps: tuple[int, int] | None = None
  metrics_every_steps: int = 1
  progress_seconds: float = 10.0
  global_batch_size: int | None = None
  timeline_events: int = 100_000

  def __post_init__(self):
    for name in ('log_dir', 'metrics_jsonl', 'timeline'):
      path = getattr(self, name)
      if path is not None:
        option_checks.check_path(name, path, f"write {name}='logs'")
        option_checks.check_local(name, path)
        object.__setattr__(self, name, os.fspath(path))
    option_checks.check_seconds(
      'progress_seconds',
      self.progress_seconds,
      or_zero=True,
      fix='write progress_seconds=0 for none',
    )
    for name in ('metrics_every_steps', 'timeline_events'):
      option_checks.check_int(name, getattr(self, name), 1)
    if self.global_batch_size is not None:
      option_checks.check_int('global_batch_size', self.global_batch_size, 1)
    option_checks.keep_plain(self)
    if self.profile_steps is None:
      return
    given = self.profile_steps
    steps = tuple(given) if isinstance(given, list | tuple) else ()
    option_checks.check(
      len(steps) == 2
      and all(map(option_checks.is_int, steps))
      and 1 <= steps[0] <= steps[1],
      f'profile_steps={self.profile_steps!r}',
      'the first step and the last, from 1',
      'write profile_steps=(10, 20)',
    )
    option_checks.check(
      self.log_dir is not None,
      'profile_steps without log_dir',
      'both',
      "write log_dir='logs'",
    )
    object.__setattr__(self, 'profile_steps', steps)

  def path(self, kind: str, rank: int, generation: int = 1) -> str | None:
    """The path of a task's file; None if it is not written.

    Args:
      kind: 'metrics', 'timeline' or 'tensorboard'.
      rank: of the task.
      generation: of its group: each has its own timeline; lines are appended.
    """
    name = {
      'metrics': f'metrics-{rank}.jsonl',
      'tensorboard': f'rank-{rank}',
    }.get(kind)
    which = str(rank)
    path = {'timeline': self.timeline, 'metrics': self.metrics_jsonl}.get(kind)
    if kind == 'timeline' and generation > 1:
      which += f'-generation-{generation}'
    if path is None and name is not None and self.log_dir is not None:
      return os.path.join(self.log_dir, name)
    if path is None:
      return None
    if '{rank}' in path:
      return path.replace('{rank}', which)
    root, extension = os.path.splitext(path)
    return f'{root}-{which}{extension}'


@option_checks.has_options
class TrainingMonitor:
  """Measures the steps of one run.

  Turns the recorder on: create it before data sets are distributed, or the time
  in `next()` is not measured. One at a time: a new one closes the previous.

  Attributes:
    options: what is measured.
  """

  _running: 'TrainingMonitor | None' = None

  def __init__(self, options: MonitorOptions | None = None):
    if options is None:
      options = MonitorOptions()
    option_checks.check_type(
      *('options', options, MonitorOptions, 'MonitorOptions'),
      "write for instance MonitorOptions(log_dir='logs')",
    )
    if TrainingMonitor._running is not None:
      TrainingMonitor._running.close()
    self.options = options
    # What the running step has recorded.
    self._events: list[recorder.Event] = []
    self._log = timeline.Log(self.options.timeline_events)
    self._listening = contextlib.ExitStack()
    self._listening.enter_context(recorder.listening(self))
    if self.options.timeline is not None:
      self._listening.enter_context(recorder.listening(self._log))
    self._strategy = self._group = None
    self._json = self._summaries = None
    self._rank, self._world_size, self._generation = 0, 1, 1
    self._is_started = self._is_closed = False
    self._steps = self._first_step = 0
    self._began: int | None = None
    # None before it, True while the profiler records, False after it.
    self._profiles: bool | None = None
    self._is_first_line = True
    atexit.register(self.close)
    TrainingMonitor._running = self

  def append(self, event: recorder.Event) -> None:
    """Takes an event of the recorder."""
    if self._began is not None:
      self._events.append(event)

  def start(self, strategy: Any = None, first_step: int = 0) -> None:
    """Starts the measurement of a run.

    Args:
      strategy: that trains. If it has a `process_group`, bytes are counted.
      first_step: steps completed before this run.
    """
    option_checks.check_int('first_step', first_step, 0)
    if self._is_started or self._is_closed:
      return
    self._is_started = True
    self._first_step, self._strategy = int(first_step), strategy
    self._told = time.monotonic()
    self._open()

  def _open(self) -> None:
    """Opens the files of a group, or of a process that is in none."""
    self._group = getattr(self._strategy, 'process_group', None)
    self._rank = getattr(self._strategy, 'rank', 0)
    self._world_size = getattr(self._strategy, 'num_workers', 1)
    if self._group is not None:
      self._generation = self._group.generation
    path = self._path('metrics')
    if path is not None:
      os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
      # Line by line: the process may be killed before the next.
      self._json = open(path, 'a', 1, encoding='utf-8')  # noqa: SIM115
    path = self._path('tensorboard')
    if path is not None and importlib.util.find_spec('tensorboard') is not None:
      self._summaries = _Summaries(path)
    self._progress = self._make_totals()
    self._totals = self._make_totals()
    self._begin_means()

  def _flush(self) -> None:
    """Writes what is left of a group, and closes its files."""
    if self._totals.steps:
      self._write_line(self._first_step + self._steps)
    for file in (self._json, self._summaries):
      if file is not None:
        file.close()
    if self.options.timeline is not None:
      trace = timeline.build(
        self._log.events, self._rank, self._world_size, self._log.forgotten
      )
      timeline.write(trace, self._path('timeline'))

  def _follow(self) -> None:
    """Goes on in another group, if the workers have changed."""
    if self._group is not getattr(self._strategy, 'process_group', None):
      self._flush()
      self._log.clear()
      self._open()

  @contextlib.contextmanager
  def step(self) -> Iterator[None]:
    """Context of one step: the call of `next()` and of what trains on it."""
    self.begin_step()
    try:
      yield
    except BaseException:
      self._began = None
      raise
    self.end_step()

  def begin_step(self) -> None:
    """Starts a step."""
    if not self._is_started or self._is_closed:
      return
    number = self._first_step + self._steps + 1
    recorder.set_step(number)
    first, last = self.options.profile_steps or (0, 0)
    if first <= self._steps + 1 <= last and self._profiles is None:
      import tensorflow as tf

      self._profiles = True
      tf.profiler.experimental.start(self._path('tensorboard'))
    self._events.clear()
    self._began = recorder.now()

  def end_step(self, num_steps: int = 1) -> None:
    """Ends a step, or a call of several steps."""
    if self._began is None:
      return
    whole = (self._began, recorder.now())
    self._began = None
    self._follow()
    self._steps += num_steps
    number = self._first_step + self._steps
    recorder.add(
      f'step {number}' if num_steps == 1 else f'{num_steps} steps to {number}',
      recorder.STEP,
      *whole,
      steps=num_steps,
    )
    if self._profiles and self._steps >= self.options.profile_steps[1]:
      self._stop_profile()
    found = step_breakdown.break_down(whole, self._events)
    self._totals.add(found, num_steps)
    if self._steps > num_steps:
      self._progress.add(found, num_steps)
      self._epoch.add(found, num_steps)
    else:  # The first step traces the graph.
      self._progress = self._make_totals()
      self._begin_means()
    self._tell(number)

  def begin_epoch(self) -> None:
    """Begins the averages of `epoch_logs`."""
    if self._is_started and not self._is_closed:
      self._begin_means()

  def _begin_means(self) -> None:
    self._epoch, self._epoch_began = self._make_totals(), time.monotonic()

  def epoch_logs(self) -> dict[str, float]:
    """What is known of the epoch's steps, by names for people.

    The first step of the run, which traces the graph, is left out. Time between
    steps counts: a worker whose callbacks are slow has the others wait in steps.
    """
    if not self._is_started or self._is_closed or not self._epoch.steps:
      return {}
    rates = self._epoch.rates(time.monotonic() - self._epoch_began)
    found = {name: rates[key] for name, key in _LOGS.items()}
    return {name: each for name, each in found.items() if each is not None}

  def close(self) -> None:
    """Writes the rest and turns the recorder off; idempotent."""
    if self._is_closed:
      return
    self._is_closed = True
    atexit.unregister(self.close)
    self._listening.close()
    if TrainingMonitor._running is self:
      TrainingMonitor._running = None
    if self._profiles:
      self._stop_profile()
    elif self.options.profile_steps and self._profiles is None:
      logging.warning(
        'profile_steps=%s: no profile. This run did %d steps, and no call of '
        'them began there.',
        self.options.profile_steps,
        self._steps,
      )
    if self._is_started:
      self._flush()

  def _path(self, kind: str) -> str | None:
    return self.options.path(kind, self._rank, self._generation)

  def _make_totals(self) -> step_metrics.Totals:
    return step_metrics.Totals(
      self._world_size, self.options.global_batch_size, self._group
    )

  def _tell(self, number: int) -> None:
    if self._totals.steps >= self.options.metrics_every_steps:
      self._write_line(number)
    seconds = self.options.progress_seconds
    due = seconds and time.monotonic() - self._told >= seconds
    if self._rank == 0 and due and self._progress.steps:
      self._told = time.monotonic()
      line = step_metrics.progress_line(self._progress.record(number))
      print(line, flush=True)

  def _write_line(self, number: int) -> None:
    record = self._totals.record(number)
    record.update(
      rank=self._rank,
      world_size=self._world_size,
      generation=self._generation,
      includes_tracing=self._is_first_line,
    )
    self._is_first_line = False
    if self._json is not None:
      self._json.write(json.dumps(record) + '\n')
    if self._summaries is not None:
      self._summaries.write(record)

  def _stop_profile(self) -> None:
    import tensorflow as tf

    self._profiles = False
    tf.profiler.experimental.stop()


class _Summaries:
  """Scalars for TensorBoard, at most one set a second, and the last one."""

  def __init__(self, directory: str):
    # Not at the top: this room's commands need no TensorFlow.
    import tensorflow as tf

    self._tf = tf
    self._writer = tf.summary.create_file_writer(directory)
    self._written = 0.0
    self._pending: dict[str, Any] | None = None

  def write(self, record: dict[str, Any]) -> None:
    self._pending = record
    if time.monotonic() - self._written >= _SUMMARY_SECONDS:
      self._flush()

  def _flush(self) -> None:
    if self._pending is None:
      return
    record, self._pending = self._pending, None
    self._written = time.monotonic()
    with self._writer.as_default(record['step']):
      for name in _SUMMARIES:
        if record[name] is not None:
          self._tf.summary.scalar(f'monitoring/{name}', record[name])

  def close(self) -> None:
    self._flush()
    self._writer.close()


def parse_steps(text: str | Sequence[str] | None) -> tuple[int, int] | None:
  """Parses `--profile_steps=a,b`; None without it.

  Raises:
    UnsupportedOptionError: not two numbers.
  """
  if text is None or (isinstance(text, str | list | tuple) and not text):
    return None
  try:
    parts = text.split(',') if isinstance(text, str) else list(text)
    first, last = (int(part) for part in parts)
  except (TypeError, ValueError):
    raise errors.UnsupportedOptionError(
      f'profile_steps={text!r}',
      'the first step and the last',
      'write --profile_steps=10,20',
    ) from None
  return first, last
