"""Runs a benchmark as a user would."""

import json
import os

from benchmarks import processes

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
DEADLINE_SECONDS = 280


def run_benchmark(module, *flags):
  """Returns the finished process; its workers end with it."""
  return processes.run_python(
    *('-m', f'benchmarks.{module}', *flags),
    cwd=ROOT,
    deadline_seconds=DEADLINE_SECONDS,
  )


def read_json(path):
  """Returns what a report says."""
  with open(path, encoding='utf-8') as f:
    return json.load(f)
