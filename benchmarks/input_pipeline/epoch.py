"""Runs an epoch of a pipeline against a training step that only sleeps.

Example:

  >>> from benchmarks.input_pipeline import epoch
  >>> found = epoch.run([[1, 2, 3], [4, 5]], 0.0, len)
  >>> found['num_steps'], found['num_items']
  (2, 5)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any


def run(
  batches: Iterable[Any], train_step_s: float, num_rows: Callable[[Any], int]
) -> dict[str, float]:
  """Iterates batches to their end.

  Args:
    batches: of one epoch.
    train_step_s: how long the consumer sleeps with each batch.
    num_rows: returns the rows of a batch.

  Returns:
    `seconds` from before the iterator was made until the end, `first_batch_s`
    from then until the first batch was there, `num_steps` and `num_items`.
  """
  start = time.perf_counter()
  iterator = iter(batches)
  first = 0.0
  steps = items = 0
  while (batch := next(iterator, None)) is not None:
    if not steps:
      first = time.perf_counter() - start
    steps += 1
    items += num_rows(batch)
    # A training step holds on to its batch no longer than this.
    del batch
    if train_step_s:
      time.sleep(train_step_s)
  return {
    'seconds': time.perf_counter() - start,
    'first_batch_s': first,
    'num_steps': steps,
    'num_items': items,
  }
