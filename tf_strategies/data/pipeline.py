"""Data sets of batches: from arrays, TFRecord shards or a user's own files.

Every stage works on whole batches, because a call of a map function costs more
than the work on one 28x28 image. On MNIST with batches of 256, a gather per
batch of shuffled indices is more than ten times as fast as a map per image.

Example:

  >>> from tf_strategies import data
  >>> import numpy as np
  >>> train = data.Arrays(np.zeros([100, 28, 28, 1], np.uint8), np.arange(100))
  >>> options = data.PipelineOptions(global_batch_size=32, seed=1)
  >>> dataset = data.make_dataset(train, options, training=True)
  >>> int(dataset.cardinality())
  4
  >>> images, labels = next(iter(dataset))
  >>> images.dtype.name, tuple(images.shape), labels.dtype.name
  ('float32', (32, 28, 28, 1), 'int64')
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_strategies.data import arrays as arrays_lib
from tf_strategies.data import (
  decoded,
  files,
  loading,
  shuffle,
  tfrecord,
  transform,
)
from tf_strategies.data import options as options_lib
from tf_strategies.data import plan as plan_lib


def make_dataset(
  arrays: arrays_lib.Arrays,
  options: options_lib.PipelineOptions,
  training: bool,
  map_fn: transform.MapFn | None = None,
  input_context: tf.distribute.InputContext | None = None,
  *,
  prepare_fn: transform.PrepareFn | None = None,
  augment_fn: transform.AugmentFn | None = None,
) -> tf.data.Dataset:
  """Makes batches of a split that is in memory.

  Indices are shuffled and batched, then one call gathers, casts and scales a
  whole batch. The pixels stay one uint8 tensor on the host, captured by the
  map function, never a constant of a graph.

  Args:
    arrays: images uint8 [n, 28, 28, 1] and labels int64 [n].
    options: how to shuffle, batch, parallelise. `cache='memory'` keeps what
      `prepare_fn` returns, and adds nothing without one.
    training: whether to shuffle, to augment, to repeat and to drop the
      remainder as `options` say. Evaluation sees every example once, in order.
    map_fn: called last with a batch (images, labels) as below; what it returns
      is the element. A random one should be an `augment_fn`.
    input_context: as `strategy.distribute_datasets_from_function` passes it.
      Each pipeline then yields per-replica batches of its share. With a common
      seed, one step's batches together are exactly one process's global batch.
    prepare_fn: called with a batch of images and labels as they are in
      `arrays`, returns a pair; deterministic. With a cache it sees each example
      once, before the first epoch. uint8 images are scaled after it.
    augment_fn: called with (images, labels, seed) in training, anew in each
      epoch; returns the batch. The seed, int64 [2], is for stateless random
      ops (`tf.image.stateless_random_flip_left_right`): calls run in parallel.
      It is another one for each batch and epoch, and follows from
      `options.seed`.

  Returns:
    A dataset of (images float32 [b, 28, 28, 1] in [0, 1], labels int64 [b]),
    with a known cardinality, except from a service. The shuffle takes 8 bytes
    an example, an epoch O(n).

  Raises:
    UnsupportedOptionError: `cache='disk'` or `autoshard='file'`, which arrays
      have no use for; or batches and shards that do not fit `input_context`.
    DataError: this pipeline's share has no example, or no full batch.
    WorkerUnavailableError: `service` does not answer in time.

  Example:

    >>> from tf_strategies import data
    >>> import numpy as np
    >>> test = data.Arrays(np.zeros([6, 28, 28, 1], np.uint8), np.arange(6))
    >>> options = data.PipelineOptions(global_batch_size=4)
    >>> [y.numpy().tolist() for _, y in data.make_dataset(test, options, False)]
    [[0, 1, 2, 3], [4, 5]]
  """
  plan_lib.refuse_file_options(options)
  plan = plan_lib.make(options, training, input_context)
  gather = transform.batch_loader(
    arrays, prepare_fn, is_cached=options.cache == 'memory'
  )
  return _finish(
    _index_batches(arrays.num_examples, plan),
    plan,
    gather,
    transform.Transforms(prepare_fn, augment_fn, map_fn),
  )


def make_tfrecord_dataset(
  directory: str | os.PathLike[str],
  split: str,
  options: options_lib.PipelineOptions,
  training: bool,
  map_fn: transform.MapFn | None = None,
  input_context: tf.distribute.InputContext | None = None,
  *,
  prepare_fn: transform.PrepareFn | None = None,
  augment_fn: transform.AugmentFn | None = None,
) -> tf.data.Dataset:
  """Makes batches of a split that is in TFRecord shards.

  Shards are read in parallel, records batched and then decoded a batch at a
  time. With a cache, decoded examples (784 bytes each) are kept before the
  shuffle, so that later epochs neither read nor decode.

  Args:
    directory: as `write_tfrecords` or `extract` leaves it.
    split: 'train' or 'test'.
    options: how to read, cache, shuffle, batch, parallelise.
    training: as in `make_dataset`.
    map_fn: as in `make_dataset`; never cached.
    input_context: as in `make_dataset`. Where files are shared out, a step's
      batches together are not one process's; where examples are, they are.
    prepare_fn: as in `make_dataset`, called after a batch of records is
      decoded; what it returns is cached. A cache on disk is made anew when
      the function changes.
    augment_fn: as in `make_dataset`; never cached.

  Returns:
    As `make_dataset`. Making it looks at the frame of each record to count
    them: O(examples), about 2 us each; what `extract` left is counted already.

  Raises:
    UnsupportedOptionError: `autoshard='file'` with fewer files than pipelines,
      batches that do not fit `input_context`, or a cache on disk that another
      process fills at the moment.
    DataError: shards are missing, truncated or empty, hold other records, or
      leave this pipeline no example or no full batch. A record whose checksum
      fails later, as it is read, is TensorFlow's `tf.errors.DataLossError`;
      `load` tells which file it is in.
    WorkerUnavailableError: `service` does not answer in time.
  """
  return _make_file_dataset(
    files.find_images(directory, split),
    parse_images(prepare_fn),
    options,
    training,
    input_context,
    transform.Transforms(prepare_fn, augment_fn, map_fn),
    scale_images,
  )


def make_file_dataset(
  paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
  parse_fn: Callable[[tf.Tensor], Any],
  options: options_lib.PipelineOptions,
  training: bool,
  map_fn: transform.MapFn | None = None,
  input_context: tf.distribute.InputContext | None = None,
  *,
  augment_fn: transform.AugmentFn | None = None,
  split: str = 'train',
  read_fn: files.ReadFn | None = None,
  counts: Sequence[int] | None = None,
) -> tf.data.Dataset:
  """Makes batches of what is in a user's own files, of any schema.

  Args:
    paths: a list of files; a pattern, such as 'gs://bucket/logs-*.tfrecord';
      or a directory that `extract` filled.
    parse_fn: called with a batch of records, string [b]; returns a structure
      of tensors with b rows each, such as `tf.io.parse_example` makes. It is
      deterministic, and with a cache sees each record once.
    options: as in `make_tfrecord_dataset`.
    training: as in `make_dataset`. Evaluation sees the records file by file,
      in order.
    map_fn: called last with the components of a batch; what it returns is the
      element.
    input_context: as in `make_tfrecord_dataset`.
    augment_fn: as in `make_dataset`, with the components of a batch and a seed.
    split: of a directory that `extract` filled.
    read_fn: makes a data set of the records of one file, given its path;
      None for TFRecords.
    counts: records of each file. Without, the frames of the records are
      walked, which takes a while on remote storage; `read_fn` needs them.

  Returns:
    A dataset of what `parse_fn`, or `map_fn` after it, returns.

  Raises:
    UnsupportedOptionError: as `make_tfrecord_dataset`, or a `read_fn` without
      `counts`.
    DataError: as `make_tfrecord_dataset`.
    WorkerUnavailableError: `service` does not answer in time.

  Example:

    >>> import os, tempfile
    >>> import tensorflow as tf
    >>> from tf_strategies import data
    >>> options = data.PipelineOptions(global_batch_size=2)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   path = os.path.join(directory, 'words.tfrecord')
    ...   with tf.io.TFRecordWriter(path) as writer:
    ...     for word in (b'one', b'four', b'seven'):
    ...       writer.write(word)
    ...   dataset = data.make_file_dataset(
    ...     path, tf.strings.length, options, training=False)
    ...   [batch.tolist() for batch in dataset.as_numpy_iterator()]
    [[3, 4], [5]]
  """
  return _make_file_dataset(
    files.find(paths, split, read_fn, counts),
    parse_fn,
    options,
    training,
    input_context,
    transform.Transforms(None, augment_fn, map_fn),
    lambda batch: batch,
  )


def num_examples(
  source: arrays_lib.Arrays | str | os.PathLike[str], split: str = 'train'
) -> int:
  """The number of examples in a split, wherever it is.

  Args:
    source: arrays, or a directory of TFRecord shards.
    split: 'train' or 'test', of a directory.

  Returns:
    The count; O(1) for arrays, O(examples) for a directory.

  Raises:
    DataError: as `count_tfrecords`.
  """
  if isinstance(source, arrays_lib.Arrays):
    return source.num_examples
  return tfrecord.count_tfrecords(source, split)


def _shuffled(
  dataset: tf.data.Dataset, plan: plan_lib.Plan, n: int
) -> tf.data.Dataset:
  """The n examples in an order that is drawn anew in each iteration."""
  if not plan.is_shuffled:
    return dataset
  return shuffle.shuffle(dataset, plan.buffer_for(n), plan.options.seed)


def parse_images(
  prepare_fn: transform.PrepareFn | None,
) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
  """Returns what makes a batch of images of a batch of records."""
  if prepare_fn is None:
    return tfrecord.parse_examples
  return lambda records: prepare_fn(*tfrecord.parse_examples(records))


def scale_images(batch: tuple[tf.Tensor, tf.Tensor]):
  """The last part of decoding, which a cache of bytes stands before."""
  images, labels = batch
  return transform.scale(images), labels


def _make_file_dataset(
  all_files, parse_fn, options, training, context, transforms, decode
):
  plan = plan_lib.make(options, training, context, len(all_files.paths))
  mine = all_files.share(plan)
  n = mine.num_records
  loading.check_batches(plan, plan.share_of(n))
  records = files.read_epochs(mine, plan, is_cached=options.cache != 'none')
  if options.cache != 'none':
    examples = decoded.cache_examples(
      records, mine, plan, parse_fn, transforms.prepare_fn
    )
    decode_batch = decode
  else:
    examples = records
    decode_batch = lambda batch: decode(parse_fn(batch))  # noqa: E731
  examples = loading.shard(_shuffled(examples, plan, n), plan)
  return _finish(loading.batch(examples, plan), plan, decode_batch, transforms)


def _index_batches(n: int, plan: plan_lib.Plan) -> tf.data.Dataset:
  """Batches of the indices of n examples that are in memory."""
  loading.check_batches(plan, plan.share_of(n))
  in_part = plan.is_shuffled and plan.buffer_for(n) < n
  if in_part or plan.options.service is not None:
    # The workers of a service share out the numbers of a range.
    indices = _shuffled(tf.data.Dataset.range(n), plan, n)
    return loading.batch(loading.shard(indices, plan), plan)
  cut = functools.partial(
    shuffle.batches_of, size=plan.batch_size, drop_remainder=plan.drop_remainder
  )
  if not plan.is_shuffled:
    return cut(tf.range(n, dtype=tf.int64)[plan.share])
  batches = shuffle.permutations(n, plan.options.seed, plan.share, cut)
  count = plan.num_batches(plan.share_of(n))
  return batches.apply(tf.data.experimental.assert_cardinality(count))


def _finish(batches, plan, decode, transforms):
  after = transform.after_cache(transforms, plan.training)
  return loading.finish(
    batches,
    plan,
    lambda batch, seed: after(decode(batch), seed),
    needs_seeds=plan.training and transforms.augment_fn is not None,
  )
