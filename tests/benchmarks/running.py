"""Runs a benchmark as a user would."""

import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
DEADLINE_SECONDS = 280


def environment():
  """This process's, with what it can import."""
  return {**os.environ, 'PYTHONPATH': os.pathsep.join([ROOT, *sys.path])}


def run_benchmark(module, *flags):
  """Returns the finished process; its workers end with it."""
  return subprocess.run(
    [sys.executable, '-m', f'benchmarks.{module}', *flags],
    cwd=ROOT,
    env=environment(),
    capture_output=True,
    text=True,
    timeout=DEADLINE_SECONDS,
    check=False,
  )


def read_json(path):
  """Returns what a report says."""
  with open(path, encoding='utf-8') as f:
    return json.load(f)
