"""The compared pipelines. Each adds one feature to the previous one.

The names are those of TensorFlow's guide "Better performance with the tf.data
API". All shuffle and do the same work, uint8 to float32 in [0, 1], on the same
examples. `cache` caches whole batches, as in the guide, so later epochs repeat
their batches. The names with `make_dataset` use `tfs.data`, which caches examples.

TensorFlow rewrites pipelines: a sequential map becomes parallel, and a prefetch is
appended. These rewrites are disabled in the cumulative variants, so that each is what
its name says. `naive_rewritten` is `naive` with TensorFlow's rewrites. The other
variants are not changed.

Example:

  >>> from examples import datasets
  >>> from benchmarks.input_pipeline import variants
  >>> small = datasets.make_synthetic(num_train=10, num_test=4).train
  >>> source = variants.Source(arrays=small, batch_size=4)
  >>> [len(y) for _, y in variants.build('naive_arrays', source)]
  [4, 4, 2]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from examples import datasets
from examples.datasets import images as images_lib
from examples.datasets import tfrecord, user_function
from tf_strategies import data, errors

_MAX_OPEN_FILES = 16
_BLOCK_LENGTH = 16
_SEED = 0
# The flag with the user's function.
OPTION = 'pipeline'
_AUTOTUNE = tf.data.AUTOTUNE


@dataclasses.dataclass(frozen=True)
class Source:
  """The input of the variants.

  Attributes:
    arrays: the training split.
    batch_size: number of examples per batch.
    directory: directory with the same examples as TFRecord shards.
    pipeline: the user's function, as 'module:function'.
    steps: number of batches per epoch of an infinite dataset of the user.
  """

  arrays: images_lib.Images | None = None
  batch_size: int = 256
  directory: str | None = None
  pipeline: str | None = None
  steps: int = 200

  @property
  def options(self) -> data.PipelineOptions:
    """Returns the default options of `tfs.data`."""
    return data.PipelineOptions(self.batch_size, seed=_SEED)


def build(name: str, source: Source) -> tf.data.Dataset:
  """Returns one epoch of batches of a variant.

  Args:
    name: one of `NAMES` or `USER_PIPELINES`.
    source: its input.

  Raises:
    UnsupportedOptionError: if the user's function does not return a dataset.
    DataError: see `make_dataset`.
  """
  if name in _LITERAL:
    return _literal(_LITERAL[name](source))
  return _BUILDERS[name](source)


def _literal(dataset: tf.data.Dataset) -> tf.data.Dataset:
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
  return _scale(tf.reshape(image, images_lib.IMAGE_SHAPE), parsed['label'])


def _parse_batch(records):
  return _scale(*tfrecord.parse_examples(records))


def _records(source: Source, parallel: bool) -> tf.data.Dataset:
  """Returns shuffled records. If `parallel`, reads many files at the same time."""
  shards = datasets.tfrecords(source.directory, 'train')
  paths = list(shards.paths)
  files = tf.data.Dataset.from_tensor_slices(paths)
  if parallel:
    cycle = min(len(paths), _MAX_OPEN_FILES)
    records = files.interleave(
      tf.data.TFRecordDataset,
      cycle_length=cycle,
      block_length=_BLOCK_LENGTH,
      # Readers mostly wait, so use one for each open file. AUTOTUNE would begin
      # with one per core.
      num_parallel_calls=cycle,
    )
  else:
    records = files.flat_map(tf.data.TFRecordDataset)
  return records.shuffle(shards.num_examples, seed=_SEED)


def _example_wise(source, parallel=False, calls=None) -> tf.data.Dataset:
  records = _records(source, parallel)
  return records.map(_parse_one, num_parallel_calls=calls).batch(
    source.batch_size
  )


def _vectorised(source) -> tf.data.Dataset:
  records = _records(source, parallel=True).batch(source.batch_size)
  return records.map(_parse_batch, num_parallel_calls=_AUTOTUNE)


def _naive_arrays(source) -> tf.data.Dataset:
  split = source.arrays
  examples = tf.data.Dataset.from_tensor_slices((split.images, split.labels))
  examples = examples.shuffle(len(split), seed=_SEED).map(_scale)
  return examples.batch(source.batch_size)


def _tfrecords(source, cache) -> tf.data.Dataset:
  options = dataclasses.replace(source.options, cache=cache)
  shards = datasets.tfrecords(source.directory, 'train')
  return data.make_dataset(shards, options, training=True)


def _constant(source) -> tf.data.Dataset:
  split = source.arrays.take(source.batch_size)
  batch = _scale(tf.constant(split.images), tf.constant(split.labels))
  count = -(-source.arrays.num_examples // source.batch_size)
  return tf.data.Dataset.from_tensors(batch).repeat(count)


def _user_pipeline(source) -> tf.data.Dataset:
  dataset = user_function.find(OPTION, source.pipeline)()
  if not isinstance(dataset, tf.data.Dataset):
    raise errors.UnsupportedOptionError(
      f'{OPTION}={source.pipeline!r} (it returned a {type(dataset).__name__})',
      'a function without arguments that returns a tf.data.Dataset',
      'return the dataset, before strategies or iterators',
    )
  # An infinite dataset needs an end of the epoch, also for the cache.
  is_endless = dataset.cardinality() == tf.data.INFINITE_CARDINALITY
  return dataset.take(source.steps) if is_endless else dataset


_Builder = Callable[[Source], tf.data.Dataset]
# These run exactly as written.
_LITERAL: dict[str, _Builder] = {
  'naive': _example_wise,
  'prefetch': lambda s: _example_wise(s).prefetch(_AUTOTUNE),
  'parallel_extract': lambda s: _example_wise(s, True).prefetch(_AUTOTUNE),
  'parallel_map': lambda s: _example_wise(s, True, _AUTOTUNE).prefetch(
    _AUTOTUNE
  ),
  'vectorised_map': lambda s: _vectorised(s).prefetch(_AUTOTUNE),
  'cache': lambda s: _vectorised(s).cache().prefetch(_AUTOTUNE),
  'naive_arrays': _naive_arrays,
  'constant': _constant,
}
_BUILDERS: dict[str, _Builder] = {
  'naive_rewritten': _example_wise,
  'make_dataset_tfrecords': lambda s: _tfrecords(s, cache='none'),
  'make_dataset_tfrecords_cache': lambda s: _tfrecords(s, cache='memory'),
  'make_dataset': lambda s: data.make_dataset(
    s.arrays, s.options, training=True
  ),
  'pipeline': _user_pipeline,
  'pipeline_prefetch': lambda s: _user_pipeline(s).prefetch(_AUTOTUNE),
  'pipeline_cache': lambda s: _user_pipeline(s).cache(),
}
USER_PIPELINES = ('pipeline', 'pipeline_prefetch', 'pipeline_cache')
# The variants that read images.
NAMES = tuple(
  name for name in (*_LITERAL, *_BUILDERS) if name not in USER_PIPELINES
)
