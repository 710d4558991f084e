"""One attempt at a task: its process group, its output and how it ended."""

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from tf_strategies.launch import guard, output

_READ_BYTES = 1 << 16
# The most that a full pipe holds, in reads.
_MOST_DRAINED = 16
_PR_SET_CHILD_SUBREAPER = 36
# A process that outlives SIGKILL for so long hangs in the kernel.
_GIVE_UP_SECONDS = 10.0


def start_guard(grace_period: float) -> subprocess.Popen:
  """Starts what ends all tasks if this process is killed; a context."""
  return subprocess.Popen(
    [sys.executable, '-I', '-S', guard.__file__, str(grace_period)],
    bufsize=0,
    stdin=subprocess.PIPE,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    start_new_session=True,
  )


def adopt_orphans() -> None:
  """Makes orphans of tasks children of this process, where Linux can do that.

  The first process of a container may not wait for them.
  """
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class TaskProcess:
  """A command in a session, and so in a process group, of its own.

  When the command has ended, or after `send`, what is left of the group has
  `grace_period` seconds until SIGKILL.

  Args:
    command: program and arguments.
    environment: all of its variables.
    grace_period: in seconds.
    keeper: what `start_guard` returned.
    sink: takes the output.

  Attributes:
    status: None until the command has ended; then its exit status, or minus
      the signal that killed it.
    ended_at: when `follow` noticed that, in seconds of the monotonic clock.
    is_gone: whether nothing is left of its group.

  Example:

    >>> import io
    >>> out = io.BytesIO()
    >>> lines = output.TaskOutput(b'[a] ', out.write)
    >>> with start_guard(1.0) as keeper:
    ...   process = TaskProcess(
    ...     ['sh', '-c', 'echo hi; exit 3'], {}, 1.0, keeper, lines)
    ...   while not process.is_gone:
    ...     process.follow(time.monotonic())
    >>> process.status, out.getvalue()
    (3, b'[a] hi\\n')
  """

  def __init__(
    self,
    command: list[str],
    environment: Mapping[str, str],
    grace_period: float,
    keeper: subprocess.Popen,
    sink: output.TaskOutput,
  ):
    self.status: int | None = None
    self.ended_at = time.monotonic()
    self.is_gone = False
    self._grace_period = grace_period
    self._keeper = keeper
    self._sink = sink
    self._kill_at = self._give_up_at = math.inf
    self._output = None
    try:
      self._process = subprocess.Popen(
        command,
        bufsize=0,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )
    except OSError as e:
      sink.feed(f'cannot start {command[0]!r}: {e}\n'.encode())
      # As a shell says of a command that it cannot find, or cannot run.
      self.status = 127 if isinstance(e, FileNotFoundError) else 126
      self.is_gone = True
      return
    self._group = self._process.pid
    self._tell(self._group)
    self._output = self._process.stdout
    os.set_blocking(self._output.fileno(), False)

  @property
  def output_fd(self) -> int | None:
    """Poll it to know when to call `read_output()`; None if all was read."""
    is_open = self._output is not None and not self._output.closed
    return self._output.fileno() if is_open else None

  def send(self, number: int) -> None:
    """Sends a signal to the process group, and SIGKILL after the grace period."""
    if self.is_gone:
      return
    guard.signal_group(self._group, number)
    seconds = 0.0 if number == signal.SIGKILL else self._grace_period
    self._kill_at = min(self._kill_at, time.monotonic() + seconds)

  def follow(self, now: float) -> None:
    """Notices what has ended, and ends what is left after the grace period."""
    if self.is_gone:
      return
    if self.status is None and self._process.poll() is not None:
      self.status, self.ended_at = self._process.returncode, now
      self.send(signal.SIGTERM)
    if now >= self._kill_at:
      guard.signal_group(self._group, signal.SIGKILL)
      self._give_up_at = min(self._give_up_at, now + _GIVE_UP_SECONDS)
    if now >= self._give_up_at:
      self._sink.feed(b'A process outlives SIGKILL; it hangs in the kernel.\n')
      self.status = -signal.SIGKILL if self.status is None else self.status
    elif self.status is None or self._is_group_left():
      return
    for _ in range(_MOST_DRAINED):
      self.read_output()
    self._output.close()
    self._sink.end_line()
    self._tell(-self._group)
    self.is_gone = True

  def read_output(self) -> None:
    """Reads once what the command has written."""
    if self._output.closed:
      return
    data = self._output.read(_READ_BYTES)
    if data:
      self._sink.feed(data)
    elif data is not None:  # The end, and not a pipe that is empty now.
      self._output.close()

  def _is_group_left(self) -> bool:
    with contextlib.suppress(ChildProcessError):
      # Orphans that this process has adopted.
      while os.waitpid(-self._group, os.WNOHANG)[0]:
        pass
    return guard.signal_group(self._group, 0)

  def _tell(self, group: int) -> None:
    # Somebody may have killed the guard.
    with contextlib.suppress(OSError):
      self._keeper.stdin.write(b'%d\n' % group)
