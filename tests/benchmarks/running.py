"""Runs a benchmark as a user would."""

import json
import os

from benchmarks import processes
from tools.pages import measurements

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
DEADLINE_SECONDS = 280


def run_benchmark(module, *flags):
  """Returns the finished process. Its workers end with it."""
  return processes.run_python(
    *('-m', f'benchmarks.{module}', *flags),
    cwd=ROOT,
    deadline_seconds=DEADLINE_SECONDS,
  )


def read_json(path):
  """Returns the contents of a JSON report."""
  with open(path, encoding='utf-8') as f:
    return json.load(f)


def assert_has_table(test, path):
  """Checks that a report has all values for the documents, and no local paths."""
  content = read_json(path)
  made = measurements.blocks({'it': content})
  test.assertNotEmpty(made)
  for block in made.values():
    test.assertIn(f'python -m benchmarks.{content["benchmark"]} ', block)
  test.assertNotIn(os.path.dirname(path), json.dumps(content))
