"""Shuffles whose order is a function of the seed and of nothing else.

`Dataset.shuffle(seed=...)` also looks at `tf.random.set_seed`: two workers that
called it with different numbers would share examples out of different orders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# What TensorFlow puts beside the seed of an op where no global seed is set.
_GLOBAL_SEED = 87654321
# What tf.data takes for no seed. Its Python functions would put the one of
# `tf.random.set_seed` there: each epoch of a service would have one order.
_NO_SEED = (0, 0)


def shuffle(
  dataset: tf.data.Dataset, buffer_size: int, seed: int | None
) -> tf.data.Dataset:
  """Shuffles anew in each iteration; without a seed also in each run."""
  first, second = _NO_SEED if seed is None else (_GLOBAL_SEED, seed)
  variant = tf.raw_ops.ShuffleDatasetV3(
    input_dataset=tf.data.experimental.to_variant(dataset),
    buffer_size=buffer_size,
    seed=first,
    seed2=second,
    seed_generator=tf.raw_ops.DummySeedGenerator(),
    reshuffle_each_iteration=True,
    **_types(dataset),
  )
  return tf.data.experimental.from_variant(variant, dataset.element_spec)


def shuffle_pass(
  dataset: tf.data.Dataset,
  buffer_size: int,
  seed: int,
  number: int | tf.Tensor,
) -> tf.data.Dataset:
  """Shuffles in the order of pass `number`, the same in each iteration."""
  # Never _NO_SEED.
  seeds = tf.random.stateless_uniform(
    [2], pass_seed(seed, number), 1, 2**62, tf.int64
  )
  variant = tf.raw_ops.ShuffleDataset(
    input_dataset=tf.data.experimental.to_variant(dataset),
    buffer_size=tf.cast(buffer_size, tf.int64),
    seed=seeds[0],
    seed2=seeds[1],
    reshuffle_each_iteration=False,
    **_types(dataset),
  )
  return tf.data.experimental.from_variant(variant, dataset.element_spec)


def permutations(
  n: int, seed: int | None, places: slice, batch: Callable[[tf.Tensor], Any]
) -> tf.data.Dataset:
  """Batches of the numbers below n, shuffled anew in each iteration.

  The whole order is drawn by one op and cut into batches: a shuffle takes a
  step for each element, which costs more than to gather small images.

  Args:
    n: how many numbers.
    seed: None differs from run to run.
    places: which places of the common order are wanted.
    batch: makes a data set of batches of a vector, int64.
  """

  def one_pass(number):
    indices = tf.random.experimental.stateless_shuffle(
      tf.range(n, dtype=tf.int64), seed=tf.stack([number, 0])
    )
    return batch(indices[places])

  return random_numbers(seed).take(1).flat_map(one_pass)


def batches_of(
  indices: tf.Tensor, size: int, drop_remainder: bool
) -> tf.data.Dataset:
  """Batches of a vector of static length, without a step for each element."""
  num_full, rest = divmod(indices.shape[0], size)
  end = num_full * size
  full = tf.reshape(indices[:end], [num_full, size])
  batches = tf.data.Dataset.from_tensor_slices(full)
  if drop_remainder:
    return batches
  # Also where nothing remains: batches of a static shape would tell strategies
  # that no replica ever gets fewer rows.
  last = tf.data.Dataset.from_tensors(indices[end:])
  return batches.concatenate(last.take(min(rest, 1)))


def random_numbers(seed: int | None) -> tf.data.Dataset:
  """Random numbers without an end, others in each iteration; int64 []."""
  first, second = _NO_SEED if seed is None else (_GLOBAL_SEED, seed)
  spec = tf.TensorSpec([], tf.int64)
  variant = tf.raw_ops.RandomDatasetV2(
    seed=first,
    seed2=second,
    seed_generator=tf.raw_ops.DummySeedGenerator(),
    rerandomize_each_iteration=True,
    output_types=[spec.dtype],
    output_shapes=[spec.shape],
  )
  return tf.data.experimental.from_variant(variant, spec)


def pass_seed(seed: int, number: int | tf.Tensor) -> tf.Tensor:
  """The seed of a stateless random op for one pass, int64 [2]."""
  return tf.stack([tf.constant(seed, tf.int64), tf.cast(number, tf.int64)])


def batch_seeds(seed: int | None, pipeline: int) -> tf.data.Dataset:
  """Other seeds for each batch, epoch and pipeline, without an end; int64 [2]."""
  pairs = random_numbers(seed).batch(2, drop_remainder=True)
  return pairs.map(
    lambda pair: tf.random.stateless_uniform(
      [2], pair + tf.constant([pipeline, 0], tf.int64), 0, 2**62, tf.int64
    )
  )


def stream_seeds(seed: int, first: int, count: int) -> tf.data.Dataset:
  """Seeds of a stream's batches, counted from the run's beginning; int64 [2]."""

  def seed_of(number):
    # Not the seed of pass `number`, which the examples are shuffled with.
    return tf.random.stateless_uniform(
      [2], pass_seed(seed, -1 - number), 0, 2**62, tf.int64
    )

  return tf.data.Dataset.range(first, first + count).map(seed_of)


def _types(dataset: tf.data.Dataset) -> dict[str, list]:
  # tf.data holds a ragged or sparse component as one variant.
  pairs = [
    (spec.dtype, spec.shape)
    if isinstance(spec, tf.TensorSpec)
    else (tf.variant, tf.TensorShape(None))
    for spec in tf.nest.flatten(dataset.element_spec)
  ]
  return {
    'output_types': [dtype for dtype, _ in pairs],
    'output_shapes': [shape for _, shape in pairs],
  }
