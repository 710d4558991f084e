"""Records when a pipeline prepares batches, and when training steps use them.

The pipeline records the time before and after each batch, in the thread that
prepares it. The consumer records its steps. Stages that run ahead of the end of
the pipeline (a parallel map, a prefetch inside) are not recorded: there, only the
time that is spent waiting for a batch counts as its preparation.

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

# The first batches wait until the shuffle buffer is full.
_SKIPPED = 3


@dataclasses.dataclass(frozen=True)
class Timeline:
  """Some consecutive steps, in seconds from the first request for a batch.

  Attributes:
    prep: begin and end of the preparation of each batch. Negative for batches that
      were prepared ahead.
    train: begin and end of each training step.
    seconds: time from the first request to the end of the last step.
    idle_share: fraction of that time in which no step ran.
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
    dataset: batches, which are repeated if there are too few.
    train_step_s: seconds for which the consumer sleeps after each batch.
    num_steps: number of steps to record.
    prefetch: whether to append a prefetch.

  Raises:
    DataError: if the dataset is empty.
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
  # Zip reads its inputs one after the other, in one thread.
  begins = tf.data.Dataset.counter().map(lambda _: tf.timestamp())
  ends = tf.data.Dataset.zip((begins, dataset)).map(
    lambda begin, _: (begin, tf.timestamp())
  )
  options = tf.data.Options()
  options.experimental_optimization.map_parallelization = False
  options.experimental_optimization.inject_prefetch = False
  return ends.with_options(options)
