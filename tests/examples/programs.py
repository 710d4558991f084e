"""Runs the examples from the command line."""

import pathlib
import sys

import examples
from benchmarks import processes

ROOT = pathlib.Path(examples.__file__).resolve().parents[1]


def run(name, *arguments, launcher=(), cwd=ROOT):
  """Runs an example, in a launcher if `launcher` is not empty. Returns the process."""
  program = [str(ROOT / 'examples' / f'{name}.py'), *arguments]
  if launcher:
    launch = ['-m', 'tf_strategies.launch', *launcher, '--', sys.executable]
    program = [*launch, *program]
  return processes.run_python(*program, cwd=cwd)
