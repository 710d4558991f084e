"""Runs programs in processes. Each has a deadline, and is ended by its process id.

Benchmarks and tests start every program with `Command`, or with `run` to only wait
for its end (`tests/architecture/runner_test.py` checks this). `worker_pool` adds
workers that answer commands, and `tests/processes.py` workers that call a function.

Example:

  >>> from benchmarks import processes
  >>> with processes.Command(['echo', 'hello']) as command:
  ...   status = command.wait()
  >>> status, command.output()
  (0, 'hello\\n')
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from tf_strategies import errors

try:
  import psutil
except ImportError:  # Without it, child processes of programs are not ended.
  psutil = None

DEADLINE_SECONDS = 240.0
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.01
_TAIL_BYTES = 5000


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
  """Makes SIGTERM raise an exception, like Ctrl-C, so that `with` blocks clean up."""

  def leave(number, frame):
    raise SystemExit(128 + number)

  before = signal.signal(signal.SIGTERM, leave)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, before)


def environment(
  changes: Mapping[str, str] | None = None, without: Sequence[str] = ()
) -> dict[str, str]:
  """Returns this process's environment variables, without its cluster and proxies.

  Processes connect directly, and must not inherit the cluster of this process.

  Args:
    changes: variables to set.
    without: further variables to remove.
  """
  kept = {
    name: value
    for name, value in os.environ.items()
    if not name.lower().endswith('_proxy')
    and name not in ('TF_CONFIG', *without)
  }
  return {**kept, 'TF_CPP_MIN_LOG_LEVEL': '2', **(changes or {})}


def python_environment(
  changes: Mapping[str, str] | None = None, without: Sequence[str] = ()
) -> dict[str, str]:
  """Returns `environment` for a program that imports the same modules as this one."""
  paths = os.pathsep.join(filter(None, sys.path))
  return environment({'PYTHONPATH': paths, **(changes or {})}, without)


class Command:
  """A program in its own process. The context manager ends it at exit.

  Its output goes to a file, so that it never blocks.

  Args:
    words: the program and its arguments.
    name: name in messages. Default: the name of the program.
    log: file for stdout and stderr. Default: a temporary file.
    error_log: file for stderr. Default: `log`.
    env: all environment variables. Default: `environment()`.
    cwd: working directory.
    deadline_seconds: seconds, times TFS_DEADLINE_FACTOR, after which `wait` and
      `wait_until` fail.
    grace_seconds: seconds from SIGTERM to SIGKILL in `close`. 0 kills immediately.
    **options: options of `subprocess.Popen`, such as `stdout=` or `pass_fds=`.

  Attributes:
    process: the `subprocess.Popen`.

  Raises:
    WorkerUnavailableError: if the program cannot be started.
  """

  def __init__(
    self,
    words: Sequence[str],
    *,
    name: str = '',
    log: str | os.PathLike | None = None,
    error_log: str | os.PathLike | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    grace_seconds: float = 0.0,
    **options,
  ):
    self.name = name or os.path.basename(words[0])
    self._stack = contextlib.ExitStack()
    self._grace_seconds = grace_seconds
    factor = float(os.environ.get('TFS_DEADLINE_FACTOR', '1'))
    self._deadline_seconds = deadline_seconds * factor
    self._ends_at = time.monotonic() + self._deadline_seconds
    if log is None:
      directory = self._stack.enter_context(tempfile.TemporaryDirectory())
      log = pathlib.Path(directory, 'log')
    self._log = pathlib.Path(log)
    self._error_log = pathlib.Path(error_log) if error_log else None
    self._last_output: bytes | None = None
    try:
      with contextlib.ExitStack() as files:
        file = files.enter_context(open(self._log, 'wb'))
        streams = {
          'stdin': subprocess.DEVNULL,
          'stdout': file,
          'stderr': files.enter_context(open(error_log, 'wb'))
          if error_log
          else file,
        }
        self.process = subprocess.Popen(
          words,
          cwd=cwd,
          env=environment() if env is None else env,
          **{**streams, **options},
        )
    except OSError as e:
      self._stack.close()
      raise errors.WorkerUnavailableError(
        f'{self.name}: cannot run {words[0]} ({e}). Name a program that exists.'
      ) from e

  @property
  def pid(self) -> int:
    """Returns the process id."""
    return self.process.pid

  def is_alive(self) -> bool:
    """Returns whether the program is running."""
    return self.process.poll() is None

  def output(self) -> str:
    """Returns the output so far."""
    return self._read().decode('utf-8', 'replace')

  def tail(self, num_bytes: int = _TAIL_BYTES) -> str:
    """Returns the end of the output so far."""
    return self._read()[-num_bytes:].decode('utf-8', 'replace').strip()

  def wait(self) -> int:
    """Waits until the program ends, and returns its exit status.

    Raises:
      WorkerUnavailableError: if it did not end before the deadline. It is killed.
    """
    try:
      return self.process.wait(max(0.0, self._ends_at - time.monotonic()))
    except subprocess.TimeoutExpired:
      self.kill_all()
      self.fail(f'did not end within {self._deadline_seconds:g} s')

  def wait_until(self, condition: Callable[[], bool]) -> None:
    """Waits until `condition()` is true while the program runs.

    Raises:
      WorkerUnavailableError: if the program ended, or the deadline passed.
    """
    while not condition():
      if not self.is_alive():
        self.fail(f'ended too early, with status {self.process.returncode}')
      if time.monotonic() > self._ends_at:
        self.kill_all()
        self.fail(f'did not get there within {self._deadline_seconds:g} s')
      time.sleep(_POLL_SECONDS)

  def signal(self, number: int) -> None:
    """Sends a signal to the program."""
    self.process.send_signal(number)

  def kill(self) -> int:
    """Kills the program, and returns its exit status."""
    self.process.kill()
    return self.process.wait(_GRACE_SECONDS)

  def kill_all(self) -> int:
    """Kills the program and its descendants, and returns its exit status."""
    below = self.descendants()
    self.process.kill()
    for process in below:
      with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()  # psutil checks that the id was not reused.
    if below:
      psutil.wait_procs(below, _GRACE_SECONDS)
    return self.process.wait(_GRACE_SECONDS)

  def descendants(self) -> list[psutil.Process]:
    """Returns the descendants of the program, or nothing without psutil."""
    if psutil is None or not self.is_alive():
      return []
    try:
      return psutil.Process(self.pid).children(recursive=True)
    except psutil.NoSuchProcess:
      return []

  def close(self) -> None:
    """Ends the program and its child processes. May be called twice."""
    if self.is_alive() and self._grace_seconds:
      below = self.descendants()
      self.process.terminate()
      with contextlib.suppress(subprocess.TimeoutExpired):
        self.process.wait(self._grace_seconds)
      for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
          process.kill()
    if self.is_alive():
      self.kill_all()
    self._last_output = self._read()
    self._stack.close()

  def fail(self, what: str) -> None:
    """Raises an error with the end of the program's output.

    Args:
      what: the failure as a predicate, such as 'ended too early'.

    Raises:
      WorkerUnavailableError: always.
    """
    last = self.tail()
    if self._error_log:
      written = self._error_log.read_bytes()[-_TAIL_BYTES:]
      last = f'{last}\n{written.decode("utf-8", "replace")}'.strip()
    raise errors.WorkerUnavailableError(
      f'{self.name} {what}. It wrote last:\n{last or "nothing"}'
    )

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self.close()

  def _read(self) -> bytes:
    if self._last_output is not None:
      return self._last_output
    return self._log.read_bytes() if self._log.exists() else b''


def run(
  words: Sequence[str], *, is_checked: bool = False, **options
) -> subprocess.CompletedProcess[str]:
  """Runs a program to its end. Returns its status, stdout and stderr as text.

  Args:
    words: the program and its arguments.
    is_checked: whether a status other than 0 is an error.
    **options: options of `Command`, except `log` and `error_log`.

  Raises:
    WorkerUnavailableError: if it cannot be started, did not end before the deadline,
      or failed and `is_checked` is true.
  """
  with tempfile.TemporaryDirectory() as directory:
    out, err = (pathlib.Path(directory, name) for name in ('out', 'err'))
    with Command(words, log=out, error_log=err, **options) as command:
      status = command.wait()
      if is_checked and status:
        command.fail(f'ended with status {status}')
    return subprocess.CompletedProcess(
      words,
      status,
      out.read_text(encoding='utf-8', errors='replace'),
      err.read_text(encoding='utf-8', errors='replace'),
    )


def run_python(
  *arguments: str, env: Mapping[str, str] | None = None, **options
) -> subprocess.CompletedProcess[str]:
  """Calls `run` with this interpreter, as in `run_python('-c', program)`.

  Args:
    *arguments: arguments of the interpreter.
    env: variables to set, in addition to `python_environment()`.
    **options: options of `run`.
  """
  words = [sys.executable, *arguments]
  return run(words, env=python_environment(env), **options)
