"""Transform and load: arrays or TFRecord shards to batches on the device.

Every stage works on whole batches, because a call of a map function costs more
than the work on one 28x28 image. On MNIST with batches of 256, a gather per
batch of shuffled indices is more than ten times as fast as a map per image.

Example:

  >>> from tf_strategies import data
  >>> small = data.make_synthetic(num_train=100, num_test=20)
  >>> options = data.PipelineOptions(global_batch_size=32, seed=1)
  >>> dataset = data.make_dataset(small.train, options, training=True)
  >>> int(dataset.cardinality())
  4
  >>> images, labels = next(iter(dataset))
  >>> images.dtype.name, tuple(images.shape), labels.dtype.name
  ('float32', (32, 28, 28, 1), 'int64')
"""

import dataclasses
import hashlib
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_strategies import errors
from tf_strategies.data import arrays as arrays_lib
from tf_strategies.data import options as options_lib
from tf_strategies.data import tfrecord

MapFn = Callable[[tf.Tensor, tf.Tensor], Any]

_MAX_OPEN_FILES = 16
# Records taken from one file before the next: one at a time costs a third of
# the throughput. Evaluation takes one, which restores the written order.
_BLOCK_LENGTH = 16
# Records decoded by one call where the result is cached example by example.
_DECODE_BATCH = 256
_POLICIES = {'off': 'OFF', 'auto': 'AUTO', 'data': 'DATA', 'file': 'FILE'}


def make_dataset(
  arrays: arrays_lib.Arrays,
  options: options_lib.PipelineOptions,
  training: bool,
  map_fn: MapFn | None = None,
  input_context: tf.distribute.InputContext | None = None,
) -> tf.data.Dataset:
  """Makes batches of a split that is in memory.

  Indices are shuffled and batched, then one call gathers, casts and scales a
  whole batch. The pixels stay one uint8 tensor on the host, captured by the
  map function, never a constant of a graph.

  Args:
    arrays: images uint8 [n, 28, 28, 1] and labels int64 [n].
    options: how to shuffle, batch, parallelise. `cache='memory'` adds nothing
      to data that are there already.
    training: whether to shuffle, to repeat and to drop the remainder as
      `options` say. Evaluation sees every example once, in order.
    map_fn: called in the same map with a batch (images, labels) as below; what
      it returns is the element. A random one should use stateless random ops:
      calls run in parallel.
    input_context: as `strategy.distribute_datasets_from_function` passes it.
      Each pipeline then yields per-replica batches of its share. With a common
      seed, one step's batches together are exactly one process's global batch.

  Returns:
    A dataset of (images float32 [b, 28, 28, 1] in [0, 1], labels int64 [b]),
    with a known cardinality. The shuffle takes 8 bytes an example, an epoch
    O(n).

  Raises:
    UnsupportedOptionError: `cache='disk'` or `autoshard='file'`, which arrays
      have no use for; or batches and shards that do not fit `input_context`.
    DataError: this pipeline's share has no example, or no full batch.

  Example:

    >>> from tf_strategies import data
    >>> test = data.make_synthetic(num_train=8, num_test=6).test
    >>> options = data.PipelineOptions(global_batch_size=4)
    >>> [y.numpy().tolist() for _, y in data.make_dataset(test, options, False)]
    [[0, 1, 2, 3], [4, 5]]
  """
  _refuse_file_options(options)
  plan = _make_plan(options, training, input_context)
  load_batch = batch_loader(arrays, map_fn)
  n = arrays.num_examples
  indices = _shuffle(tf.data.Dataset.range(n), plan, n)
  indices = _shard(indices, plan)
  return _finish(indices, plan, plan.share_of(n), load_batch)


def batch_loader(
  arrays: arrays_lib.Arrays, map_fn: MapFn | None = None
) -> Callable[[tf.Tensor], Any]:
  """Returns a function from indices int64 [b] to a batch, for a map.

  Args:
    arrays: what the indices point into; it goes to the host's memory once.
    map_fn: as in `make_dataset`.
  """
  # A dataset may be made inside a tf.function (a parameter server's workers
  # do) or a device scope: there a constant would become part of the graph, or
  # go to an accelerator and back for each batch.
  with tf.init_scope(), tf.device('/CPU:0'):
    all_images = tf.constant(arrays.images)
    all_labels = tf.constant(arrays.labels)

  def load_batch(indices: tf.Tensor):
    batch = (
      _scale(tf.gather(all_images, indices)),
      tf.gather(all_labels, indices),
    )
    return map_fn(*batch) if map_fn else batch

  return load_batch


