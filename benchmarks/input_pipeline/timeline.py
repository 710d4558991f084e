"""When a pipeline prepared which batch, and when the training step had it.

The pipeline writes down the time itself, before and after each batch, on the
thread that prepares it; the consumer writes down its steps. Stages that run
ahead of the end of the pipeline (a parallel map, a prefetch inside) are not
seen: there, preparing a batch is waiting for it.

Example:

  >>> import tensorflow as tf
  >>> from benchmarks.input_pipeline import timeline
  >>> numbers = tf.data.Dataset.range(40).batch(4)
  >>> found = timeline.record(numbers, 0.002, num_steps=5, prefetch=False)
  >>> len(found.train), 0 < found.idle_share < 1
  (5, True)
"""

from __future__ import annotations

import dataclasses
import time

import tensorflow as tf

from tf_strategies import errors

# The first batches wait for a shuffle buffer to fill, once an epoch.
_SKIPPED = 3


@dataclasses.dataclass(frozen=True)
class Timeline:
  """Some consecutive steps, in seconds from the first request for a batch.

  Attributes:
    prep: when each batch was being prepared, by batch; one that was prepared
      ahead may begin below 0.
    train: when each training step ran.
    seconds: from the first request to the end of the last step.
    idle_share: of that time, in which no step ran.
  """

  prep: list[tuple[float, float]]
  train: list[tuple[float, float]]
  seconds: float
  idle_share: float


def record(
  dataset: tf.data.Dataset,
  train_step_s: float,
  num_steps: int,
  prefetch: bool,
) -> Timeline:
  """Records consecutive steps, after the first three.

  Args:
    dataset: repeated if it is shorter.
    train_step_s: how long the consumer sleeps with each batch.
    num_steps: how many steps to record.
    prefetch: whether to append a prefetch.

  Raises:
    DataError: the dataset is empty.
  """
  stamped = _stamped(dataset.repeat())
  if prefetch:
    stamped = stamped.prefetch(tf.data.AUTOTUNE)
  iterator = iter(stamped)
  prep, train = [], []
  origin = 0.0
  for step in range(_SKIPPED + num_steps):
    if step == _SKIPPED:
      origin = time.time()
    stamps = next(iterator, None)
    if stamps is None:
      raise errors.DataError(
        'the pipeline has no batch; expected at least one for a timeline'
      )
    began = time.time()
    time.sleep(train_step_s)
    if step >= _SKIPPED:
      prep.append(tuple(float(stamp) for stamp in stamps))
      train.append((began, time.time()))
  seconds = train[-1][1] - origin
  busy = sum(end - begin for begin, end in train)
  return Timeline(
    [(begin - origin, end - origin) for begin, end in prep],
    [(begin - origin, end - origin) for begin, end in train],
    seconds,
    1 - busy / seconds,
  )


def _stamped(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """Yields the begin and end of each batch's preparation, in seconds since 1970."""
  # Zip asks its inputs in turn, on one thread.
  begins = tf.data.Dataset.counter().map(lambda _: tf.timestamp())
  ends = tf.data.Dataset.zip((begins, dataset)).map(
    lambda begin, _: (begin, tf.timestamp())
  )
  options = tf.data.Options()
  options.experimental_optimization.map_parallelization = False
  options.experimental_optimization.inject_prefetch = False
  return ends.with_options(options)
