"""Starts the examples as a user does, each with a deadline."""

import pathlib
import sys
from collections.abc import Sequence

import examples
from benchmarks import processes

DEADLINE_SECONDS = 240
ROOT = pathlib.Path(examples.__file__).resolve().parents[1]


class Program(processes.Command):
  """A running example. Its output goes to a file, so that it never blocks.

  Args:
    name: module in `examples`.
    *flags: command line of the example.
    output: path of a file for stdout and stderr.
    launcher: flags of the launcher, for a job of several tasks.
  """

  def __init__(
    self,
    name: str,
    *flags: str,
    output: str,
    launcher: Sequence[str] = (),
  ):
    command = [sys.executable, '-m', f'examples.{name}', *flags]
    if launcher:
      launch = [sys.executable, '-m', 'tf_strategies.launch']
      command = [*launch, *launcher, '--', *command]
    super().__init__(
      command,
      name=name,
      log=output,
      cwd=ROOT,
      # The caller's settings for clusters and devices must not reach it.
      env=processes.python_environment({'PYTHONUNBUFFERED': '1'}),
      deadline_seconds=DEADLINE_SECONDS,
    )
