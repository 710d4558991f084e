"""Transform: whole batches, deterministic work before the cache, random after.

A batch goes through, in this order:

  prepare_fn   before the cache, deterministic: once an example with a cache
  the cache
  augment_fn   in training only, with a seed of its own for each batch
  map_fn       last; what it returns is the element

Example:

  >>> import tensorflow as tf
  >>> from tf_strategies.data import transform
  >>> double = transform.Transforms(map_fn=lambda x, y: (2 * x, y))
  >>> after = transform.after_cache(double, training=True)
  >>> [int(v) for v in after((tf.constant(3), tf.constant(1)), seed=None)]
  [6, 1]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_strategies.data import arrays as arrays_lib
from tf_strategies.data import shuffle

MapFn = Callable[..., Any]
# (images, labels) -> (images, labels), a batch at a time.
PrepareFn = Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
# (*batch, seed int64 [2]) -> batch.
AugmentFn = Callable[..., Any]

# Examples prepared by one call where the result is kept.
PREPARE_BATCH = 256


@dataclasses.dataclass(frozen=True)
class Transforms:
  """The functions of a user; None for those that are not wanted."""

  prepare_fn: PrepareFn | None = None
  augment_fn: AugmentFn | None = None
  map_fn: MapFn | None = None


def after_cache(
  transforms: Transforms, training: bool
) -> Callable[[Any, tf.Tensor | None], Any]:
  """Returns a function from a batch and its seed to the element."""

  def apply(batch, seed):
    if transforms.augment_fn and training:
      batch = transforms.augment_fn(*_arguments(batch), seed)
    if transforms.map_fn:
      batch = transforms.map_fn(*_arguments(batch))
    return batch

  return apply


def batch_loader(
  arrays: arrays_lib.Arrays, prepare_fn: PrepareFn | None, is_cached: bool
) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
  """Returns a function from indices int64 [b] to a batch, for a map.

  Args:
    arrays: what the indices point into; it goes to the host's memory once.
    prepare_fn: as in `make_dataset`.
    is_cached: whether it is called once an example, here, or in each epoch.
  """
  # A dataset may be made inside a tf.function (a parameter server's workers
  # do) or a device scope: there a constant would become part of the graph, or
  # go to an accelerator and back for each batch.
  with tf.init_scope(), tf.device('/CPU:0'):
    examples = tf.constant(arrays.images), tf.constant(arrays.labels)
    if prepare_fn and is_cached:
      examples = _prepare_all(examples, arrays.num_examples, prepare_fn)

  def load_batch(indices: tf.Tensor):
    images, labels = (tf.gather(values, indices) for values in examples)
    if prepare_fn and not is_cached:
      images, labels = prepare_fn(images, labels)
    return scale(images), labels

  return load_batch


def scale(images: tf.Tensor) -> tf.Tensor:
  """uint8 to float32 in [0, 1]; what has another type is left as it is."""
  if images.dtype != tf.uint8:
    return images
  return tf.cast(images, tf.float32) / 255.0


def batch_seed(seeds: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
  """The seed of a batch for stateless random ops, int64 [2].

  Args:
    seeds: int64 [2], of an epoch.
    number: of the batch in the epoch.
  """
  return tf.random.stateless_uniform(
    [2],
    tf.stack([seeds[0] + tf.cast(number, tf.int64), seeds[1]]),
    0,
    2**62,
    tf.int64,
  )


def stream_seed(seed: int, number: tf.Tensor) -> tf.Tensor:
  """The seed of a batch of a stream for stateless random ops, int64 [2].

  Args:
    seed: of the whole run.
    number: of the batch, counted from the run's beginning.
  """
  # Not the seed of pass `number`, which the examples are shuffled with.
  seeds = shuffle.pass_seed(seed, -1 - tf.cast(number, tf.int64))
  return tf.random.stateless_uniform([2], seeds, 0, 2**62, tf.int64)


def _prepare_all(examples, n, prepare_fn):
  """Prepares all examples, in batches, into tensors of their own."""
  parts = [
    prepare_fn(*(values[i : i + PREPARE_BATCH] for values in examples))
    for i in range(0, n, PREPARE_BATCH)
  ]
  return tuple(tf.concat(values, axis=0) for values in zip(*parts, strict=True))


def _arguments(batch) -> tuple:
  return batch if isinstance(batch, tuple) else (batch,)
