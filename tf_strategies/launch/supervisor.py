"""Runs the tasks of a job until the job is over, and leaves none behind.

One loop in one thread polls what the tasks write, what their reapers report,
signals, the reader of our own output, launchers of other hosts and the clock. It
never blocks on one.

Example:

  >>> from tf_strategies.launch import supervisor
  >>> supervisor.exit_status(-9)
  137
"""

import dataclasses
import math
import os
import pathlib
import select
import signal
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from tf_strategies import errors, option_checks
from tf_strategies.cluster import exit_codes, launcher_note
from tf_strategies.launch import others as others_lib
from tf_strategies.launch import output, process, reaper, tasks

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Above it the tasks wait until somebody reads what they have written.
_MOST_PENDING = 1 << 20
_LONGEST_POLL_SECONDS = 1.0
# For so long a job may turn out to be elastic after a task has failed. TensorFlow's
# import takes 10 to 20 seconds on a loaded machine.
_MOST_SECONDS_OF_DOUBT = 30.0
# A process that outlives SIGKILL for so long hangs in the kernel.
_GIVE_UP_SECONDS = 10.0


def exit_status(status: int) -> int:
  """The launcher's exit status for a task's: 128 + N for signal N."""
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
  shown: AbstractSet[str] | None = None

  def __post_init__(self):
    option_checks.check_int('--max_restarts', self.max_restarts, 0)
    option_checks.check_seconds(
      '--grace_period', self.grace_period, or_zero=True
    )


@dataclasses.dataclass
class _Task:
  """A task and its present attempt."""

  spec: tasks.TaskSpec
  lines: output.TaskOutput
  running: process.TaskProcess | None = None
  attempt: int = 0
  # Whether the end of the attempt was noticed.
  was_noted: bool = False
  # How often it ended badly while all others were still at work; 0 once it says that
  # it has trained to the end with them.
  losses: int = 0
  # Whether it came back too late, and was told to end.
  was_told: bool = False
  # Set when it is not tried again.
  status: int | None = None


