"""Signals as something to poll, instead of code that runs between two lines.

Example:

  >>> import os, signal
  >>> from tf_strategies.launch import signals
  >>> with signals.Inbox([signal.SIGUSR1]) as inbox:
  ...   os.kill(os.getpid(), signal.SIGUSR1)
  ...   inbox.read() == [signal.SIGUSR1]
  True
"""

import os
import signal
from collections.abc import Sequence


class Inbox:
  """A context in which some signals only arrive in a pipe.

  Works in the main thread alone, as Python's signal handling does.

  Args:
    numbers: the signals. The one that stands for a closed terminal, SIGHUP,
      is left alone where it is ignored: that is what `nohup` asks for.
  """

  def __init__(self, numbers: Sequence[int]):
    self._numbers = numbers

  def __enter__(self) -> 'Inbox':
    self._read_end, self._write_end = os.pipe()
    for end in (self._read_end, self._write_end):
      os.set_blocking(end, False)
    self._wakeup = signal.set_wakeup_fd(
      self._write_end, warn_on_full_buffer=False
    )
    self._handlers = {}
    for number in self._numbers:
      ignored = signal.getsignal(number) == signal.SIG_IGN
      if not (ignored and number == signal.SIGHUP):
        # The wakeup pipe is the message; the handler is there because
        # Python fills the pipe for handled signals only.
        self._handlers[number] = signal.signal(number, lambda *_: None)
    return self

  def __exit__(self, *_) -> None:
    for number, handler in self._handlers.items():
      signal.signal(number, handler)
    signal.set_wakeup_fd(self._wakeup)
    os.close(self._read_end)
    os.close(self._write_end)

  def fileno(self) -> int:
    """Readable when a signal has arrived."""
    return self._read_end

  def read(self) -> list[int]:
    """The signals since the last call, in their order."""
    try:
      return [n for n in os.read(self._read_end, 512) if n in self._handlers]
    except BlockingIOError:
      return []
