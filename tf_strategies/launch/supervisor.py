"""Runs the tasks of a host until the job is over, and leaves none behind.

One thread polls the output of tasks, their reapers, signals, the reader of our own
output, the launchers of other hosts and the clock. It never blocks on one of them.

`Supervisor` decides by these events:

| event | the supervisor |
|---|---|
| a task fails, and restarts are left | starts it again, unless a training task has ended with 0 |
| a task fails | ends all tasks: the job has failed |
| a task of an elastic job fails | goes on without it |
| it fails after it has trained | goes on, but the job has failed: its results may be lost |
| a task fails before any says whether the job is elastic | waits up to 30 s for a word |
| the last training task ends | ends servers and evaluator |
| a training task of an elastic job ends with 0 | ends those that train alone, after the grace period |
| a signal arrives, or nobody reads our output | ends all tasks; a second signal kills them |
| another host fails, or is lost | as for a task that fails |

Example:

  >>> from tf_strategies.launch import supervisor
  >>> supervisor.Options(max_restarts=2).grace_period
  10.0
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import select
import signal
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from tf_strategies import errors, option_checks
from tf_strategies.cluster import exit_codes, launcher_note
from tf_strategies.launch import output, process, reaper, tasks

if TYPE_CHECKING:
  from tf_strategies.launch import nodes

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# With more pending output the tasks wait until somebody reads it.
_MOST_PENDING = 1 << 20
_POLL_MILLISECONDS = 200
# How long a failed task may wait to hear whether the job is elastic: a process
# needs 10 to 15 seconds before its first operation on a GPU.
_MOST_SECONDS_OF_DOUBT = 30.0


@dataclasses.dataclass(frozen=True)
class Options:
  """How tasks are supervised: see the launcher's flags.

  `shown` names the tasks whose lines appear on stdout; None for all. The last
  lines of a task that failed first appear in any case.
  """

  max_restarts: int = 0
  grace_period: float = 10.0
  log_dir: str | None = None
  shown: Collection[str] | None = None

  def __post_init__(self):
    option_checks.check_int('--max_restarts', self.max_restarts, 0)
    option_checks.check_seconds(
      '--grace_period', self.grace_period, or_zero=True
    )


@dataclasses.dataclass
class _Task:
  """A task and its present attempt.

  Attributes:
    spec: the task.
    lines: its output.
    process: the attempt, until nothing is left of it.
    attempt: the number of restarts.
    has_trained: whether it has trained to the end, in an elastic job.
    status: set when the task is not started again.
  """

  spec: tasks.TaskSpec
  lines: output.TaskOutput
  process: process.TaskProcess | None = None
  attempt: int = 0
  has_trained: bool = False
  status: int | None = None


@dataclasses.dataclass
class _Failure:
  """The end of a task, or of a launcher.

  Attributes:
    at: time by the clock of reapers, in nanoseconds.
    name: 'worker 1', or 'node 1'.
    shown: the name in messages, with the host.
    status: as of `_Task`.
    why: how it ended, in words.
    task: the task, if it is one of this host.
    is_here: whether this host has to tell the others.
  """

  at: int
  name: str
  shown: str
  status: int
  why: str
  task: _Task | None = None
  is_here: bool = True


def _failure_of(task: _Task) -> _Failure:
  """Returns the failure of a task whose command has ended."""
  at, status = task.process.ended_at, task.process.status
  name, shown = task.spec.name, task.spec.shown
  return _Failure(at, name, shown, status, output.ending(status), task)


class Supervisor:
  """Runs a host's part of a job, in the main thread of a process without children.

  Args:
    specs: the tasks of this host.
    options: the launcher's flags.
    launchers: the launchers of the job's other hosts, if there are any.

  Raises:
    UnsupportedOptionError: `options.log_dir` cannot be written.
  """

  def __init__(
    self,
    specs: Sequence[tasks.TaskSpec],
    options: Options,
    launchers: nodes.Launchers | None = None,
  ):
    self._options = options
    self._launchers = launchers
    self._out, self._err = output.Sink(1), output.Sink(2)
    self._tasks = [_Task(spec, self._make_output(spec)) for spec in specs]
    # What tasks have said of the job, here or on another host.
    self._kind = ''
    # Failures before a word, and when they end the job. A host that failed before
    # this one ends it, and is named.
    self._doubtful: list[_Failure] = []
    self._is_second = False
    self._doubt_ends_at = math.inf
    # Whether a training task has ended with 0, here or on another host.
    self._has_ended_well = False
    # When tasks of an elastic job that still train are ended.
    self._late_at = math.inf
    self._is_stopping = False
    self._signal: int | None = None
    # The failure that the job ends with, and whether it ends all hosts.
    self._first: _Failure | None = None
    self._ends_all = False
    # The number of training tasks of other hosts that have not ended, and whether
    # one of these hosts waits for a word.
    self._num_elsewhere, self._is_doubt_elsewhere = 0, False
    # Tasks and launchers that an elastic job goes on without.
    self._lost: list[_Failure] = []
    self._missing_nodes: set[int] = set()

  def run(self) -> int:
    """Starts the tasks and waits for the end of the job.

    Returns:
      0 if the job has ended well; else the status of the task that failed first
      (128 + N if signal N killed it), or 128 + N if signal N ended the job.

    Raises:
      OSError: no process can be started; those that were are ended.
    """
    reaper.adopt_orphans()
    with (
      launcher_note.Note() as self._note,
      reaper.Inbox(_FORWARDED) as self._inbox,
    ):
      try:
        for task in self._tasks:
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
        for task in self._tasks:
          if task.process is not None:
            task.process.close()
          task.lines.close()
    status = self._first.status if self._first else -(self._signal or 0)
    return status if status >= 0 else 128 - status

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
    shown = self._options.shown
    is_shown = shown is None or spec.name in shown
    write = self._out.write if is_shown else lambda line: None
    return output.TaskOutput(f'[{spec.name}] '.encode(), write, log)

  def _start(self, task: _Task) -> None:
    environment = tasks.full_environment(task.spec, os.environ, task.attempt)
    note = self._note.variable(task.spec.name)
    task.lines.hides_notices = environment['TF_CPP_MIN_LOG_LEVEL'] > '0'
    task.process = process.TaskProcess(
      list(task.spec.command),
      {**environment, launcher_note.VARIABLE: note},
      self._options.grace_period,
      task.lines,
    )

  def _running(self) -> list[_Task]:
    return [task for task in self._tasks if task.process is not None]

  def _training(self) -> list[_Task]:
    """Returns the training tasks that have not ended."""
    return [t for t in self._tasks if t.spec.is_training and t.status is None]

  def _poll(self) -> None:
    """Waits for whatever comes first, and lets it be read or written."""
    reactions = {}
    poller = select.poll()
    poller.register(self._inbox, select.POLLIN)
    for sink in (self._out, self._err):
      if sink.pending:
        poller.register(sink.fd, select.POLLOUT)
        reactions[sink.fd] = sink.flush_some
    for task in self._running():
      running = task.process
      poller.register(running.channel_fd, select.POLLIN)
      reactions[running.channel_fd] = running.read_channel
      if running.output_fd is not None and self._out.pending < _MOST_PENDING:
        poller.register(running.output_fd, select.POLLIN)
        reactions[running.output_fd] = running.read_output
    for fd, _ in poller.poll(_POLL_MILLISECONDS):
      reactions.get(fd, lambda: None)()

  def _step(self) -> None:
    """Follows all that has happened."""
    for number in self._inbox.read():
      self._on_signal(number)
    if self._signal is None and not output.is_read(self._out.fd):
      self._on_signal(signal.SIGPIPE)
    self._read_note()
    over = [task for task in self._running() if task.process.is_gone]
    # The reapers' clock tells who was first, whatever the order of hearing.
    for task in sorted(over, key=lambda task: task.process.ended_at):
      self._on_over(task)
    if self._launchers is not None:
      self._hear()
    if self._doubtful and not self._is_stopping:
      self._decide()
    if not self._is_stopping:
      if self._is_over() and not self._is_doubt_elsewhere:
        self._on_training_over()
      elif time.monotonic() >= self._late_at:
        self._late_at = math.inf
        self._end_late()
    is_leaving = self._signal is not None and not self._ends_all
    if self._launchers is not None and not is_leaving:
      self._tell()

  def _read_note(self) -> None:
    for word, name in self._note.read():
      for task in self._tasks:
        if task.spec.name == name and word != launcher_note.FIXED:
          task.has_trained = word == launcher_note.TRAINED
      if word == launcher_note.TRAINED:
        word = launcher_note.ELASTIC
      self._set_kind(word)

  @property
  def _is_elastic(self) -> bool:
    return self._kind == launcher_note.ELASTIC

  def _set_kind(self, kind: str) -> None:
    # A program may use a fixed strategy too, before it trains elastically.
    if kind and kind != self._kind and not self._is_elastic:
      self._kind = kind
      # With --hostfile this launcher is a task of another one.
      launcher_note.say(kind)

  def _on_over(self, task: _Task) -> None:
    """Handles the end of an attempt. No process is left: its ports are free."""
    status = task.process.status
    failure = _failure_of(task)
    is_late = task.spec.is_training and self._has_ended_well
    can_restart = task.attempt < self._options.max_restarts
    if self._is_stopping:
      task.status = status
    elif status == 0:
      task.status = 0
      if task.spec.is_training:
        self._on_good_end()
    elif can_restart and not is_late and not task.has_trained:
      task.attempt += 1
      self._say(
        f'{task.spec.name}: {failure.why}. Starting it again '
        f'({task.attempt} of {self._options.max_restarts}).'
      )
      self._start(task)
      return
    else:
      task.status = status
      self._on_failure(failure)
    task.process = None

  def _on_failure(self, failure: _Failure) -> None:
    """Follows the failure of a task, or of another host, that is not mended."""
    if self._is_elastic:
      self._lose(failure)
      return
    if not self._doubtful:
      self._is_second = self._is_doubt_elsewhere
    self._doubtful.append(failure)

  def _lose(self, failure: _Failure) -> None:
    """Goes on without a task, or another host, of an elastic job."""
    self._lost.append(failure)
    self._say(
      f'{failure.shown} is lost: {failure.why}. The job is elastic: the others go '
      'on.'
    )
    if failure.task and failure.task.has_trained:
      self._first = self._first or failure

  def _earliest(self) -> _Failure:
    # Processes of one that failed before may be about to end.
    ending = [_failure_of(t) for t in self._running() if t.process.status]
    return min([*self._doubtful, *ending], key=lambda failure: failure.at)

  def _is_over(self) -> bool:
    """Returns whether no task trains on any host."""
    return not self._training() and not self._num_elsewhere

  def _decide(self) -> None:
    """Follows failures that came before a task said whether the job is elastic."""
    may_be_elastic = self._is_second or not (
      self._has_ended_well
      or self._is_over()
      or any(t.spec.type == 'ps' for t in self._tasks)
    )
    now = time.monotonic()
    if self._is_elastic:
      for failure in self._doubtful:
        self._lose(failure)
    elif self._kind or not may_be_elastic or now >= self._doubt_ends_at:
      self._first = self._earliest()
      self._ends_all = self._first.is_here
      self._fail()
    else:
      if self._doubt_ends_at == math.inf:
        seconds = min(3 * self._options.grace_period, _MOST_SECONDS_OF_DOUBT)
        self._doubt_ends_at = now + seconds
        first = self._earliest()
        self._say(
          f'{first.shown} failed: {first.why}. Waiting up to {seconds:g} s to '
          'hear whether the job is elastic.'
        )
      return
    self._doubtful, self._doubt_ends_at = [], math.inf

  def _on_good_end(self) -> None:
    if not self._has_ended_well:
      self._has_ended_well = True
      if self._is_elastic:
        self._late_at = time.monotonic() + self._options.grace_period

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
      # The launcher of a host ends its own.
      is_host = task.spec.type == 'node'
      if task.process is not None and not task.has_trained and not is_host:
        self._say(
          f'{task.spec.name} still runs, though the training has ended: alone it '
          f'would train from the beginning. Ending it {self._how_it_ends()}.'
        )
        task.process.send(signal.SIGTERM)

  def _lost_training(self) -> list[_Failure]:
    return [f for f in self._lost if not f.task or f.task.spec.is_training]

  def _hear(self) -> None:
    """Follows the other hosts."""
    states = self._launchers.states.values()
    here = [state for state in states if not state.is_lost]
    self._num_elsewhere = sum(state.num_training for state in here)
    self._is_doubt_elsewhere = any(state.is_in_doubt for state in here)
    for state in states:
      node = state.node
      self._set_kind(state.kind)
      if state.has_ended_well:
        self._on_good_end()
      if self._is_stopping:
        continue
      is_working = state.num_training or state.is_in_doubt
      if state.ends_all:
        self._first = self._elsewhere(node, state.failed, state.status)
        self._fail()
      elif state.failed and self._first is None:
        self._first = self._elsewhere(node, state.failed, state.status)
        self._say(
          f'{self._first.shown} failed after it had trained: {self._first.why}.'
        )
      elif state.is_lost and is_working and node not in self._missing_nodes:
        self._missing_nodes.add(node)
        failure = self._elsewhere(
          node, f'node {node}', exit_codes.RESTARTABLE_EXIT_CODE
        )
        failure.why = 'its launcher is gone, or the network to it is cut'
        self._on_failure(failure)

  def _elsewhere(self, node: int, name: str, status: int) -> _Failure:
    """Returns a failure of another host."""
    where = '' if name == f'node {node}' else f' on node {node}'
    shown = f'{name}{where} ({self._launchers.nodes[node].host})'
    why = output.ending(status)
    return _Failure(
      time.monotonic_ns(), name, shown, status, why, is_here=False
    )

  def _tell(self) -> None:
    first = self._first if self._first and self._first.is_here else None
    self._launchers.tell(
      tasks.HostState(
        self._launchers.rank,
        len(self._training()),
        bool(self._doubtful),
        self._has_ended_well,
        self._kind,
        failed=first.name if first else '',
        status=first.status if first else 0,
        ends_all=self._ends_all,
      )
    )

  def _fail(self) -> None:
    self._say(
      f'{self._first.shown} failed: {self._first.why}. Ending the other tasks '
      f'{self._how_it_ends()}.'
    )
    self._stop(signal.SIGTERM)

  def _on_signal(self, number: int) -> None:
    if self._signal is not None:
      self._say('A second signal: SIGKILL.')
      self._stop(signal.SIGKILL)
      return
    self._signal = number
    for task in self._tasks:
      task.lines.hides_tracebacks = number == signal.SIGINT
    # Of an elastic job a signal ends this host's part, as where the host is needed
    # for something else. Ctrl-C, and the end of a launcher of all hosts, end all.
    is_launched = launcher_note.VARIABLE in os.environ
    is_part = self._is_elastic and not is_launched
    self._ends_all = number == signal.SIGINT or not is_part
    if self._doubtful:
      self._first = self._earliest()
    is_told = self._first is not None and self._first.is_here
    if self._launchers is not None and self._ends_all and not is_told:
      name = f'node {self._launchers.rank}'
      self._first = _Failure(time.monotonic_ns(), name, name, -number, '')
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
    if self._first is not None and self._first.task is not None:
      self._show_end(self._first.task, 'failed first')
    if self._first is not None or self._signal is not None:
      return
    lost = [failure.shown for failure in self._lost_training()]
    if lost:
      self._say(f'The training has ended well without {", ".join(lost)}.')
    for failure in self._lost:
      if failure.task is not None:
        self._show_end(failure.task, 'was lost')

  def _show_end(self, task: _Task, what: str) -> None:
    again = f' (restarts: {task.attempt})' if task.attempt else ''
    tail = task.lines.tail()
    words = 'Its last lines:' if tail else 'It wrote nothing.'
    self._say(
      f'{task.spec.name} {what}: {output.ending(task.status)}{again}. {words}'
    )
    for line in tail:
      self._err.write(b'  ' + line + b'\n')
