"""Runs an epoch of a pipeline with a simulated training step, which sleeps.

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
  """Iterates over all batches.

  Args:
    batches: batches of one epoch.
    train_step_s: seconds for which the consumer sleeps after each batch.
    num_rows: returns the number of rows of a batch.

  Returns:
    `seconds` from the creation of the iterator to the end, `first_batch_s` from
    there to the first batch, `num_steps` and `num_items`.
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
    # A training step does not keep its batch either.
    del batch
    if train_step_s:
      time.sleep(train_step_s)
  return {
    'seconds': time.perf_counter() - start,
    'first_batch_s': first,
    'num_steps': steps,
    'num_items': items,
  }
