"""The note by which tasks tell their launcher whether others may go on without one.

A launcher ends a job when one of its tasks fails. In an elastic job the workers
decide who goes on, and the launcher does not know of it until one of them says so:
it writes into an open file of the launcher, which a variable of the environment
names. The workers of a fixed group say so too, and the launcher need not wait
for a word. The file has no name of its own, so nothing is left of it.

Example:

  >>> from tf_strategies.cluster import launcher_note
  >>> with launcher_note.Note() as note:
  ...   launcher_note.say_elastic({launcher_note.VARIABLE: note.path})
  ...   _ = note.newly_trained()
  ...   note.kind
  'elastic'
"""

import contextlib
import os
import tempfile
from collections.abc import Mapping

VARIABLE = 'TFS_LAUNCHER_NOTE'
# What a task may say of its job.
ELASTIC, FIXED = 'elastic', 'fixed'


class Note:
  """The launcher's side; a context.

  Attributes:
    path: the value of `VARIABLE`, for the tasks. It exists on Linux only.
    kind: what tasks have said of the job, `ELASTIC` or `FIXED`, when the note was
      last read; '' if nothing.
  """

  def __init__(self):
    self._file = tempfile.TemporaryFile()  # noqa: SIM115
    self._read = 0
    self.path = f'/proc/{os.getpid()}/fd/{self._file.fileno()}'
    self.kind = ''

  def newly_trained(self) -> list[str]:
    """Reads the note.

    Returns:
      The tasks that said, since the last call, that they have trained.
    """
    fd = self._file.fileno()
    data = os.pread(fd, os.fstat(fd).st_size - self._read, self._read)
    # The last line may be incomplete.
    data = data[: data.rfind(b'\n') + 1]
    self._read += len(data)
    words = [line.partition(' ') for line in data.decode().splitlines()]
    for word, _, _ in words:
      self.kind = stronger(self.kind, word)
    return [task for word, _, task in words if word == 'trained']

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._file.close()


def stronger(kind: str, said: str) -> str:
  """Returns the kind of a job of which something else is said."""
  # A program may use a fixed strategy too, before it trains elastically.
  if said == ELASTIC or (said == FIXED and not kind):
    return said
  return kind


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
  """Returns whether a launcher started this process."""
  return VARIABLE in environ


def say_elastic(environ: Mapping[str, str] = os.environ) -> None:
  """Tells the launcher, if there is one, that this job is elastic."""
  _say(ELASTIC, environ)


def say_fixed(environ: Mapping[str, str] = os.environ) -> None:
  """Tells the launcher, if there is one, that no task can go on without another."""
  _say(FIXED, environ)


def say_trained(task: str, environ: Mapping[str, str] = os.environ) -> None:
  """Tells the launcher that a task has trained to the end, with the others.

  The launcher lets it write its results, also if it was started again before.

  Args:
    task: its name, such as 'worker 1'.
    environ: the environment that names the launcher's file.
  """
  _say(f'trained {task}', environ)


def _say(line: str, environ: Mapping[str, str]) -> None:
  if not is_launched(environ):
    return
  # The launcher may be gone, or on another host.
  with contextlib.suppress(OSError):
    # Another process may have its number, and a pipe would let this one wait.
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK
    fd = os.open(environ[VARIABLE], flags)
    try:
      # A note has no name: a file with one belongs to somebody else.
      if not os.fstat(fd).st_nlink:
        os.write(fd, f'{line}\n'.encode())
    finally:
      os.close(fd)
