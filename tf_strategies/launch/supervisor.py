"""Runs the tasks of a host until the job is over, and leaves none behind.

One thread polls the output of tasks, their reapers, signals, the reader of our own
output, the launchers of other hosts and the clock. It never blocks on one of them.

`Supervisor` decides by these events:

| event | what it does |
|---|---|
| a task fails, and restarts are left | starts it again, unless a training task has ended with 0 |
| a task fails | ends all tasks: the job has failed |
| a task of an elastic job fails | goes on without it |
| a task fails before any says whether the job is elastic | waits up to 30 s for a word |
| it fails after it has trained | goes on, but the job has failed: its results may be lost |
| the last training task ends | ends servers and evaluator |
| a training task of an elastic job ends with 0 | ends those that train alone, after the grace period |
| a signal arrives, or nobody reads our output | ends all tasks; a second signal kills them |
| another host fails, or is lost | as for a task that fails |

Example:

  >>> from tf_strategies.launch import supervisor
  >>> supervisor.exit_status(-9)
  137
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
# Above it the tasks wait until somebody reads what they have written.
_MOST_PENDING = 1 << 20
_POLL_MILLISECONDS = 200
# How long a failed task may wait to hear whether the job is elastic: a process
# needs 10 to 15 seconds before its first operation on a GPU.
_MOST_SECONDS_OF_DOUBT = 30.0


def exit_status(status: int) -> int:
  """Returns the launcher's exit status for a task's: 128 + N for signal N."""
  return status if status >= 0 else 128 - status


@dataclasses.dataclass(frozen=True)
class Options:
  """How tasks are supervised: see the launcher's flags.

  `shown` names the tasks whose lines appear on stdout; None for all. The last
  lines of a task that failed first appear in any case.
  """

  max_restarts: int = 0
  grace_period: float = 10.0
  log_dir: str | None = None
  is_coloured: bool = False
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


# When a task failed, by its reaper's clock, and with which status.
_Failure = tuple[float, int, _Task]


class Supervisor:
  """Runs a host's part of a job: in the main thread, without other children.

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
    self._tasks = [
      _Task(spec, self._make_output(spec, place))
      for place, spec in enumerate(specs)
    ]
    # What tasks have said of the job, here or on another host.
    self._kind = ''
    # Those that failed before: (end, status, task). And when they end the job.
    self._doubtful: list[_Failure] = []
    self._doubt_ends_at = math.inf
    # Whether a training task has ended with 0, here or on another host.
    self._has_ended_well = False
    # When tasks of an elastic job that still train are ended.
    self._late_at = math.inf
    self._is_stopping = False
    self._signal: int | None = None
    # The name and the status of what failed first, and whether the other hosts have to
    # be told.
    self._failed, self._status = '', 0
    self._ends_all = False
    # The number of training tasks of other hosts that have not ended.
    self._num_elsewhere = 0
    # Those that an elastic job goes on without.
    self._lost: list[_Task] = []
    self._lost_nodes: list[int] = []

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
    if self._signal is not None and not self._failed:
      return 128 + self._signal
    return exit_status(self._status)

  def _make_output(self, spec: tasks.TaskSpec, place: int) -> output.TaskOutput:
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
    start = output.prefix(spec.name, place, self._options.is_coloured)
    shown = self._options.shown
    is_shown = shown is None or spec.name in shown
    write = self._out.write if is_shown else lambda line: None
    return output.TaskOutput(start, write, log)

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
    self._num_elsewhere = self._hear() if self._launchers is not None else 0
    if self._doubtful and not self._is_stopping:
      self._decide()
    if not self._is_stopping:
      if not self._training() and not self._num_elsewhere:
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
    """Nothing is left of this attempt: its ports are free for the next."""
    status = task.process.status
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
        f'{task.spec.name}: {output.ending(status)}. Starting it again '
        f'({task.attempt} of {self._options.max_restarts}).'
      )
      self._start(task)
      return
    elif self._is_elastic:
      task.status = status
      self._lose(task)
    elif self._may_be_elastic(task):
      task.status = status
      self._doubtful.append((task.process.ended_at, status, task))
      self._say(
        f'{task.spec.name} failed: {output.ending(status)}. Waiting up to '
        f'{self._seconds_of_doubt():g} s to hear whether the job is elastic.'
      )
      self._doubt_ends_at = min(
        self._doubt_ends_at, time.monotonic() + self._seconds_of_doubt()
      )
    else:
      task.status = status
      self._end_for_first()
    task.process = None

  def _lose(self, task: _Task) -> None:
    """Goes on without a task of an elastic job."""
    self._lost.append(task)
    self._say_lost(f'{task.spec.shown} is lost: {output.ending(task.status)}')
    if task.has_trained and not self._failed:
      self._note_failure(task)

  def _end_for_first(self) -> None:
    """Ends the job, here and on all hosts, for the task that failed first."""
    # Processes of one that failed before may be about to end.
    ending = [
      (t.process.ended_at, t.process.status, t)
      for t in self._running()
      if t.process.status
    ]
    _, status, task = min([*self._doubtful, *ending], key=lambda f: f[0])
    task.status = status
    self._note_failure(task)
    self._ends_all = True
    self._fail(task.spec.shown)

  def _may_be_elastic(self, task: _Task) -> bool:
    """Returns whether tasks that still train may go on without a failed one."""
    still = [t for t in self._training() if not t.process.status]
    return (
      not self._kind
      and not self._has_ended_well
      and task.spec.is_training
      and all(t.spec.type != 'ps' for t in self._tasks)
      and len(still) + self._num_elsewhere > 0
    )

  def _seconds_of_doubt(self) -> float:
    return min(3 * self._options.grace_period, _MOST_SECONDS_OF_DOUBT)

  def _decide(self) -> None:
    """Follows failures that came before a task said whether the job is elastic."""
    is_over = not self._training() and not self._num_elsewhere
    if self._is_elastic:
      for _, _, task in self._doubtful:
        self._lose(task)
    elif self._kind or is_over or time.monotonic() >= self._doubt_ends_at:
      self._end_for_first()
    else:
      return
    self._doubtful, self._doubt_ends_at = [], math.inf

  def _on_good_end(self) -> None:
    if not self._has_ended_well:
      self._has_ended_well = True
      if self._is_elastic:
        self._late_at = time.monotonic() + self._options.grace_period

  def _on_training_over(self) -> None:
    """Ends servers and evaluator."""
    lost = [task for task in self._lost if task.spec.is_training]
    if lost and not self._has_ended_well and not self._failed:
      # Nobody is left of an elastic job.
      self._note_failure(lost[0])
    self._stop(signal.SIGTERM)

  def _end_late(self) -> None:
    """Ends tasks that were lost, came back, and would repeat the training alone."""
    for task in self._training():
      if task.process is not None and not task.has_trained:
        self._say(
          f'{task.spec.name} still runs, though the training has ended: alone it '
          f'would train from the beginning. Ending it {self._how_it_ends()}.'
        )
        task.process.send(signal.SIGTERM)

  def _hear(self) -> int:
    """Follows the other hosts; returns how many tasks train there."""
    states = dict(self._launchers.states)
    states.pop(self._launchers.rank, None)
    for node, state in sorted(states.items()):
      name = f'node {node}'
      self._set_kind(state.kind)
      if state.has_ended_well:
        self._on_good_end()
      if self._is_stopping:
        continue
      if state.failed:
        self._failed, self._status = state.failed, state.status
        where = '' if state.failed == name else f' on {name}'
        self._fail(f'{state.failed}{where} ({self._host(node)})')
      elif (
        state.is_lost and state.num_training and node not in self._lost_nodes
      ):
        self._lost_nodes.append(node)
        why = 'its launcher is gone, or the network to it is cut'
        shown = f'{name} ({self._host(node)})'
        if self._is_elastic:
          self._say_lost(f'{shown} is lost: {why}')
        else:
          self._failed = name
          self._status = exit_codes.RESTARTABLE_EXIT_CODE
          self._fail(shown, why)
    return sum(s.num_training for s in states.values() if not s.is_lost)

  def _host(self, node: int) -> str:
    return self._launchers.nodes[node].host

  def _tell(self) -> None:
    self._launchers.tell(
      tasks.HostState(
        self._launchers.rank,
        len(self._training()),
        self._has_ended_well,
        self._kind,
        failed=self._failed if self._ends_all else '',
        status=self._status,
      )
    )

  def _note_failure(self, task: _Task) -> None:
    self._failed, self._status = task.spec.name, task.status

  def _fail(self, shown: str, why: str = '') -> None:
    self._say(
      f'{shown} failed: {why or output.ending(self._status)}. Ending the other '
      f'tasks {self._how_it_ends()}.'
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
    is_part = self._is_elastic and not launcher_note.is_launched()
    self._ends_all = number == signal.SIGINT or not is_part
    if self._launchers is not None and self._ends_all and not self._failed:
      self._failed, self._status = f'node {self._launchers.rank}', -number
    self._say(
      f'{signal.Signals(number).name}: ending all tasks (after '
      f'{self._options.grace_period:g} s SIGKILL).'
    )
    # Tasks do not get SIGPIPE for the launcher's reader.
    self._stop(signal.SIGTERM if number == signal.SIGPIPE else number)

  def _stop(self, number: int) -> None:
    """Ends all tasks; their reapers see to the grace period."""
    self._is_stopping = True
    for task in self._running():
      task.process.send(number)

  def _how_it_ends(self) -> str:
    return f'(SIGTERM, after {self._options.grace_period:g} s SIGKILL)'

  def _say(self, text: str) -> None:
    self._err.write(f'[launch] {text}\n'.encode())

  def _say_lost(self, text: str) -> None:
    self._say(f'{text}. The job is elastic: the others go on.')

  def _report(self) -> None:
    """Says which tasks failed, with their last lines."""
    for task in self._tasks:
      if task.spec.name == self._failed:
        self._show_end(task, 'failed first')
    if self._failed or self._signal is not None:
      return
    lost = [task.spec.shown for task in self._lost if task.spec.is_training]
    lost += [f'node {node} ({self._host(node)})' for node in self._lost_nodes]
    if lost:
      self._say(f'The training has ended well without {", ".join(lost)}.')
    for task in self._lost:
      self._show_end(task, 'was lost')

  def _show_end(self, task: _Task, what: str) -> None:
    again = f' (restarts: {task.attempt})' if task.attempt else ''
    tail = task.lines.tail()
    words = 'Its last lines:' if tail else 'It wrote nothing.'
    self._say(
      f'{task.spec.name} {what}: {output.ending(task.status)}{again}. {words}'
    )
    for line in tail:
      self._err.write(b'  ' + line + b'\n')
