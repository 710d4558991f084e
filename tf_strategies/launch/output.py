"""Lines of many tasks on one terminal, each whole and with its task's name.

Nothing here blocks on a reader that has stopped reading, such as a pager: the
launcher must stay able to pass on a signal.

Example:

  >>> import io
  >>> from tf_strategies.launch import output
  >>> written = io.BytesIO()
  >>> lines = output.TaskOutput(b'[ps 0] ', written.write)
  >>> lines.feed(b'one\\ntw')
  >>> lines.feed(b'o\\n')
  >>> written.getvalue()
  b'[ps 0] one\\n[ps 0] two\\n'
"""

import collections
import os
import re
import select
import signal
import time
from collections.abc import Callable
from typing import BinaryIO

TAIL_LINES = 20

# A line that grows longer is shown in pieces: it may never end.
_LONGEST_LINE = 8 << 20
# How often a line is shown that its task overwrites, such as a progress bar.
_PROGRESS_SECONDS = 10
_LONGEST_IN_TAIL = 2000
# A pipe that poll() calls writable takes this much without blocking (POSIX).
_ATOMIC = min(select.PIPE_BUF, 4096)
_TRACEBACK = b'Traceback (most recent call last)'
_NOTICE = re.compile(
  rb'WARNING: All log messages before absl::InitializeLog\(\) is called|'
  rb'I0000 [0-9:.]+ +[0-9]+ \S+\] '
)


class OutputQueue:
  """A queue of bytes in front of a file descriptor.

  Args:
    fd: the descriptor. Its mode is left alone: it may be a terminal that is shared.
  """

  def __init__(self, fd: int):
    self.fd = fd
    # Bytes leave at its front without a copy of the rest.
    self._queue = bytearray()

  @property
  def pending(self) -> int:
    """Number of bytes that wait to be written."""
    return len(self._queue)

  def write(self, data: bytes) -> None:
    """Queues `data`; never blocks."""
    self._queue += data

  def flush_some(self) -> None:
    """Writes as much as cannot block; call it when poll() says writable."""
    try:
      count = os.write(self.fd, self._queue[:_ATOMIC])
    except BlockingIOError:
      return
    except OSError:  # Nobody reads.
      count = self.pending
    del self._queue[:count]


class TaskOutput:
  """Cuts what a task writes into lines, and remembers the last of them.

  Args:
    prefix: put before each line.
    write: takes each line, prefix and line end included, in one call.
    log: takes the bytes as they come; closed by `close()`.

  Attributes:
    hides_tracebacks: whether a traceback and the lines after it go to the log
      alone: after Ctrl-C each task has one to show.
  """

  def __init__(
    self,
    prefix: bytes,
    write: Callable[[bytes], object],
    log: BinaryIO | None = None,
  ):
    self.hides_tracebacks = False
    self._hides_notices = self._is_hidden = False
    self._prefix = prefix
    self._write = write
    self._log = log
    self._partial = bytearray()
    self._shown = time.monotonic()
    self._tail: collections.deque[bytes] = collections.deque(maxlen=TAIL_LINES)

  def begin(self, hides_notices: bool) -> None:
    """Begins the output of another attempt.

    Args:
      hides_notices: whether TensorFlow's first lines go to the log alone. TensorFlow
        writes them before it reads TF_CPP_MIN_LOG_LEVEL.
    """
    self._hides_notices = hides_notices
    self._tail.clear()

  def feed(self, data: bytes) -> None:
    """Takes what the task wrote; O(len(data)).

    Of a line that the task overwrites, only the last text is shown.
    """
    self._write_log(data)
    *ends, rest = data.split(b'\n')
    for end in ends:
      self._partial += end
      self._emit()
    self._partial += rest
    if b'\r' in rest:
      now = time.monotonic()
      self._partial[:] = _last_text(self._partial) + b'\r' * rest.endswith(
        b'\r'
      )
      if now - self._shown > _PROGRESS_SECONDS:
        self._shown = now
        self._write(self._prefix + _last_text(self._partial) + b'\n')
    if len(self._partial) > _LONGEST_LINE:
      self._emit()

  def end_line(self) -> None:
    """Ends a line that the task left unfinished."""
    if self._partial:
      self._emit()

  def close(self) -> None:
    """Writes an unfinished line and closes the log."""
    self.end_line()
    if self._log is not None:
      self._log.close()
      self._log = None

  def tail(self) -> list[bytes]:
    """Returns the last lines, without their ends; of long ones the beginning."""
    return list(self._tail)

  def _emit(self) -> None:
    line = _last_text(self._partial)
    self._partial.clear()
    if self._hides_notices and _NOTICE.match(line):
      return
    short = line[:_LONGEST_IN_TAIL]
    if short.strip(b' ^~'):  # Not empty, and no underline of a traceback.
      self._tail.append(short if len(short) == len(line) else short + b'...')
    if self.hides_tracebacks and line.startswith(_TRACEBACK):
      self._is_hidden = True
    if not self._is_hidden:
      self._write(self._prefix + line + b'\n')

  def _write_log(self, data: bytes) -> None:
    if self._log is None:
      return
    try:
      self._log.write(data)
    except OSError as e:
      # A full disk: the job is worth more than its log.
      self._write(self._prefix + f'(no more log: {e})\n'.encode())
      self._log = None


def _last_text(line: bytearray) -> bytes:
  """Returns what a line shows that carriage returns overwrite."""
  return bytes(line.rstrip(b'\r').rpartition(b'\r')[2])


def is_read(fd: int) -> bool:
  """Returns whether somebody is left to read a pipe; of files and terminals, always."""
  poller = select.poll()
  poller.register(fd, 0)
  return not any(
    events & (select.POLLERR | select.POLLHUP) for _, events in poller.poll(0)
  )


def ending(status: int) -> str:
  """Returns how a task ended, in words; `status` is minus the signal that killed it."""
  if status >= 0:
    return f'exit status {status}'
  try:
    return f'killed by {signal.Signals(-status).name}'
  except ValueError:
    return f'killed by signal {-status}'
