"""Runs the tasks of a host until the job is over, and leaves none behind.

One thread polls the output of tasks, their reapers, signals, the reader of our own
output, the launchers of other hosts and the clock. It never blocks on one of them.

With several hosts each launcher hears of the end of every task, and decides as the
others do.

`Supervisor` decides by these events:

| event | the supervisor |
|---|---|
| a task fails, and restarts are left | starts it again, unless a training task has ended with 0 |
| a task fails | ends all tasks: the job has failed |
| a task of an elastic job fails | goes on without it |
| it fails after it has trained | goes on, but the job has failed: its results may be lost |
| the last training task ends | ends servers and evaluator |
| a training task of an elastic job ends with 0 | ends those that train alone, after the grace period |
| a signal arrives, or nobody reads our output | ends all tasks; a second signal kills them |
| another host is lost | as for a task that fails |
| a signal ends another host, and with it the job | ends all tasks |

Example:

  >>> from tf_strategies.launch import supervisor
  >>> supervisor.LaunchOptions(max_restarts=2).grace_period
  10.0
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import selectors
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tf_strategies import errors, option_checks
from tf_strategies.cluster import command_line, exit_codes, launcher_note
from tf_strategies.launch import output, process, reaper, tasks

if TYPE_CHECKING:
  from tf_strategies.launch import nodes

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# With more pending output the tasks wait until somebody reads it.
_MOST_PENDING = 1 << 20
_POLL_SECONDS = 0.2
# Statuses of success, of a wrong command line, and of a command that cannot be run.
# With 1, which Python gives every error, another attempt may help.
_NEVER_RESTARTED = (0, 2, 126, 127)


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
  """How tasks are supervised; the fields are flags.

  The last lines of a task that failed first appear whatever `rank_filter` says.
  """

  max_restarts: int = command_line.option(
    'How often to restart each failed task, with the same TF_CONFIG, while the '
    'others continue. After a training task has succeeded, none is restarted.',
    0,
  )
  grace_period: float = command_line.option(
    'Seconds between SIGTERM and SIGKILL when the launcher ends a task.', 10.0
  )
  log_dir: str | None = command_line.option(
    'Directory for the output of each task, such as worker_0.log.'
  )
  rank_filter: str | None = command_line.option(
    'Show the output of these tasks only, such as chief,worker:0. Default: all. '
    'Files in --log_dir have the output of all tasks.'
  )
  dry_run: bool = command_line.option(
    'Print the commands, and start nothing.', False
  )

  def __post_init__(self):
    option_checks.check_int('--max_restarts', self.max_restarts, 0)
    option_checks.check_seconds(
      '--grace_period', self.grace_period, or_zero=True
    )


@dataclasses.dataclass
class _Part:
  """A task, with its present attempt if it is one of this host; or another host.

  Attributes:
    shown: name in messages, with the host if that is another one: 'worker 1', or
      'node 1 (host)'.
    spec: the task; None for a host.
    lines: output of a task of this host.
    process: the attempt, until nothing is left of it.
    attempt: the number of restarts.
    has_trained: whether a task has trained to the end, in an elastic job.
    status: set at the end, when a task is not started again.
    why: how it ended, in words.
  """

  shown: str
  spec: tasks.TaskSpec | None = None
  lines: output.TaskOutput | None = None
  process: process.TaskProcess | None = None
  attempt: int = 0
  has_trained: bool = False
  status: int | None = None
  why: str = ''

  @property
  def is_training(self) -> bool:
    """Returns whether the training needs it."""
    return self.spec is None or self.spec.is_training

  def end(self, status: int, why: str = '') -> None:
    """Notes the end."""
    self.status, self.why = status, why or output.ending(status)


class Supervisor:
  """Runs a host's part of a job, in the main thread of a process without children.

  Args:
    specs: the tasks of all hosts.
    options: the launcher's flags.
    launchers: the launchers of the job's other hosts, if there are any.

  Raises:
    UnsupportedOptionError: `options.log_dir` cannot be written, or
      `options.rank_filter` names a task that the job does not have.
  """

  def __init__(
    self,
    specs: Sequence[tasks.TaskSpec],
    options: LaunchOptions,
    launchers: nodes.Launchers | None = None,
  ):
    self._options = options
    self._launchers = launchers
    self._out, self._err = output.OutputQueue(1), output.OutputQueue(2)
    self._shown = {spec.name for spec in specs}
    if options.rank_filter is not None:
      self._shown = tasks.filtered(specs, options.rank_filter)
    self._tasks = [self._make_task(spec) for spec in specs]
    # Whether a task has said so, here or on another host.
    self._is_elastic = False
    # When tasks of an elastic job that still train are ended.
    self._late_at = math.inf
    self._is_stopping = False
    self._signal: int | None = None
    # What the job failed with.
    self._first: _Part | None = None
    # Tasks and hosts that an elastic job goes on without.
    self._lost: list[_Part] = []

  def run(self) -> int:
    """Starts the tasks and waits for the end of the job.

    Returns:
      0 if the job has ended well; else the status of the task that failed first
      (128 + N if signal N killed it), or 128 + N if signal N ended the job.

    Raises:
      OSError: no process can be started; those that were are ended.
    """
    reaper.adopt_orphans()
    self._inbox = reaper.Inbox(_FORWARDED)
    with launcher_note.Note() as self._note:
      try:
        for task in self._own():
          self._start(task)
        while self._running() or not self._is_stopping:
          self._poll()
          self._step()
        # Somebody may have killed a reaper.
        reaper.signal_below(os.getpid(), signal.SIGKILL)
        self._report()
        while self._out.pending or self._err.pending:
          self._poll()
          if self._inbox.read():
            break  # Our reader does not read.
      finally:
        # Without its channel a reaper ends its task: none outlives an error.
        for task in self._own():
          if task.process is not None:
            task.process.close()
          task.lines.close()
    status = self._first.status if self._first else -(self._signal or 0)
    return status if status >= 0 else 128 - status

  def _make_task(self, spec: tasks.TaskSpec) -> _Part:
    if self._launchers is not None and spec.node != self._launchers.rank:
      return _Part(f'{spec.name} on {self._node(spec.node)}', spec)
    return _Part(spec.name, spec, self._make_output(spec))

  def _make_output(self, spec: tasks.TaskSpec) -> output.TaskOutput:
    log = None
    if self._options.log_dir:
      name = f'{spec.name.replace(" ", "_")}.log'
      try:
        os.makedirs(self._options.log_dir, exist_ok=True)
        path = pathlib.Path(self._options.log_dir, name)
        log = open(path, 'wb', buffering=0)  # noqa: SIM115
      except OSError as e:
        raise errors.UnsupportedOptionError(
          f'--log_dir={self._options.log_dir} ({e.strerror})',
          'a directory that can be written or created',
          'pass a directory of your own, such as --log_dir=logs',
        ) from e
    is_shown = spec.name in self._shown
    write = self._out.write if is_shown else lambda line: None
    return output.TaskOutput(f'[{spec.name}] '.encode(), write, log)

  def _start(self, task: _Part) -> None:
    environment = tasks.full_environment(task.spec, os.environ, task.attempt)
    note = self._note.variable(task.spec.name)
    task.lines.begin(environment['TF_CPP_MIN_LOG_LEVEL'] > '0')
    task.process = process.TaskProcess(
      task.spec.command,
      {**environment, launcher_note.VARIABLE: note},
      self._options.grace_period,
      task.lines,
    )

  def _running(self) -> list[_Part]:
    return [task for task in self._tasks if task.process is not None]

  def _own(self) -> list[_Part]:
    """Returns the tasks of this host."""
    return [task for task in self._tasks if task.lines is not None]

  def _training(self) -> list[_Part]:
    """Returns the training tasks of all hosts that have not ended."""
    return [t for t in self._tasks if t.is_training and t.status is None]

  @property
  def _has_ended_well(self) -> bool:
    """Returns whether a training task has ended with 0."""
    return any(t.is_training and t.status == 0 for t in self._tasks)

  def _node(self, node: int) -> str:
    return f'node {node} ({self._launchers.hosts[node].host})'

  def _tell(self, *event) -> None:
    """Tells the other hosts of an event: see `_hear`."""
    if self._launchers is not None:
      self._launchers.tell(*event)

  def _poll(self) -> None:
    """Waits for whatever comes first, and lets it be read or written."""
    # Unlike the default one it takes regular files too.
    selector = selectors.PollSelector()
    selector.register(self._inbox, selectors.EVENT_READ, lambda: None)
    for sink in (self._out, self._err):
      if sink.pending:
        selector.register(sink.fd, selectors.EVENT_WRITE, sink.flush_some)
    for task in self._running():
      running = task.process
      channel, pipe = running.channel, running.output
      selector.register(channel, selectors.EVENT_READ, running.read_channel)
      if not pipe.closed and self._out.pending < _MOST_PENDING:
        selector.register(pipe, selectors.EVENT_READ, running.read_output)
    for key, _ in selector.select(_POLL_SECONDS):
      key.data()

  def _step(self) -> None:
    """Follows all that has happened."""
    for number in self._inbox.read():
      self._on_signal(number)
    if self._signal is None and not output.is_read(self._out.fd):
      self._on_signal(signal.SIGPIPE)
    self._read_note()
    over = [task for task in self._running() if task.process.is_gone]
    # The reapers' clock tells who was first, whatever the order of hearing.
    for task in sorted(over, key=_ended_at):
      self._on_over(task)
    while self._launchers and self._launchers.events and not self._is_stopping:
      self._hear(*self._launchers.events.popleft())
    if not self._is_stopping:
      if not self._training():
        self._on_training_over()
      elif time.monotonic() >= self._late_at:
        self._late_at = math.inf
        self._end_late()

  def _read_note(self) -> None:
    for word, name in self._note.read():
      self._is_elastic = True
      for task in self._tasks:
        if task.spec.name == name:
          task.has_trained = word == launcher_note.TRAINED
          if task.lines is not None:  # One of this host.
            self._tell('said', word, name)

  def _on_over(self, task: _Part) -> None:
    """Handles the end of an attempt. No process is left: its ports are free."""
    status = task.process.status
    is_late = task.is_training and self._has_ended_well
    if self._is_stopping:
      task.end(status)
    elif (
      status not in _NEVER_RESTARTED
      and task.attempt < self._options.max_restarts
      and not is_late
      and not task.has_trained
    ):
      task.attempt += 1
      self._say(
        f'{task.shown}: {output.ending(status)}. Starting it again '
        f'({task.attempt} of {self._options.max_restarts}).'
      )
      self._start(task)
      return
    else:
      self._tell('end', task.spec.name, status)
      self._on_end(task, status)
    task.process = None

  def _on_end(self, part: _Part, status: int, why: str = '') -> None:
    """Follows the end of a task on any host, for good or bad, or of another host."""
    is_first = part.is_training and not self._has_ended_well
    part.end(status, why)
    if status == 0:
      if is_first and self._is_elastic:
        self._late_at = time.monotonic() + self._options.grace_period
    elif self._is_elastic:
      self._lose(part)
    else:
      # Processes of a task that failed before may be about to end.
      ending = [task for task in self._running() if task.process.status]
      first = min(ending, key=_ended_at, default=part)
      if first is not part:
        first.end(first.process.status)
      self._fail(first)

  def _lose(self, part: _Part) -> None:
    """Goes on without a task, or another host, of an elastic job."""
    self._lost.append(part)
    self._say(
      f'{part.shown} is lost: {part.why}. The job is elastic: the others go on.'
    )
    if part.has_trained:
      self._first = self._first or part

  def _on_training_over(self) -> None:
    """Ends servers and evaluator."""
    lost = self._lost_training()
    if lost and not self._has_ended_well:
      # Nobody is left of an elastic job.
      self._first = self._first or lost[0]
    self._stop(signal.SIGTERM)

  def _end_late(self) -> None:
    """Ends tasks that were lost, came back, and would repeat the training alone."""
    for task in self._training():
      # The launcher of another host ends its own.
      if task.process and not task.has_trained:
        self._say(
          f'{task.spec.name} still runs, though the training has ended: alone it '
          f'would train from the beginning. Ending it {self._how_it_ends()}.'
        )
        task.process.send(signal.SIGTERM)

  def _lost_training(self) -> list[_Part]:
    return [part for part in self._lost if part.is_training]

  def _hear(self, node: int, what: str, *said) -> None:
    """Follows an event of another host.

    Args:
      node: number of the host.
      what: 'said' of a word of a task, 'end' of a task that is not started again,
        'signal' that ends the job, or 'lost', the host's last event.
      *said: word and name of the task; its name and status; the signal.
    """
    host = _Part(self._node(node))
    if what == 'said':
      self._note.pass_on(*said)
      self._read_note()
    elif what == 'end':
      name, status = said
      [task] = [t for t in self._tasks if t.spec.name == name]
      self._on_end(task, status)
    elif what == 'signal':
      host.end(-said[0])
      self._fail(host)
    else:
      theirs = [t for t in self._tasks if t.spec.node == node]
      left = [t for t in theirs if t.status is None]
      is_needed = left and self._training()
      status = exit_codes.RESTARTABLE_EXIT_CODE
      for task in left:
        task.status = status
      if is_needed:
        why = 'its launcher is gone, or the network to it is cut'
        self._on_end(host, status, why)

  def _fail(self, part: _Part) -> None:
    self._first = part
    self._say(
      f'{part.shown} failed: {part.why}. Ending the other tasks '
      f'{self._how_it_ends()}.'
    )
    self._stop(signal.SIGTERM)

  def _on_signal(self, number: int) -> None:
    if self._signal is not None:
      self._say('A second signal: SIGKILL.')
      self._stop(signal.SIGKILL)
      return
    self._signal = number
    for task in self._own():
      task.lines.hides_tracebacks = number == signal.SIGINT
    # Of an elastic job a signal ends this host's part, as where the host is needed
    # for something else. Ctrl-C ends all.
    if number == signal.SIGINT or not self._is_elastic:
      self._tell('signal', number)
    self._say(
      f'{signal.Signals(number).name}: ending all tasks (after '
      f'{self._options.grace_period:g} s SIGKILL).'
    )
    # Tasks do not get SIGPIPE for the launcher's reader.
    self._stop(signal.SIGTERM if number == signal.SIGPIPE else number)

  def _stop(self, number: int) -> None:
    """Ends all tasks; their reapers see to the grace period."""
    if self._is_stopping and number == signal.SIGTERM:
      return  # A second one would end a task that is saving.
    self._is_stopping = True
    for task in self._running():
      task.process.send(number)

  def _how_it_ends(self) -> str:
    return f'(SIGTERM, after {self._options.grace_period:g} s SIGKILL)'

  def _say(self, text: str) -> None:
    self._err.write(f'[launch] {text}\n'.encode())

  def _report(self) -> None:
    """Says which tasks failed, with their last lines."""
    if self._first is not None:
      self._show_end(self._first, 'failed first')
    if self._first is not None or self._signal is not None:
      return
    lost = [part.shown for part in self._lost_training()]
    if lost:
      self._say(f'The training has ended well without {", ".join(lost)}.')
    for part in self._lost:
      self._show_end(part, 'was lost')

  def _show_end(self, task: _Part, what: str) -> None:
    """Shows the last lines of a task of this host."""
    if task.lines is None:
      return
    again = f' (restarts: {task.attempt})' if task.attempt else ''
    tail = task.lines.tail()
    words = 'Its last lines:' if tail else 'It wrote nothing.'
    self._say(f'{task.shown} {what}: {task.why}{again}. {words}')
    for line in tail:
      self._err.write(b'  ' + line + b'\n')


def _ended_at(task: _Part) -> int:
  """Returns when the command of a task of this host ended, by the clock of reapers."""
  return task.process.ended_at
