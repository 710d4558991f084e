"""Starts the examples as a user does, each with a deadline."""

import contextlib
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import examples

DEADLINE_SECONDS = 240
ROOT = pathlib.Path(examples.__file__).resolve().parents[1]


class Program:
  """A running example; its output goes to a file, which never blocks it.

  Args:
    name: module in `examples`.
    *flags: its command line.
    output: path of a file for stdout and stderr.
    launcher: flags of the launcher, for a job of several tasks.
    environment: variables for it besides.
    as_file: whether to start it as `python examples/<name>.py`, and not as
      `python -m examples.<name>`.
  """

  def __init__(
    self,
    name: str,
    *flags: str,
    output: str,
    launcher: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    as_file: bool = False,
  ):
    program = [f'examples/{name}.py'] if as_file else ['-m', f'examples.{name}']
    command = [sys.executable, *program, *flags]
    if launcher:
      launch = [sys.executable, '-m', 'tf_strategies.launch']
      command = [*launch, *launcher, '--', *command]
    self._output = output
    # The caller's idea of a cluster or of devices must not reach it.
    variables = {k: v for k, v in os.environ.items() if k != 'TF_CONFIG'}
    # A file finds what is beside it by itself.
    paths = [p for p in sys.path if p and not (as_file and p == str(ROOT))]
    variables['PYTHONPATH'] = os.pathsep.join(paths)
    variables['PYTHONUNBUFFERED'] = '1'
    variables.update(environment or {})
    with open(output, 'wb') as f:
      self._process = subprocess.Popen(
        command,
        stdout=f,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=variables,
      )
    self._deadline = time.monotonic() + DEADLINE_SECONDS

  def output(self) -> str:
    """What it has printed so far."""
    return pathlib.Path(self._output).read_text(encoding='utf-8')

  def wait(self) -> int:
    """Waits until it ends; returns its exit code."""
    try:
      return self._process.wait(self._deadline - time.monotonic())
    except subprocess.TimeoutExpired:
      self.kill()
      raise AssertionError(f'it did not end:\n{self.output()}') from None

  def wait_until(self, condition: Callable[[], bool]) -> None:
    """Waits until `condition()`; the program must still run then."""
    while not condition():
      if self._process.poll() is not None:
        raise AssertionError(f'it ended too early:\n{self.output()}')
      if time.monotonic() > self._deadline:
        self.kill()
        raise AssertionError(f'it never came so far:\n{self.output()}')
      time.sleep(0.01)

  def kill(self) -> int:
    """Ends it with SIGKILL, if it still runs; returns its exit code."""
    self._process.kill()
    return self._process.wait()

  def pid_of(self, task_type: str, index: int = 0) -> int:
    """The process id of a task that the launcher started."""
    name = f'"task": {{"type": "{task_type}", "index": {index}}}'.encode()
    for pid in _descendants(self._process.pid):
      with contextlib.suppress(OSError):
        environment = pathlib.Path(f'/proc/{pid}/environ').read_bytes()
        command = pathlib.Path(f'/proc/{pid}/cmdline').read_bytes()
        # Its guard, which has the same environment, comes before it.
        if name in environment and b'guard.py' not in command:
          return pid
    raise AssertionError(f'no {task_type} {index} runs:\n{self.output()}')

  def signal(self, number: int) -> int:
    """Sends it a signal that makes it end; returns its exit code."""
    self._process.send_signal(number)
    return self.wait()


def _descendants(pid: int) -> list[int]:
  """All processes that come from this one, its children first."""
  parents = {}
  for path in pathlib.Path('/proc').glob('[0-9]*/stat'):
    with contextlib.suppress(OSError):
      # The name, in parentheses, may hold anything.
      fields = path.read_text().rpartition(')')[2].split()
      parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
  found = parents.get(pid, [])
  return [*found, *(d for child in found for d in _descendants(child))]