def make_tfrecord_dataset(
  directory: str | os.PathLike[str],
  split: str,
  options: options_lib.PipelineOptions,
  training: bool,
  map_fn: MapFn | None = None,
  input_context: tf.distribute.InputContext | None = None,
) -> tf.data.Dataset:
  """Makes batches of a split that is in TFRecord shards.

  Shards are read in parallel, records batched and then decoded a batch at a
  time. With a cache, decoded examples (784 bytes each) are kept before the
  shuffle, so that later epochs neither read nor decode.

  Args:
    directory: as `write_tfrecords` leaves it.
    split: 'train' or 'test'.
    options: how to read, cache, shuffle, batch, parallelise.
    training: as in `make_dataset`.
    map_fn: as in `make_dataset`; never cached.
    input_context: as in `make_dataset`. Where files are shared out, a step's
      batches together are not one process's; where examples are, they are.

  Returns:
    As `make_dataset`. Making it looks at the frame of each record to count
    them: O(examples), about 2 us each.

  Raises:
    UnsupportedOptionError: `autoshard='file'` with fewer files than pipelines,
      or batches that do not fit `input_context`.
    DataError: shards are missing or truncated, hold other records, or leave
      this pipeline no example or no full batch. A record whose checksum fails
      later, as it is read, is TensorFlow's `tf.errors.DataLossError`; `load`
      tells which file it is in.
  """
  shards = tfrecord.find_shards(directory, split)
  plan = _make_plan(options, training, input_context, len(shards.paths))
  paths = list(shards.paths)
  if plan.shard_files:
    paths = paths[plan.pipeline :: plan.num_pipelines]
    plan = dataclasses.replace(plan, num_pipelines=1, pipeline=0)
  n = sum(map(tfrecord.count_records, paths))
  records = _read_records(paths, plan, n)
  if options.cache == 'none':
    examples = records
  else:
    examples = _cache_examples(records, plan, n, shards, paths)

  def load_batch(*batch):
    images, labels = (
      tfrecord.parse_examples(*batch) if options.cache == 'none' else batch
    )
    batch = (_scale(images), labels)
    return map_fn(*batch) if map_fn else batch

  examples = _shard(_shuffle(examples, plan, n), plan)
  return _finish(examples, plan, plan.share_of(n), load_batch)


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


@dataclasses.dataclass(frozen=True)
class _Plan:
  """The options, resolved for one split of one input pipeline."""

  options: options_lib.PipelineOptions
  training: bool
  batch_size: int
  num_pipelines: int = 1
  pipeline: int = 0
  shard_files: bool = False

  @property
  def is_shuffled(self) -> bool:
    return self.training and self.options.shuffle_buffer != 0

  def share_of(self, n: int) -> int:
    """How many of `n` examples `Dataset.shard` leaves to this pipeline."""
    return len(range(self.pipeline, n, self.num_pipelines))

  def buffer_for(self, n: int) -> int:
    """The size of the shuffle's buffer for a split of `n` examples."""
    wanted = self.options.shuffle_buffer
    # tf.data refuses a buffer of 0; no example at all is refused later on.
    return max(1, n if wanted is None else min(wanted, n))


def _refuse_file_options(options: options_lib.PipelineOptions):
  if options.cache == 'disk':
    raise errors.UnsupportedOptionError(
      "cache='disk' with arrays",
      "'none' or 'memory' for data that are in memory already",
      'leave cache out, or use write_tfrecords and make_tfrecord_dataset',
    )
  if options.autoshard == 'file':
    raise errors.UnsupportedOptionError(
      "autoshard='file' with arrays",
      "'off', 'auto' or 'data' for data that are in no file",
      "write autoshard='data', or use write_tfrecords and "
      'make_tfrecord_dataset',
    )