class Supervisor:
  """Runs a job: in the main thread, of a process without other children.

  `specs` are all tasks of the job. Of those on other hosts, if there are any,
  `others` hears how they end; the rules are the same, wherever a task is.

  A training task of an elastic job that is lost near the end must not repeat
  alone what the others have finished. So, with restarts and without parameter
  servers, once a training task has ended with status 0:

  - none is started again;
  - one that was lost more often than that task, and so came back while it went
    on, has `grace_period` to end by itself, since it may have joined the others
    again and write the results; then it is ended, which is no failure;
  - another one that is killed, or exits as after a lost peer, is no failure
    either, unless it is the first of those that the job never lost. That one
    writes the results, as the lowest rank of a ring does, and they may be lost.

  In an elastic job, which says so by the launcher's note, the workers decide who
  goes on. The supervisor restarts what it may and ends no task because another
  one failed, or because another host is lost. The job has then ended well if a
  training task has.

  A task may fail before any says whether the job is elastic. The supervisor then
  waits for a word, for three times the grace period but at most 30 seconds. It does
  not wait in a job with parameter servers, which is not elastic.

  Raises:
    UnsupportedOptionError: `options.log_dir` cannot be written.
  """

  def __init__(
    self,
    specs: Sequence[tasks.TaskSpec],
    options: Options,
    others: others_lib.Others | None = None,
  ):
    self._options = options
    self._others = others or others_lib.Others()
    self._here = self._others.node
    # What the tasks write, and what the launcher itself has to say.
    self._out, self._err = output.Sink(1), output.Sink(2)
    self._tasks = [
      _Task(spec, self._make_output(spec, place))
      for place, spec in enumerate(specs)
    ]
    self._failure: _Task | None = None
    # Of an elastic job, those that are not started again.
    self._lost: list[_Task] = []
    # Those of hosts of which nothing is heard any more.
    self._unheard: list[_Task] = []
    # Those that failed before anybody has said whether the job is elastic.
    self._doubtful: list[_Task] = []
    # As in the launcher's note. Launchers of hosts, which are tasks here, have
    # judged by themselves when they fail.
    is_fixed = any(spec.type in ('ps', 'node') for spec in specs)
    self._kind = launcher_note.FIXED if is_fixed else ''
    self._signal: int | None = None
    self._is_stopping = False
    self._kill_at = self._late_at = self._give_up_at = math.inf
    self._doubt_ends_at = math.inf

  def run(self) -> int:
    """Starts the tasks and waits for the end of the job.

    Returns:
      0 if all training tasks ended with 0, or those that count did (see the
      class); else the status of the task that failed first (128 + N if signal N
      killed it), or 128 + N if signal N ended the job.

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
          if task.spec.node == self._here:
            self._start(task)
        while not self._is_over():
          self._step()
        process.kill_orphans(keep=frozenset())
        self._report()
        self._write_the_rest()
      finally:
        # Without its channel a reaper ends its task: none outlives an error.
        for task in self._tasks:
          if task.running:
            task.running.close()
          task.lines.close()
        self._others.close()
    if self._failure is not None:
      return exit_status(self._failure.status)
    return 0 if self._signal is None else 128 + self._signal

  def _make_output(self, spec: tasks.TaskSpec, place: int) -> output.TaskOutput:
    log = None
    is_here = spec.node == self._here
    if self._options.log_dir and is_here:
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
    lines = output.TaskOutput(start, write, log)
    lines.hides_notices = tasks.log_level(os.environ) > '0'
    return lines

  def _start(self, task: _Task) -> None:
    task.was_noted = False
    environment = tasks.full_environment(task.spec, os.environ, task.attempt)
    task.running = process.TaskProcess(
      list(task.spec.command),
      {**environment, launcher_note.VARIABLE: self._note.path},
      self._options.grace_period,
      task.lines,
    )

  def _is_over(self) -> bool:
    if time.monotonic() > self._give_up_at:
      self._say('Some processes outlive SIGKILL; they hang in the kernel.')
      return True
    # While tasks of other hosts train this one may have none left.
    is_done = self._is_stopping or self._others.is_alone
    return is_done and not self._running()

  def _running(self) -> list[_Task]:
    return [task for task in self._tasks if task.running is not None]

  def _step(self) -> None:
    self._poll()
    for number in self._inbox.read():
      self._on_signal(number)
    if self._out.is_broken and self._signal is None:
      self._on_signal(signal.SIGPIPE)
    trained = self._note.newly_trained()
    self._learn(self._note.kind)
    for task in self._tasks:
      if task.spec.name in trained:
        task.losses = 0
    # The reapers' clock tells who was first, whatever the order of hearing.
    for task in sorted(self._running(), key=lambda task: task.running.ended_at):
      if task.running.status is not None and not task.was_noted:
        self._on_end(task)
    for task in self._running():
      if task.running.is_gone:
        self._on_gone(task)
    self._end_late()
    for message in self._others.heard():
      self._on_message(message)
    if time.monotonic() >= self._doubt_ends_at:
      self._learn(launcher_note.FIXED)
    for task in self._tasks:
      if task.spec.node == self._here:
        self._others.tell(
          task.spec.name,
          None if task in self._doubtful else task.status,
          task.losses,
          failed=task is self._failure,
          kind=self._kind,
        )
    if time.monotonic() >= self._kill_at:
      self._kill_all()

  def _poll(self) -> None:
    """Waits for whatever comes first, and lets it be read or written."""
    reactions = {}
    poller = select.poll()
    poller.register(self._inbox, select.POLLIN)
    for sink in (self._out, self._err):
      if sink.pending:
        poller.register(sink.fd, select.POLLOUT)
        reactions[sink.fd] = sink.flush_some
    if not self._others.is_alone:
      poller.register(self._others, select.POLLIN)
    for task in self._running():
      running = task.running
      poller.register(running.channel_fd, select.POLLIN)
      reactions[running.channel_fd] = running.read_channel
      if running.output_fd is not None and self._out.pending < _MOST_PENDING:
        poller.register(running.output_fd, select.POLLIN)
        reactions[running.output_fd] = running.read_output
    left = max(0.0, self._kill_at - time.monotonic())
    timeout = min(left, _LONGEST_POLL_SECONDS)
    for fd, _ in poller.poll(math.ceil(timeout * 1000)):
      reactions.get(fd, lambda: None)()

  @property
  def _is_elastic(self) -> bool:
    return self._kind == launcher_note.ELASTIC

  def _learn(self, said: str) -> None:
    """Follows what a task has said of the job, here or elsewhere."""
    kind = launcher_note.stronger(self._kind, said)
    if kind == self._kind:
      return
    self._kind = kind
    if self._is_elastic:
      # With --hostfile this launcher is a task of another one.
      launcher_note.say_elastic()
    self._judge()

  def _judge(self) -> None:
    """Decides what the failures mean that came before it was known."""
    doubtful = self._doubtful
    if not self._kind or not doubtful or self._is_stopping:
      return
    self._doubtful, self._doubt_ends_at = [], math.inf
    if self._is_elastic:
      for task in doubtful:
        self._lose(task, task.status)
    else:
      self._fail(doubtful[0], doubtful[0].status)

  def _on_end(self, task: _Task) -> None:
    task.was_noted = True
    status = task.running.status
    if task.running.reaper_was_killed:
      process.kill_orphans({t.running.reaper_pid for t in self._running()})
    if self._is_stopping:
      task.status = status
    elif status == 0:
      self._on_good_end(task)
    elif self._finisher(task) is not None:
      self._on_late_loss(task, status)
    elif task.attempt < self._options.max_restarts:
      task.losses += 1
      self._say(
        f'{task.spec.name}: {output.ending(status)}. Starting it again '
        f'({task.attempt + 1} of {self._options.max_restarts}).'
      )
    else:
      task.losses += 1
      task.status = status
      self._doubtful.append(task)
      self._judge()
      self._stop_if_done()
      if task in self._doubtful:
        self._wait_for_a_word(task)

  def _wait_for_a_word(self, task: _Task) -> None:
    seconds = min(3 * self._options.grace_period, _MOST_SECONDS_OF_DOUBT)
    ends_at = time.monotonic() + seconds
    self._doubt_ends_at = min(self._doubt_ends_at, ends_at)
    self._say(
      f'{task.spec.name} failed: {output.ending(task.status)}. The others go on if '
      f'one of them says within {seconds:g} s that the job is elastic.'
    )

  def _on_good_end(self, task: _Task) -> None:
    task.status = 0
    if task.spec.is_training:
      self._late_at = min(self._late_at, self._after_grace())
    self._stop_if_done()

  def _on_message(self, message: Mapping[str, Any]) -> None:
    """Follows what a task of another host did, or its launcher."""
    self._learn(message['kind'])
    name, status = message['task'], message['status']
    task = next((t for t in self._tasks if t.spec.name == name), None)
    if task is None:  # The launcher itself: it was ended, or is lost.
      self._on_lost_launcher(name, status, message['failed'])
      return
    task.losses = message['losses']
    if self._is_stopping or status is None or task.status is not None:
      return
    if message['failed']:
      self._fail_late(task, status)
    elif status == 0:
      self._on_good_end(task)
    elif self._is_elastic:
      self._lose(task, status)
    else:
      task.status = status
      self._stop_if_done()

  def _on_lost_launcher(self, name: str, status: int, ends_all: bool) -> None:
    if self._is_stopping:
      return
    node = int(name.rpartition(' ')[2])
    if ends_all or not self._is_elastic:
      spec = tasks.TaskSpec('node', node, (), {}, False, node)
      self._fail(_Task(spec, self._make_output(spec, 0)), status)
      return
    away = [
      t for t in self._tasks if t.status is None and t.spec.node != self._here
    ]
    gone = [task for task in away if task.spec.node == node]
    if gone:
      self._say_lost(name, status)
    self._lost += gone
    if self._others.is_alone:
      # The first host's launcher passed on what the others say.
      self._unheard = [task for task in away if task not in gone]
    for task in gone + self._unheard:
      task.status = status
      task.losses += 1
    self._stop_if_done()

  def _lose(self, task: _Task, status: int) -> None:
    """Goes on without a task of an elastic job."""
    task.status = status
    self._lost.append(task)
    self._say_lost(task.spec.name, status)
    self._stop_if_done()

  def _say_lost(self, name: str, status: int) -> None:
    ending = self._others.ending(name, status)
    self._say(
      f'{name}{self._others.where(name)} is lost: {ending}. The job is elastic: '
      'the others go on.'
    )

  def _fail(self, task: _Task, status: int) -> None:
    task.status = status
    self._failure = task
    name = task.spec.name
    self._say(
      f'{name}{self._others.where(name)} failed: '
      f'{self._others.ending(name, status)}. Ending the other tasks (SIGTERM, '
      f'after {self._options.grace_period:g} s SIGKILL).'
    )
    self._stop(signal.SIGTERM)

  def _fail_late(self, task: _Task, status: int) -> None:
    """A task failed, and its results may be lost; an elastic job goes on."""
    if not self._is_elastic:
      self._fail(task, status)
      return
    self._failure = task
    self._lose(task, status)

  def _stop_if_done(self) -> None:
    """Ends servers and evaluator when no task trains any more."""
    if any(task.status is None for task in self._training()):
      return
    if self._doubtful:
      # Nobody can say any more that the job is elastic.
      self._learn(launcher_note.FIXED)
      return
    if all(task.status for task in self._training()) and not self._failure:
      # Nobody is left of an elastic job.
      here = [task for task in self._lost if task.spec.node == self._here]
      self._failure = (here or self._lost)[0]
    self._stop(signal.SIGTERM)

  def _training(self) -> list[_Task]:
    return [task for task in self._tasks if task.spec.is_training]

  def _finisher(self, task: _Task) -> _Task | None:
    """Of the tasks that ended well and leave `task` alone the least lost one."""
    has_servers = any(task.spec.type == 'ps' for task in self._tasks)
    is_restarted = self._options.max_restarts or self._is_elastic
    if not is_restarted or has_servers or not task.spec.is_training:
      return None
    ended_well = [task for task in self._training() if task.status == 0]
    return min(ended_well, key=lambda task: task.losses, default=None)

  def _on_late_loss(self, task: _Task, status: int) -> None:
    """A training task ended badly, and another one has ended well."""
    finisher = self._finisher(task)
    kept = [t for t in self._training() if t.losses <= finisher.losses]
    if task in kept:
      is_lost = self._is_elastic or exit_codes.is_restarted(exit_status(status))
      if task is kept[0] or not is_lost:
        self._fail_late(task, status)
        return
    task.status = status
    if not task.was_told:
      self._say(
        f'{task.spec.name}: {output.ending(status)}. Not starting it again: '
        f'{finisher.spec.name} has ended well, so it would train alone, from '
        'the beginning.'
      )
    self._stop_if_done()

  def _end_late(self) -> None:
    """Ends those that came back and go on after the end of another."""
    if self._is_stopping or time.monotonic() < self._late_at:
      return
    self._late_at = self._after_grace()
    for task in self._training():
      finisher = self._finisher(task)
      if finisher is None or task.losses <= finisher.losses:
        continue
      if task.status is not None or task.running is None:
        continue
      if not task.was_told:
        self._say(
          f'{finisher.spec.name} has ended well, and {task.spec.name}, which '
          'was started again, still runs: alone it would train from the '
          f'beginning. Ending {task.spec.name} (SIGTERM, after '
          f'{self._options.grace_period:g} s SIGKILL).'
        )
      task.running.send(signal.SIGKILL if task.was_told else signal.SIGTERM)
      task.was_told = True

  def _on_gone(self, task: _Task) -> None:
    """Nothing is left of this attempt: its ports are free for the next."""
    status = task.running.status
    task.running = None
    if task.status is None and not self._is_stopping:
      # Another one may have ended well since this one was lost.
      if self._finisher(task) is not None:
        self._on_late_loss(task, status)
      else:
        task.attempt += 1
        self._start(task)
    if task.lines.log_error is not None:
      self._say(f'{task.spec.name}: no more log: {task.lines.log_error}.')
      task.lines.log_error = None

  def _on_signal(self, number: int) -> None:
    if self._signal is not None:
      self._say('A second signal: SIGKILL.')
      self._kill_all()
      return
    self._signal = number
    for task in self._tasks:
      task.lines.hides_tracebacks = number == signal.SIGINT
    # Of an elastic job a signal ends this host's part, as where the host is needed
    # for something else. Ctrl-C, and the end of a launcher of all hosts, end all.
    ends_all = (
      not self._is_elastic
      or number == signal.SIGINT
      or launcher_note.is_launched()
    )
    self._others.tell(f'node {self._here}', -number, 0, ends_all, self._kind)
    self._say(
      f'{signal.Signals(number).name}: ending all tasks (after '
      f'{self._options.grace_period:g} s SIGKILL).'
    )
    # Tasks do not get SIGPIPE for the launcher's reader.
    self._stop(signal.SIGTERM if number == signal.SIGPIPE else number)

  def _stop(self, number: int) -> None:
    self._is_stopping = True
    self._kill_at = min(self._kill_at, self._after_grace())
    self._send(number)

  def _after_grace(self) -> float:
    return time.monotonic() + self._options.grace_period

  def _kill_all(self) -> None:
    self._is_stopping = True
    now = time.monotonic()
    self._give_up_at = min(self._give_up_at, now + _GIVE_UP_SECONDS)
    # A task may have been started while the first round was on its way.
    self._kill_at = now + _LONGEST_POLL_SECONDS
    self._send(signal.SIGKILL)

  def _send(self, number: int) -> None:
    for task in self._running():
      task.running.send(number)

  def _say(self, text: str) -> None:
    self._err.write(f'[launch] {text}\n'.encode())

  def _report(self) -> None:
    """Says which tasks failed, with the last lines of this host's."""
    if self._failure is not None:
      self._show_end(self._failure, 'failed first')
    elif self._signal is None:
      if self._lost:
        self._say(
          f'The training has ended well without {self._named(self._lost)}.'
        )
      if self._unheard:
        self._say(f'Not known is the end of {self._named(self._unheard)}.')
      for task in self._lost:
        self._show_end(task, 'was lost')

  def _named(self, lost: Sequence[_Task]) -> str:
    names = [task.spec.name for task in lost if task.spec.is_training]
    return ', '.join(f'{name}{self._others.where(name)}' for name in names)

  def _show_end(self, task: _Task, what: str) -> None:
    if task.spec.node != self._here:
      return  # Its launcher there has the last lines.
    again = f' (restarts: {task.attempt})' if task.attempt else ''
    tail = task.lines.tail()
    words = 'Its last lines:' if tail else 'It wrote nothing.'
    self._say(
      f'{task.spec.name} {what}: {output.ending(task.status)}{again}. {words}'
    )
    for line in tail:
      self._err.write(b'  ' + line + b'\n')

  def _write_the_rest(self) -> None:
    """Waits for our own reader, but not against a signal."""
    while self._out.pending or self._err.pending:
      self._poll()
      if self._inbox.read():
        return
