"""Epochs whose order can be computed again: for runs that resume exactly.

The order of `Dataset.shuffle` depends on how many iterators its data set had
before, and Keras makes one just to look at the first batch. Here the order of
epoch e is a function of (seed, e) alone, so a run that starts at epoch e sees
what an uninterrupted one would have seen.
"""

from __future__ import annotations

import math

import tensorflow as tf

from tf_strategies import errors
from tf_strategies.data import arrays as arrays_lib
from tf_strategies.data import options as options_lib
from tf_strategies.data import pipeline


def make_epochs(
  arrays: arrays_lib.Arrays,
  options: options_lib.PipelineOptions,
  first_epoch: int,
  num_epochs: int,
  steps_per_epoch: int | None = None,
  map_fn: pipeline.MapFn | None = None,
  first_step: int = 0,
) -> tf.data.Dataset:
  """Makes the batches of epochs first_epoch, ..., num_epochs - 1, in a row.

  Args:
    arrays: images uint8 [n, 28, 28, 1] and labels int64 [n].
    options: `seed` (required), `global_batch_size`, `drop_remainder`,
      `shuffle_buffer` (None: a uniform shuffle; 0: none; no other),
      `num_parallel_calls`, `deterministic` and `prefetch`.
    first_epoch: where to start, counted from 0.
    num_epochs: epochs of the whole run, those before `first_epoch` included.
    steps_per_epoch: ends each epoch after so many batches at most.
    map_fn: as in `make_dataset`.
    first_step: batches of `first_epoch` to leave out: those of a run that was
      interrupted there.

  Returns:
    A dataset of (images float32 [b, 28, 28, 1] in [0, 1], labels int64 [b]) of
    known cardinality. An epoch takes O(n) for its order.

  Raises:
    UnsupportedOptionError: no seed, or a shuffle buffer of part of the data.
    DataError: the data make no batch.

  Example:

    >>> from tf_strategies import data
    >>> train = data.make_synthetic(num_train=6, num_test=1).train
    >>> options = data.PipelineOptions(global_batch_size=4, seed=1)
    >>> whole = list(data.make_epochs(train, options, 0, 2))
    >>> resumed = list(data.make_epochs(train, options, 1, 2))
    >>> bool((whole[2][1] == resumed[0][1]).numpy().all())
    True
  """
  _check(options)
  n = arrays.num_examples
  size = options.global_batch_size
  steps = n // size if options.drop_remainder else math.ceil(n / size)
  if steps_per_epoch is not None:
    steps = min(steps, steps_per_epoch)
  if not steps:
    raise errors.DataError(
      f'{n} examples make no batch of {size}; expected at least one, pass a '
      'smaller global_batch_size or drop_remainder=False'
    )

  def order(epoch):
    indices = tf.range(n, dtype=tf.int64)
    if options.shuffle_buffer is None:
      indices = tf.random.experimental.stateless_shuffle(
        indices, seed=tf.stack([tf.constant(options.seed, tf.int64), epoch])
      )
    batches = tf.data.Dataset.from_tensor_slices(indices)
    return batches.batch(size, options.drop_remainder).take(steps)

  batches = tf.data.Dataset.range(first_epoch, num_epochs).flat_map(order)
  batches = batches.skip(first_step)
  num_batches = max(0, max(0, num_epochs - first_epoch) * steps - first_step)
  return (
    batches.apply(tf.data.experimental.assert_cardinality(num_batches))
    .map(
      pipeline.batch_loader(arrays, map_fn),
      num_parallel_calls=options.num_parallel_calls,
      deterministic=options.deterministic,
    )
    .prefetch(options.prefetch)
  )


def _check(options: options_lib.PipelineOptions) -> None:
  if options.seed is None:
    raise errors.UnsupportedOptionError(
      'seed=None for epochs that can be resumed',
      'an integer',
      'pass PipelineOptions(seed=...), or use make_dataset',
    )
  if options.shuffle_buffer not in (None, 0):
    raise errors.UnsupportedOptionError(
      f'shuffle_buffer={options.shuffle_buffer} for epochs that can be resumed',
      'None (a uniform shuffle) or 0 (none)',
      'use make_dataset for a shuffle of part of the data',
    )