def _make_plan(
  options: options_lib.PipelineOptions,
  training: bool,
  context: tf.distribute.InputContext | None,
  num_files: int = 0,
) -> _Plan:
  """Resolves the batch size and the share of this input pipeline."""
  plan = _Plan(options, training, int(options.global_batch_size))
  if context is None:
    return plan
  replicas = context.num_replicas_in_sync
  if plan.batch_size % replicas:
    raise errors.UnsupportedOptionError(
      f'global_batch_size={plan.batch_size} with {replicas} replicas',
      'a multiple of the number of replicas',
      f'pass {-(-plan.batch_size // replicas) * replicas}',
    )
  plan = dataclasses.replace(plan, batch_size=plan.batch_size // replicas)
  pipelines = context.num_input_pipelines
  if options.autoshard == 'off' or pipelines == 1:
    return plan
  if options.autoshard == 'file' and num_files < pipelines:
    raise errors.UnsupportedOptionError(
      f"autoshard='file' with {num_files} files for {pipelines} pipelines",
      'at least one file for each input pipeline',
      "write autoshard='data', or write the shards again with "
      f'num_shards={pipelines}',
    )
  plan = dataclasses.replace(
    plan,
    num_pipelines=pipelines,
    pipeline=context.input_pipeline_id,
    shard_files=options.autoshard == 'file'
    or (options.autoshard == 'auto' and num_files > 0 == num_files % pipelines),
  )
  if plan.is_shuffled and not plan.shard_files and options.seed is None:
    # Each pipeline takes every k-th example of the shuffled order: of orders
    # that differ, some examples would be taken twice and some never.
    raise errors.UnsupportedOptionError(
      f'seed=None with {pipelines} input pipelines that share examples',
      'the same seed in every pipeline',
      'pass seed=0, or shuffle_buffer=0',
    )
  return plan


def _shuffle(dataset: tf.data.Dataset, plan: _Plan, n: int) -> tf.data.Dataset:
  if not plan.is_shuffled:
    return dataset
  return dataset.shuffle(
    plan.buffer_for(n), seed=plan.options.seed, reshuffle_each_iteration=True
  )


def _shard(dataset: tf.data.Dataset, plan: _Plan) -> tf.data.Dataset:
  if plan.num_pipelines == 1:
    return dataset
  return dataset.shard(plan.num_pipelines, plan.pipeline)


def _read_records(paths: list[str], plan: _Plan, n: int) -> tf.data.Dataset:
  """Interleaves the records of the files; string [], exactly n of them."""
  options = plan.options
  files = tf.data.Dataset.from_tensor_slices(paths)
  if plan.is_shuffled and options.cache == 'none' and plan.buffer_for(n) < n:
    # A buffer that is smaller than the split mixes only neighbours, so the
    # files take turns in being neighbours.
    files = files.shuffle(len(paths), options.seed)
  cycle = min(len(paths), _MAX_OPEN_FILES) if plan.training else len(paths)
  # tf.data refuses more calls than there are files open at once.
  calls = options.num_parallel_calls
  records = files.interleave(
    tf.data.TFRecordDataset,
    cycle_length=cycle,
    block_length=_BLOCK_LENGTH if plan.training else 1,
    num_parallel_calls=calls if calls < 0 else min(calls, cycle),
    deterministic=options.deterministic,
  )
  return records.apply(tf.data.experimental.assert_cardinality(n))


def _cache_examples(
  records: tf.data.Dataset,
  plan: _Plan,
  n: int,
  shards: tfrecord.Shards,
  paths: list[str],
) -> tf.data.Dataset:
  """Decodes in batches and caches the examples, uint8, one by one."""
  examples = records.batch(_DECODE_BATCH).map(
    tfrecord.parse_examples,
    num_parallel_calls=plan.options.num_parallel_calls,
    deterministic=plan.options.deterministic,
  )
  # The cache, like the shuffle after it, works on examples: a cache of batches
  # would keep the same examples together for ever.
  examples = examples.unbatch()
  examples = examples.apply(tf.data.experimental.assert_cardinality(n))
  if plan.options.cache == 'memory':
    return examples.cache()
  prefix = os.path.abspath(plan.options.cache_path)
  os.makedirs(os.path.dirname(prefix), exist_ok=True)
  digest = _fingerprint(paths, plan)
  return examples.cache(f'{prefix}-{shards.name}-{shards.split}-{digest}')


def _fingerprint(paths: list[str], plan: _Plan) -> str:
  """A name for what the cache holds: other files or order, another name."""
  identity = [plan.training, plan.pipeline, plan.num_pipelines]
  for path in paths:
    status = os.stat(path)
    identity += [os.path.abspath(path), status.st_size, status.st_mtime_ns]
  return hashlib.sha256(repr(identity).encode()).hexdigest()[:12]


def _scale(images: tf.Tensor) -> tf.Tensor:
  return tf.cast(images, tf.float32) / 255.0


def _finish(
  examples: tf.data.Dataset,
  plan: _Plan,
  n: int,
  load_batch: Callable[..., Any],
) -> tf.data.Dataset:
  """Batches n examples, loads the batches in parallel and prefetches."""
  options = plan.options
  if not n:
    raise errors.DataError(
      f'input pipeline {plan.pipeline} of {plan.num_pipelines} has no example; '
      'expected at least one for each pipeline'
    )
  drop_remainder = plan.training and options.drop_remainder
  if drop_remainder and n < plan.batch_size:
    raise errors.DataError(
      f'{n} examples make no full batch of {plan.batch_size} and '
      'drop_remainder=True; expected at least one, pass a smaller '
      'global_batch_size or drop_remainder=False'
    )
  dataset = examples.batch(plan.batch_size, drop_remainder=drop_remainder)
  if plan.training and options.repeat:
    # After the batch, so that no batch mixes two epochs; before the map, so
    # that it runs on into the next epoch.
    dataset = dataset.repeat()
  dataset = dataset.map(
    load_batch,
    num_parallel_calls=options.num_parallel_calls,
    deterministic=options.deterministic,
  )
  if options.prefetch:
    dataset = dataset.prefetch(options.prefetch)
  settings = tf.data.Options()
  settings.deterministic = options.deterministic
  settings.experimental_distribute.auto_shard_policy = getattr(
    tf.data.experimental.AutoShardPolicy, _POLICIES[options.autoshard]
  )
  return dataset.with_options(settings)
