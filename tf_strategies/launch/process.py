"""One attempt at a task: its reaper, its output and how it ended."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from tf_strategies.launch import output, reaper

_READ_BYTES = 1 << 16
# What one process may leave in its pipe; more comes from one that still writes.
_MOST_DRAINED = 16 << 20
_REAP_SECONDS = 10.0
_KILL_SECONDS = 5.0
_POLL_SECONDS = 0.01


class TaskProcess:
  """A command under its reaper, in a session of its own.

  `grace_period` is what the reaper leaves between SIGTERM and SIGKILL when it
  has to end the task without the launcher.

  Attributes:
    pid: of the command, once it runs.
    reaper_pid: of the reaper, a child of this process.
    channel_fd: poll it to know when to call `read_channel()`.
    output_fd: poll it to know when to call `read_output()`; None if all was read.
    status: None until the command has ended; then its exit status, or minus
      the signal that killed it.
    ended_at: when that was, in nanoseconds of the monotonic clock.
    is_gone: whether nothing is left of it, the reaper included.
    reaper_was_killed: whether processes may be left, as the reaper was killed.

  Example:

    >>> import io, select
    >>> out = io.BytesIO()
    >>> lines = output.TaskOutput(b'[a] ', out.write)
    >>> process = TaskProcess(['sh', '-c', 'echo hi; exit 3'], {}, 1.0, lines)
    >>> while not process.is_gone:
    ...   _ = select.select([process.channel_fd], [], [], 1.0)
    ...   process.read_channel()
    >>> process.status, out.getvalue()
    (3, b'[a] hi\\n')
  """

  def __init__(
    self,
    command: list[str],
    environment: Mapping[str, str],
    grace_period: float,
    sink: output.TaskOutput,
  ):
    self.pid: int | None = None
    self.status: int | None = None
    self.ended_at = 0
    self.is_gone = False
    self.reaper_was_killed = False
    self._sink = sink
    self._heard = b''
    self.output_fd, write_end = os.pipe()
    os.set_blocking(self.output_fd, False)
    self._channel, theirs = socket.socketpair()
    self._channel.setblocking(False)
    self.channel_fd = self._channel.fileno()
    program = [sys.executable, '-I', '-S', reaper.__file__]
    try:
      self._reaper = subprocess.Popen(
        [*program, str(theirs.fileno()), str(grace_period), '--', *command],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=write_end,
        stderr=write_end,
        pass_fds=(theirs.fileno(),),
        start_new_session=True,
      )
    except BaseException:
      self.close()
      raise
    finally:
      os.close(write_end)
      theirs.close()

    self.reaper_pid = self._reaper.pid

  def send(self, number: int) -> None:
    """Sends a signal to the process group; SIGKILL reaches all below it."""
    # Of a reaper that is gone, `read_channel()` will say so.
    with contextlib.suppress(OSError):
      self._channel.send(bytes([number]))

  def read_channel(self) -> None:
    """Reads what the reaper reports; the end of it means that it has ended."""
    try:
      heard = self._channel.recv(_READ_BYTES)
    except BlockingIOError:
      return
    except OSError:
      heard = b''
    *lines, self._heard = (self._heard + heard).split(b'\n')
    for line in lines:
      what, value, at = line.split()
      if what == b'started':
        self.pid = int(value)
      else:
        self.status, self.ended_at = int(value), int(at)
        # Its last words are in the pipe, for whoever asks why it ended.
        self._drain()
    if not heard:
      self._bury()

  def close(self) -> None:
    """Closes the channel; a reaper that still runs then ends the task."""
    self._channel.close()
    self._close_output()

  def _close_output(self) -> None:
    if self.output_fd is not None:
      os.close(self.output_fd)
      self.output_fd = None

  def _bury(self) -> None:
    try:
      status = self._reaper.wait(_REAP_SECONDS)
    except subprocess.TimeoutExpired:
      self._reaper.kill()
      status = self._reaper.wait()
    if self.status is None:
      self.reaper_was_killed = True
      self.status = status or 1
      self.ended_at = time.monotonic_ns()
      if self.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
          os.killpg(self.pid, signal.SIGKILL)
    self._drain()
    self._sink.end_line()
    self.close()
    self.is_gone = True

  def read_output(self) -> int:
    """Reads once what the command has written; the number of bytes."""
    if self.output_fd is None:
      return 0
    try:
      data = os.read(self.output_fd, _READ_BYTES)
    except BlockingIOError:
      return 0
    if data:
      self._sink.feed(data)
    else:
      self._close_output()
    return len(data)

  def _drain(self) -> None:
    total = 0
    while total < _MOST_DRAINED and (count := self.read_output()):
      total += count


def kill_orphans(keep: AbstractSet[int]) -> None:
  """Kills what killed reapers left below this process, where Linux tells.

  Args:
    keep: pids of the children that stay alive, with all below them.
  """
  killed: set[int] = set()
  ends_at = time.monotonic() + _KILL_SECONDS
  # What was killed may have left children, which are adopted in turn.
  while found := reaper.signal_below(os.getpid(), signal.SIGKILL, keep):
    killed.update(found)
    if time.monotonic() > ends_at:
      break
    time.sleep(_POLL_SECONDS)
  for pid in killed:
    with contextlib.suppress(ChildProcessError):
      os.waitpid(pid, os.WNOHANG)
