"""Runs an epoch of a pipeline against a training step that only sleeps.

Example:

  >>> import tensorflow as tf
  >>> from benchmarks.input_pipeline import epoch
  >>> result = epoch.run(tf.data.Dataset.range(10).batch(4))
  >>> result.num_steps, result.num_items
  (3, 10)
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Epoch:
  """How long an epoch took.

  Attributes:
    seconds: from before the iterator was made until the end.
    first_batch_s: from then until the first batch was there.
    fetch_s: in which the consumer waited for batches.
    num_steps: batches.
    num_items: rows of the first component of all batches.
  """

  seconds: float
  first_batch_s: float
  fetch_s: float
  num_steps: int
  num_items: int


def run(dataset: tf.data.Dataset, train_step_s: float = 0.0) -> Epoch:
  """Iterates a dataset to its end.

  Args:
    dataset: of finite length.
    train_step_s: how long the consumer sleeps with each batch.
  """
  start = time.perf_counter()
  iterator = iter(dataset)
  first_batch_s = fetch_s = 0.0
  steps = items = 0
  asked = start
  while (batch := next(iterator, None)) is not None:
    waited = time.perf_counter() - asked
    if not steps:
      first_batch_s = waited
    fetch_s += waited
    steps += 1
    items += num_rows(batch)
    # A training step holds on to its batch no longer than this.
    del batch
    if train_step_s:
      time.sleep(train_step_s)
    asked = time.perf_counter()
  return Epoch(
    time.perf_counter() - start, first_batch_s, fetch_s, steps, items
  )


def num_rows(batch: Any) -> int:
  """The length of the first component of a batch; 1 for a scalar.

  Args:
    batch: an element of a dataset.
  """
  components = tf.nest.flatten(batch, expand_composites=True)
  if not components or components[0].shape.rank == 0:
    return 1
  return int(components[0].shape[0])
