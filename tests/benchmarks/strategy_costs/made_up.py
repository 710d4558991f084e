"""Invented results of a run, for tests of tables."""

MEGABYTE = 1_000_000


def report(rank=0, **changes):
  """Returns the report of a task that trained two epochs of ten steps."""
  return {
    'rank': rank,
    'is_chief': rank == 0,
    'iterations': 20,
    'steps': 20,
    'examples_per_second': 5000.0,
    'bytes_per_step': (None, None),
    'variable_bytes': {'CPU:0': MEGABYTE},
    'test': {'loss': 0.2, 'accuracy': 0.9},
    'timed_epochs': [
      {'seconds': 1.5, 'rows': 640, 'loopback_bytes': 30 * MEGABYTE},
      {'seconds': 1.0, 'rows': 640, 'loopback_bytes': 10 * MEGABYTE},
    ],
    **changes,
  }
