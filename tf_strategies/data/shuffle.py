"""Shuffles whose order is a function of the seed and of nothing else.

`Dataset.shuffle(seed=...)` also looks at `tf.random.set_seed`: two workers that
called it with different numbers would share examples out of different orders.
"""

from __future__ import annotations

import tensorflow as tf

# What TensorFlow puts beside the seed of an op where no global seed is set.
_GLOBAL_SEED = 87654321
# What tf.data takes for no seed. Its Python functions would put the one of
# `tf.random.set_seed` there: each epoch of a service would have one order.
_NO_SEED = (0, 0)


def shuffle(
  dataset: tf.data.Dataset,
  buffer_size: int,
  seed: int | None,
  number: int | tf.Tensor | None = None,
) -> tf.data.Dataset:
  """Shuffles in the order of pass `number`, or anew in each iteration.

  Without a seed the order differs from run to run, too.
  """
  variant = tf.data.experimental.to_variant(dataset)
  if number is None:
    first, second = _NO_SEED if seed is None else (_GLOBAL_SEED, seed)
    variant = tf.raw_ops.ShuffleDatasetV3(
      input_dataset=variant,
      buffer_size=buffer_size,
      seed=first,
      seed2=second,
      seed_generator=tf.raw_ops.DummySeedGenerator(),
      reshuffle_each_iteration=True,
      **_types(dataset),
    )
  else:
    # Never _NO_SEED.
    seeds = tf.random.stateless_uniform(
      [2], pass_seed(seed, number), 1, 2**62, tf.int64
    )
    variant = tf.raw_ops.ShuffleDataset(
      input_dataset=variant,
      buffer_size=tf.cast(buffer_size, tf.int64),
      seed=seeds[0],
      seed2=seeds[1],
      reshuffle_each_iteration=False,
      **_types(dataset),
    )
  return tf.data.experimental.from_variant(variant, dataset.element_spec)


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


def pass_seed(seed: int | tf.Tensor, number: int | tf.Tensor) -> tf.Tensor:
  """The seed of a stateless random op for one pass, int64 [2]."""
  seed = tf.convert_to_tensor(seed, tf.int64)
  return tf.stack([seed, tf.cast(number, tf.int64)])


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
