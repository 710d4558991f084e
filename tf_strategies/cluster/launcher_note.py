"""The note by which an elastic job tells its launcher that others may go on.

A launcher ends a job when one of its tasks fails. In an elastic job the workers
decide who goes on, and the launcher does not know of it until one of them says so:
it writes into an open file of the launcher, which a variable of the environment
names. The file has no name of its own, so nothing is left of it.

Example:

  >>> from tf_strategies.cluster import launcher_note
  >>> with launcher_note.Note() as note:
  ...   launcher_note.say_elastic({launcher_note.VARIABLE: note.path})
  ...   note.is_written
  True
"""

import contextlib
import os
import tempfile
from collections.abc import Mapping

VARIABLE = 'TFS_LAUNCHER_NOTE'


class Note:
  """The launcher's side; a context.

  Attributes:
    path: the value of `VARIABLE`, for the tasks. It exists on Linux only.
  """

  def __init__(self):
    self._file = tempfile.TemporaryFile()  # noqa: SIM115
    self.path = f'/proc/{os.getpid()}/fd/{self._file.fileno()}'

  @property
  def is_written(self) -> bool:
    """Returns whether a task has said that the job is elastic."""
    return os.fstat(self._file.fileno()).st_size > 0

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._file.close()


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
  """Returns whether a launcher started this process."""
  return VARIABLE in environ


def say_elastic(environ: Mapping[str, str] = os.environ) -> None:
  """Tells the launcher, if there is one, that this job is elastic."""
  if not is_launched(environ):
    return
  # The launcher may be gone, or on another host.
  with contextlib.suppress(OSError):
    # Another process may have its number, and a pipe would let this one wait.
    fd = os.open(environ[VARIABLE], os.O_WRONLY | os.O_NONBLOCK)
    try:
      # A note has no name: a file with one belongs to somebody else.
      if not os.fstat(fd).st_nlink:
        os.write(fd, b'elastic\n')
    finally:
      os.close(fd)
