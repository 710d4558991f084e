"""Random orders and seeds that follow from the seed and from nothing else.

`Dataset.shuffle(seed=...)` also looks at `tf.random.set_seed`: two workers that
called it with different numbers would share examples out of different orders.
"""

import tensorflow as tf

# The number that TensorFlow puts beside the seed of an op where no global seed is
# set.
_GLOBAL_SEED = 87654321
# tf.data takes this pair for no seed. Its Python functions would put the seed of
# `tf.random.set_seed` there.
_NO_SEED = (0, 0)


def random_number(seed: int | None) -> tf.data.Dataset:
  """Returns one random number, another in each iteration; int64 []."""
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
  return tf.data.experimental.from_variant(variant, spec).take(1)


def pass_seed(seed: int | None, number: int | tf.Tensor) -> tf.Tensor:
  """Returns the seed of a stateless random op for one pass, int64 [2]."""
  # Without a seed, the number of the pass is a random one.
  seed = tf.constant(seed or 0, tf.int64)
  return tf.stack([seed, tf.cast(number, tf.int64)])


def batch_seed(seed: int | None, pipeline: int, place: tf.Tensor) -> tf.Tensor:
  """Returns the seed for the batch at a place of a pipeline's run, int64 [2]."""
  # A pass, which the examples are shuffled with, has no negative number.
  key = pass_seed(seed, -1 - pipeline)
  key = tf.random.experimental.stateless_fold_in(key, place)
  return tf.random.stateless_uniform([2], key, 0, 2**62, tf.int64)
