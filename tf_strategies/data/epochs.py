"""Epochs whose order can be computed again: for runs that resume exactly.

The order of `Dataset.shuffle` depends on how many iterators its data set had
before, and Keras makes one just to look at the first batch. Here the data are
one endless stream of passes, and the order of pass p is a function of (seed, p)
alone, so a run that starts at epoch e sees what an uninterrupted one would have
seen.

An epoch is a pass; or, with `steps_per_epoch`, so many batches of the stream,
however many passes that is: the next epoch goes on where one ended, so that
each example is seen as often as any other, give or take one. No batch mixes
two passes, unless `drop_remainder` asks for full batches alone: these are then
cut out of the stream without regard to passes, and nothing is dropped.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_strategies import errors
from tf_strategies.data import arrays as arrays_lib
from tf_strategies.data import (
  decoded,
  files,
  loading,
  pipeline,
  shuffle,
  transform,
)
from tf_strategies.data import options as options_lib
from tf_strategies.data import plan as plan_lib


def make_epochs(
  arrays: arrays_lib.Arrays,
  options: options_lib.PipelineOptions,
  first_epoch: int,
  num_epochs: int,
  steps_per_epoch: int | None = None,
  map_fn: transform.MapFn | None = None,
  first_step: int = 0,
  *,
  prepare_fn: transform.PrepareFn | None = None,
  augment_fn: transform.AugmentFn | None = None,
  input_context: tf.distribute.InputContext | None = None,
) -> tf.data.Dataset:
  """Makes the batches of epochs first_epoch, ..., num_epochs - 1, in a row.

  Args:
    arrays: images uint8 [n, 28, 28, 1] and labels int64 [n].
    options: `seed` (required), `global_batch_size`, `drop_remainder`,
      `shuffle_buffer` (None: a uniform shuffle; 0: none; no other), `cache`,
      `num_parallel_calls` and `prefetch`.
    first_epoch: where to start, counted from 0.
    num_epochs: epochs of the whole run, those before `first_epoch` included.
    steps_per_epoch: batches of an epoch, more or fewer than the data make;
      None for one pass over the data.
    map_fn: as in `make_dataset`.
    first_step: batches of `first_epoch` to leave out: those of a run that was
      interrupted there.
    prepare_fn: as in `make_dataset`.
    augment_fn: as in `make_dataset`. The seed of a batch follows from the
      seed and its place in the whole run, so a resumed run augments alike.
    input_context: as `strategy.distribute_datasets_from_function` passes it.
      Of k pipelines each yields every k-th batch of the stream, whole: for
      workers that train on batches of their own, as with parameter servers.
      Refused with several replicas in sync, which share a batch: write
      `strategy.experimental_distribute_dataset(make_epochs(...))`.

  Returns:
    A dataset of (images float32 [b, 28, 28, 1] in [0, 1], labels int64 [b]) of
    known cardinality. A pass takes O(n) for its order, a start in its middle
    nothing more.

  Raises:
    UnsupportedOptionError: no seed, `deterministic=False`, a shuffle buffer of
      part of the data, options for files or for a service, or an
      `input_context` of several replicas.
    DataError: the data make no batch.

  Example:

    >>> from tf_strategies import data
    >>> import numpy as np
    >>> train = data.Arrays(np.zeros([6, 28, 28, 1], np.uint8), np.arange(6))
    >>> options = data.PipelineOptions(global_batch_size=4, seed=1)
    >>> whole = list(data.make_epochs(train, options, 0, 2))
    >>> resumed = list(data.make_epochs(train, options, 1, 2))
    >>> bool((whole[2][1] == resumed[0][1]).numpy().all())
    True
  """
  plan_lib.refuse_for_epochs(options, input_context)
  plan_lib.refuse_file_options(options)
  if options.shuffle_buffer not in (None, 0):
    raise errors.UnsupportedOptionError(
      f'shuffle_buffer={options.shuffle_buffer} for epochs that can be resumed',
      'None (a uniform shuffle) or 0 (none)',
      'use make_dataset for a shuffle of part of the data',
    )
  plan = plan_lib.make(options, True, None)
  n = arrays.num_examples

  def one_order(number: tf.Tensor) -> tf.Tensor:
    indices = tf.range(n, dtype=tf.int64)
    if not plan.is_shuffled:
      return indices
    return tf.random.experimental.stateless_shuffle(
      indices, seed=shuffle.pass_seed(options.seed, number)
    )

  def one_pass(number: tf.Tensor) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(one_order(number))

  def batched_pass(number: tf.Tensor) -> tf.data.Dataset:
    return shuffle.batches_of(
      one_order(number), plan.batch_size, plan.drop_remainder
    )

  gather = transform.batch_loader(
    arrays, prepare_fn, is_cached=options.cache == 'memory'
  )
  return _make_epochs(
    one_pass,
    batched_pass,
    n,
    plan,
    _Span(first_epoch, num_epochs, steps_per_epoch, first_step, input_context),
    gather,
    transform.Transforms(prepare_fn, augment_fn, map_fn),
  )


def make_tfrecord_epochs(
  directory: str | os.PathLike[str],
  split: str,
  options: options_lib.PipelineOptions,
  first_epoch: int,
  num_epochs: int,
  steps_per_epoch: int | None = None,
  map_fn: transform.MapFn | None = None,
  first_step: int = 0,
  *,
  prepare_fn: transform.PrepareFn | None = None,
  augment_fn: transform.AugmentFn | None = None,
  input_context: tf.distribute.InputContext | None = None,
) -> tf.data.Dataset:
  """Makes the batches of epochs from TFRecord shards, in a row.

  Where the shuffle's buffer is smaller than the split, the order of the files
  is drawn by (seed, pass) as well. Records cannot be had out of turn, so a start
  within a pass reads, but does not decode, those that come before: O(records
  before it). Passes before are not read.

  Args:
    directory: as `write_tfrecords` or `extract` leaves it.
    split: 'train' or 'test'.
    options: as in `make_tfrecord_dataset`; `seed` is required.
    first_epoch: as in `make_epochs`.
    num_epochs: as in `make_epochs`.
    steps_per_epoch: as in `make_epochs`.
    map_fn: as in `make_dataset`.
    first_step: as in `make_epochs`.
    prepare_fn: as in `make_tfrecord_dataset`.
    augment_fn: as in `make_epochs`.
    input_context: as in `make_epochs`; each pipeline reads all records.

  Returns:
    As `make_epochs`.

  Raises:
    UnsupportedOptionError: no seed, `deterministic=False`, `service`, or an
      `input_context` of several replicas.
    DataError: as `make_tfrecord_dataset`.
  """
  return _make_file_epochs(
    files.find_images(directory, split),
    pipeline.parse_images(prepare_fn),
    options,
    _Span(first_epoch, num_epochs, steps_per_epoch, first_step, input_context),
    transform.Transforms(prepare_fn, augment_fn, map_fn),
    pipeline.scale_images,
  )


def make_file_epochs(
  paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
  parse_fn: Callable[[tf.Tensor], Any],
  options: options_lib.PipelineOptions,
  first_epoch: int,
  num_epochs: int,
  steps_per_epoch: int | None = None,
  map_fn: transform.MapFn | None = None,
  first_step: int = 0,
  *,
  augment_fn: transform.AugmentFn | None = None,
  split: str = 'train',
  read_fn: files.ReadFn | None = None,
  counts: Sequence[int] | None = None,
  input_context: tf.distribute.InputContext | None = None,
) -> tf.data.Dataset:
  """Makes the batches of epochs from a user's own files, in a row.

  Args:
    paths: as in `make_file_dataset`.
    parse_fn: as in `make_file_dataset`.
    options: as in `make_tfrecord_epochs`.
    first_epoch: as in `make_epochs`.
    num_epochs: as in `make_epochs`.
    steps_per_epoch: as in `make_epochs`.
    map_fn: as in `make_file_dataset`.
    first_step: as in `make_epochs`.
    augment_fn: as in `make_epochs`, with the components of a batch.
    split: as in `make_file_dataset`.
    read_fn: as in `make_file_dataset`.
    counts: as in `make_file_dataset`.
    input_context: as in `make_tfrecord_epochs`.

  Returns:
    As `make_file_dataset`, of known cardinality.

  Raises:
    UnsupportedOptionError: as `make_tfrecord_epochs` and `make_file_dataset`.
    DataError: as `make_file_dataset`.
  """
  return _make_file_epochs(
    files.find(paths, split, read_fn, counts),
    parse_fn,
    options,
    _Span(first_epoch, num_epochs, steps_per_epoch, first_step, input_context),
    transform.Transforms(None, augment_fn, map_fn),
    lambda batch: batch,
  )


@dataclasses.dataclass(frozen=True)
class _Span:
  """Which part of the stream is wanted."""

  first_epoch: int
  num_epochs: int
  steps_per_epoch: int | None
  first_step: int
  context: tf.distribute.InputContext | None


def _make_file_epochs(all_files, parse_fn, options, span, transforms, decode):
  plan_lib.refuse_for_epochs(options, span.context)
  plan = plan_lib.make(options, True, None, len(all_files.paths))
  n = all_files.num_records
  if options.cache == 'none':
    examples = lambda number: files.read_pass(all_files, plan, number)  # noqa: E731
    decode_batch = lambda batch: decode(parse_fn(batch))  # noqa: E731
  else:
    # One cache, made outside of the passes, which all of them read.
    records = files.read_epochs(all_files, plan, is_cached=True)
    kept = decoded.cache_examples(
      records, all_files, plan, parse_fn, transforms.prepare_fn
    )
    examples = lambda number: kept  # noqa: E731
    decode_batch = decode

  def one_pass(number: tf.Tensor) -> tf.data.Dataset:
    if not plan.is_shuffled:
      return examples(number)
    return shuffle.shuffle_pass(
      examples(number), plan.buffer_for(n), options.seed, number
    )

  def batched_pass(number: tf.Tensor) -> tf.data.Dataset:
    return loading.batch(one_pass(number), plan)

  return _make_epochs(
    one_pass, batched_pass, n, plan, span, decode_batch, transforms
  )


def _make_epochs(one_pass, batched_pass, n, plan, span, decode, transforms):
  """Cuts a span out of the stream of passes, and loads its batches."""
  size, options = plan.batch_size, plan.options
  if span.steps_per_epoch is not None and span.steps_per_epoch < 1:
    raise errors.UnsupportedOptionError(
      f'steps_per_epoch={span.steps_per_epoch}',
      'an integer of at least 1, or None (one pass over the data)',
      'leave steps_per_epoch out',
    )
  steps = plan.num_batches(n)
  runs_on = options.drop_remainder and span.steps_per_epoch is not None
  if not runs_on or not n:
    loading.check_batches(plan, n)
  per_epoch = span.steps_per_epoch or steps
  first = span.first_epoch * per_epoch + span.first_step
  count = max(0, span.num_epochs * per_epoch - first)
  if runs_on:
    # Batches are pieces of the endless stream of examples.
    first_pass, skipped = divmod(first * size, n)
    num_passes = math.ceil((skipped + count * size) / n)
  else:
    first_pass, skipped = divmod(first, steps)
    num_passes = math.ceil((skipped + count) / steps)
  passes = tf.data.Dataset.range(first_pass, first_pass + num_passes)
  if runs_on:
    examples = passes.flat_map(one_pass).skip(skipped)
    batches = examples.batch(size, drop_remainder=True)
  else:
    batches = passes.flat_map(batched_pass).skip(skipped)
  batches = batches.take(count)
  batches = batches.apply(tf.data.experimental.assert_cardinality(count))
  after = transform.after_cache(transforms, training=True)
  if transforms.augment_fn:
    # By the batch's place in the stream, which a resumed run knows.
    numbers = tf.data.Dataset.range(first, first + count)
    batches = tf.data.Dataset.zip(
      numbers.map(lambda i: transform.stream_seed(options.seed, i)), batches
    )
    load_batch = loading.load_batch_with_seed(
      lambda batch, seed: after(decode(batch), seed)
    )
  else:
    load_batch = lambda *batch: after(decode(loading.unpack(batch)), None)  # noqa: E731
  if span.context is not None:
    batches = batches.shard(
      span.context.num_input_pipelines, span.context.input_pipeline_id
    )
  return loading.in_parallel(batches, load_batch, options)
