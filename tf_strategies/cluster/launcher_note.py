"""The file in which tasks tell their launcher how far they are.

A launcher ends a job when one of its tasks fails. In an elastic job the workers
decide who goes on, so each of them says that it trains elastically, and later that
it has trained to the end. A variable of the environment names the task and the file.

Example:

  >>> import os
  >>> from unittest import mock
  >>> from tf_strategies.cluster import launcher_note
  >>> with launcher_note.Note() as note:
  ...   environ = {launcher_note.VARIABLE: note.variable('worker 1')}
  ...   with mock.patch.dict(os.environ, environ):
  ...     launcher_note.say(launcher_note.ELASTIC)
  ...   note.read()
  [('elastic', 'worker 1')]
"""

import collections
import contextlib
import os
import tempfile

VARIABLE = 'TFS_LAUNCHER_NOTE'
# The task trains in an elastic job; it has trained to the end.
ELASTIC, TRAINED = _WORDS = 'elastic', 'trained'


class Note:
  """The launcher's side of the file; a context that deletes it."""

  def __enter__(self):
    self._file = tempfile.NamedTemporaryFile(prefix='tfs-launch-')
    self._unfinished = b''
    return self

  def __exit__(self, *_):
    self._file.close()

  def variable(self, task: str) -> str:
    """Returns the value of `VARIABLE` for a task, such as 'worker 1'."""
    return f'{task}@{self._file.name}'

  def pass_on(self, word: str, task: str) -> None:
    """Adds what a task of another host has said."""
    _append(word, self.variable(task))

  def read(self) -> list[tuple[str, str]]:
    """Returns each word that was said since the last call, and the task."""
    # A line may be there in part: written across a page, or on a full disk.
    *lines, self._unfinished = (self._unfinished + self._file.read()).split(
      b'\n'
    )
    said = [line.decode().partition(' ') for line in lines]
    return [(word, task) for word, _, task in said if word in _WORDS]


def is_over() -> bool:
  """Returns whether another task has trained to the end, more often than this one.

  Reads what the tasks of this host have said, and what other launchers report.
  """
  own, _, path = os.environ.get(VARIABLE, '').partition('@')
  newest, trained = {}, collections.Counter()
  with contextlib.suppress(OSError), open(path, encoding='utf-8') as file:
    for line in file:
      word, _, task = line.strip().partition(' ')
      newest[task] = word
      trained[task] += word == TRAINED
  return any(
    word == TRAINED and trained[task] > trained[own]
    for task, word in newest.items()
  )


def say(word: str) -> None:
  """Tells the launcher, if there is one, `ELASTIC` or `TRAINED`.

  The launcher lets a task that has trained write its results, and does not start
  it again.
  """
  _append(word, os.environ.get(VARIABLE, ''))


def _append(word: str, variable: str) -> None:
  task, _, path = variable.partition('@')
  # There may be no launcher, or one on another host.
  with contextlib.suppress(OSError):
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
      os.write(fd, f'{word} {task}\n'.encode())
    finally:
      os.close(fd)
