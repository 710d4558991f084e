"""The pipelines that are compared: each adds one thing to the one before it.

The names are those of TensorFlow's guide "Better performance with the tf.data
API". All shuffle and do the same work, uint8 to float32 in [0, 1], on the same
examples. `cache` keeps whole batches, as the guide does, so later epochs repeat
their batches; `make_tfrecord_dataset_cache`, which caches examples, does not.

TensorFlow rewrites what it is given: a sequential map becomes parallel, a
prefetch is appended. In the cumulative variants that is off, so that each is
what its name says; `naive_rewritten` is `naive` with everything that TensorFlow
does of itself. The others are left as they are. `extract_alone` only reads
records, one file after the other, and `extract_alone_parallel` many at once.

Example:

  >>> from examples import datasets
  >>> from benchmarks.input_pipeline import variants
  >>> small = datasets.make_synthetic(num_train=10, num_test=4).train
  >>> source = variants.Source(arrays=small, batch_size=4)
  >>> [len(y) for _, y in variants.build('naive_arrays', source)]
  [4, 4, 2]
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import tensorflow as tf

from benchmarks.input_pipeline import slow_storage, user_pipeline
from tf_strategies import errors
from tf_strategies.data import arrays as arrays_lib
from tf_strategies.data import options as options_lib
from tf_strategies.data import pipeline, tfrecord

_MAX_OPEN_FILES = 16
_FAST = slow_storage.Storage()
_BLOCK_LENGTH = 16
_SEED = 0
FAST_STORAGE = '_fast_storage'


@dataclasses.dataclass(frozen=True)
class Source:
  """What variants read.

  Attributes:
    arrays: the training split.
    batch_size: examples of a batch.
    directory: the same examples as TFRecord shards.
    storage: how slow the shards are.
    waited: as in `slow_storage.read`.
    pipeline: 'module:function' of the user's.
    steps: batches of an epoch of a user's dataset without end.
  """

  arrays: arrays_lib.Arrays | None = None
  batch_size: int = 256
  directory: str | None = None
  storage: slow_storage.Storage = _FAST
  waited: tf.Variable | None = None
  pipeline: str | None = None
  steps: int = 200

  @property
  def options(self) -> options_lib.PipelineOptions:
    """Our defaults."""
    return options_lib.PipelineOptions(self.batch_size, seed=_SEED)

  def paths(self) -> list[str]:
    """The training shards."""
    return list(tfrecord.find_shards(self.directory, 'train').paths)


def build(name: str, source: Source) -> tf.data.Dataset:
  """Makes a variant by its name; one with `_fast_storage` never waits.

  Args:
    name: of `NAMES`.
    source: what to read.

  Returns:
    One epoch of batches.

  Raises:
    UnsupportedOptionError: no such variant; or as `user_pipeline.load`.
    DataError: as `make_tfrecord_dataset`.
  """
  plain = name.removesuffix(FAST_STORAGE)
  if plain not in _BUILDERS:
    raise errors.UnsupportedOptionError(
      f'variant {name!r}',
      'one of ' + ', '.join(NAMES),
      'leave --variants out to measure all of them',
    )
  if plain != name:
    source = dataclasses.replace(source, storage=_FAST)
  with contextlib.ExitStack() as stack:
    if source.storage.is_slow:
      stack.enter_context(slow_storage.simulated(source.storage, source.waited))
    return _BUILDERS[plain](source)


def _literal(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """What is written is what runs."""
  options = tf.data.Options()
  options.experimental_optimization.apply_default_optimizations = False
  options.experimental_optimization.map_parallelization = False
  options.experimental_optimization.inject_prefetch = False
  return dataset.with_options(options)


def _scale(image, label):
  return tf.cast(image, tf.float32) / 255.0, label


def _parse_one(record):
  parsed = tf.io.parse_single_example(record, tfrecord.FEATURES)
  image = tf.io.decode_raw(parsed['image_raw'], tf.uint8)
  return _scale(tf.reshape(image, arrays_lib.IMAGE_SHAPE), parsed['label'])


def _parse_batch(records):
  return _scale(*tfrecord.parse_examples(records))


def _extract(source: Source, parallel: bool) -> tf.data.Dataset:
  """Records of one file after the other, or of many at once."""
  paths = source.paths()
  files = tf.data.Dataset.from_tensor_slices(paths)
  # Looked up when it is called: storage may be simulated.
  reader = tf.data.TFRecordDataset
  if parallel:
    cycle = min(len(paths), _MAX_OPEN_FILES)
    return files.interleave(
      reader,
      cycle_length=cycle,
      block_length=_BLOCK_LENGTH,
      # Readers wait more than they compute: one for each open file, where
      # AUTOTUNE begins with as many as there are cores.
      num_parallel_calls=cycle,
    )
  return files.flat_map(reader)


def _records(source: Source, parallel: bool) -> tf.data.Dataset:
  """The same, shuffled."""
  count = sum(map(tfrecord.count_records, source.paths()))
  return _extract(source, parallel).shuffle(count, seed=_SEED)


def _one_by_one(source, parallel=False, calls=None) -> tf.data.Dataset:
  records = _records(source, parallel)
  return records.map(_parse_one, num_parallel_calls=calls).batch(
    source.batch_size
  )


def _vectorised(source) -> tf.data.Dataset:
  records = _records(source, parallel=True).batch(source.batch_size)
  return records.map(_parse_batch, num_parallel_calls=tf.data.AUTOTUNE)


def _extract_alone(source):
  return _literal(_extract(source, parallel=False).batch(source.batch_size))


def _extract_alone_parallel(source):
  return _literal(_extract(source, parallel=True).batch(source.batch_size))


def _naive(source):
  return _literal(_one_by_one(source))


def _naive_rewritten(source):
  return _one_by_one(source)


def _prefetch(source):
  return _literal(_one_by_one(source).prefetch(tf.data.AUTOTUNE))


def _parallel_extract(source):
  return _literal(_one_by_one(source, parallel=True).prefetch(tf.data.AUTOTUNE))


def _parallel_map(source):
  batches = _one_by_one(source, parallel=True, calls=tf.data.AUTOTUNE)
  return _literal(batches.prefetch(tf.data.AUTOTUNE))


def _vectorised_map(source):
  return _literal(_vectorised(source).prefetch(tf.data.AUTOTUNE))


def _cache(source):
  batches = _vectorised(source).cache()
  return _literal(batches.prefetch(tf.data.AUTOTUNE))


def _naive_arrays(source):
  split = source.arrays
  examples = tf.data.Dataset.from_tensor_slices((split.images, split.labels))
  examples = examples.shuffle(len(split), seed=_SEED).map(_scale)
  return _literal(examples.batch(source.batch_size))


def _make_dataset(source):
  return pipeline.make_dataset(source.arrays, source.options, training=True)


def _make_tfrecord_dataset(source, cache='none'):
  options = dataclasses.replace(source.options, cache=cache)
  return pipeline.make_tfrecord_dataset(
    source.directory, 'train', options, training=True
  )


def _make_tfrecord_dataset_cache(source):
  return _make_tfrecord_dataset(source, cache='memory')


def _constant(source):
  split = source.arrays.take(source.batch_size)
  batch = _scale(tf.constant(split.images), tf.constant(split.labels))
  count = -(-source.arrays.num_examples // source.batch_size)
  return _literal(tf.data.Dataset.from_tensors(batch).repeat(count))


def _user(source):
  dataset = user_pipeline.load(source.pipeline)
  # Nothing ends an epoch, and a cache would keep it all.
  is_endless = dataset.cardinality() == tf.data.INFINITE_CARDINALITY
  return dataset.take(source.steps) if is_endless else dataset


def _user_prefetch(source):
  return _user(source).prefetch(tf.data.AUTOTUNE)


def _user_cache(source):
  return _user(source).cache()


_BUILDERS: dict[str, Callable[[Source], tf.data.Dataset]] = {
  'extract_alone': _extract_alone,
  'extract_alone_parallel': _extract_alone_parallel,
  'naive': _naive,
  'naive_rewritten': _naive_rewritten,
  'prefetch': _prefetch,
  'parallel_extract': _parallel_extract,
  'parallel_map': _parallel_map,
  'vectorised_map': _vectorised_map,
  'cache': _cache,
  'make_tfrecord_dataset': _make_tfrecord_dataset,
  'make_tfrecord_dataset_cache': _make_tfrecord_dataset_cache,
  'naive_arrays': _naive_arrays,
  'make_dataset': _make_dataset,
  'constant': _constant,
  'pipeline': _user,
  'pipeline_prefetch': _user_prefetch,
  'pipeline_cache': _user_cache,
}
NAMES = tuple(_BUILDERS)
OF_FILES = NAMES[:11]
OF_ARRAYS = NAMES[11:14]
OF_A_USER = NAMES[14:]
