"""One attempt at a task: its reaper, its output and how it ended."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from tf_strategies.launch import output, reaper

_READ_BYTES = 1 << 16
# The most that a full pipe holds, in reads.
_MOST_DRAINED = 16


class TaskProcess:
  """A command under its reaper, in a session of its own.

  `grace_period` is the time that the reaper leaves between a signal, or the end of
  this process, and SIGKILL.

  Attributes:
    channel: readable when `read_channel()` is to be called.
    output: readable when `read_output()` is to be called; closed when all was read.
    status: None until the command has ended; then its exit status, or minus
      the signal that killed it.
    ended_at: when that was, in nanoseconds of the monotonic clock.
    is_gone: whether nothing is left of it, the reaper included.

  Example:

    >>> import io, select
    >>> out = io.BytesIO()
    >>> lines = output.TaskOutput(b'[a] ', out.write)
    >>> process = TaskProcess(['sh', '-c', 'echo hi; exit 3'], {}, 1.0, lines)
    >>> while not process.is_gone:
    ...   _ = select.select([process.channel], [], [], 1.0)
    ...   process.read_channel()
    >>> process.status, out.getvalue()
    (3, b'[a] hi\\n')
  """

  def __init__(
    self,
    command: Sequence[str],
    environment: Mapping[str, str],
    grace_period: float,
    sink: output.TaskOutput,
  ):
    self.status: int | None = None
    self.ended_at = 0
    self.is_gone = False
    self._sink = sink
    self.channel, theirs = socket.socketpair()
    program = [sys.executable, '-I', '-S', reaper.__file__]
    with theirs:
      self._reaper = subprocess.Popen(
        [*program, str(theirs.fileno()), str(grace_period), '--', *command],
        bufsize=0,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(theirs.fileno(),),
        start_new_session=True,
      )
    self.output = self._reaper.stdout
    os.set_blocking(self.output.fileno(), False)

  def send(self, number: int) -> None:
    """Sends a signal to the process group; SIGKILL reaches all below it."""
    # If the reaper is gone, `read_channel()` will say so.
    with contextlib.suppress(OSError):
      self.channel.send(bytes([number]))

  def read_channel(self) -> None:
    """Reads the reaper's report; the end of the channel is the reaper's end."""
    try:
      heard = self.channel.recv(_READ_BYTES)
    except OSError:
      heard = b''
    if heard:
      self.status, self.ended_at = map(int, heard.split())
      return
    self._reaper.wait()
    if self.status is None:
      # Somebody killed the reaper, and the task with it.
      self.status, self.ended_at = -signal.SIGKILL, time.monotonic_ns()
    for _ in range(_MOST_DRAINED):
      self.read_output()
    self._sink.end_line()
    self.close()
    self.is_gone = True

  def close(self) -> None:
    """Closes the channel; a reaper that still runs then ends the task."""
    self.channel.close()
    self.output.close()

  def read_output(self) -> None:
    """Reads once what the command has written."""
    if self.output.closed:
      return
    data = self.output.read(_READ_BYTES)
    if data:
      self._sink.feed(data)
    elif data is not None:  # The end, and not a pipe that is empty now.
      self.output.close()
