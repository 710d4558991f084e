"""Starts the examples as a user does, each with a deadline."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

import examples
from benchmarks import processes

DEADLINE_SECONDS = 240
ROOT = pathlib.Path(examples.__file__).resolve().parents[1]
_SPREAD = """
from tf_strategies.strategies.parameter_server import extended
extended.SPREAD_BYTES = 1
from examples import common, {0}
common.run({0}.main)
"""


class Program(processes.Command):
  """A running example. Its output goes to a file, so that it never blocks.

  Args:
    name: module in `examples`.
    *flags: command line of the example.
    output: path of a file for stdout and stderr.
    launcher: flags of the launcher, for a job of several tasks.
    environment: additional environment variables.
    spreads_variables: whether parameter servers share small variables too, as they
      share large ones.
  """

  def __init__(
    self,
    name: str,
    *flags: str,
    output: str,
    launcher: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    spreads_variables: bool = False,
  ):
    program = ['-m', f'examples.{name}']
    if spreads_variables:
      program = ['-c', _SPREAD.format(name)]
    command = [sys.executable, *program, *flags]
    if launcher:
      launch = [sys.executable, '-m', 'tf_strategies.launch']
      command = [*launch, *launcher, '--', *command]
    # The caller's settings for clusters and devices must not reach the example.
    variables = {
      'PYTHONPATH': os.pathsep.join(filter(None, sys.path)),
      'PYTHONUNBUFFERED': '1',
      **(environment or {}),
    }
    super().__init__(
      command,
      name=name,
      log=output,
      cwd=ROOT,
      env=processes.environment(variables),
      deadline_seconds=DEADLINE_SECONDS,
    )

  def pid_of(self, task_type: str, index: int = 0) -> int:
    """Returns the process id of a task that the launcher started."""
    name = f'"task": {{"type": "{task_type}", "index": {index}}}'.encode()
    for pid in (process.pid for process in self.descendants()):
      with contextlib.suppress(OSError):
        environment = pathlib.Path(f'/proc/{pid}/environ').read_bytes()
        command = pathlib.Path(f'/proc/{pid}/cmdline').read_bytes()
        # Its reaper has the same environment and a lower process id.
        if name in environment and b'reaper.py' not in command:
          return pid
    raise AssertionError(f'no {task_type} {index} runs:\n{self.output()}')

  def end(self, number: int) -> int:
    """Sends a signal that ends the example, and returns its exit status."""
    self.signal(number)
    return self.wait()
