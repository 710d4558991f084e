"""TFRecord files as they would come from slow or remote storage.

What a fast disk hides decides how a pipeline must read: each file then costs
some milliseconds before its first byte, and each block its bytes divided by the
throughput. Here both are waits of tf.data's own sleep op, on the thread that
reads the file: no Python runs, so sixteen readers wait at the same time.
(`tf.numpy_function` with `time.sleep` waits on the threads that run ops, of which
there are as many as cores.)

tf.data does not know that this op's waits are time a file takes, so neither does
its tuner: with `num_parallel_calls=tf.data.AUTOTUNE` an interleave opens fewer
files at once here than it may on a real slow disk.

Example:

  >>> import os, tempfile
  >>> from examples import datasets
  >>> from benchmarks.input_pipeline import slow_storage
  >>> small = datasets.make_synthetic(num_train=6, num_test=4)
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   paths = datasets.write_tfrecords(small, directory, num_shards=2)
  ...   records = slow_storage.read(paths[0], first_byte_ms=1, mb_per_s=50)
  ...   len(list(records))
  3
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import tensorflow as tf

from tf_strategies import errors

# Records between two waits for throughput: of 28x28 images, about 27 kB.
_BLOCK_RECORDS = 32
# Blocks between two waits for a first byte: more than a file has.
_MANY = 1 << 20


@dataclasses.dataclass(frozen=True)
class Storage:
  """How slow the storage is.

  Attributes:
    first_byte_ms: from opening a file to its first record.
    mb_per_s: of one file's reader, in 10**6 bytes; None for no limit.

  Raises:
    UnsupportedOptionError: a value out of its range.
  """

  first_byte_ms: float = 0.0
  mb_per_s: float | None = None

  def __post_init__(self):
    if not self.first_byte_ms >= 0:
      raise errors.UnsupportedOptionError(
        f'first_byte_ms={self.first_byte_ms!r}',
        'at least 0',
        'pass the milliseconds from opening a file to its first byte, such '
        'as 10',
      )
    if self.mb_per_s is not None and not self.mb_per_s > 0:
      raise errors.UnsupportedOptionError(
        f'mb_per_s={self.mb_per_s!r}',
        'None (no limit) or above 0',
        'pass the megabytes a second of one reader, such as 100',
      )

  @property
  def is_slow(self) -> bool:
    """Whether there is anything to wait for."""
    return self.first_byte_ms > 0 or self.mb_per_s is not None


def read(
  paths: str | os.PathLike[str] | tf.Tensor,
  first_byte_ms: float = 10.0,
  mb_per_s: float | None = None,
  waited: tf.Variable | None = None,
  **reader_options,
) -> tf.data.Dataset:
  """Reads TFRecord files as `tf.data.TFRecordDataset` does, but slowly.

  To simulate a file a thread, give it to `interleave` in the place of
  `tf.data.TFRecordDataset`.

  Args:
    paths: one path, or several, which are read one after the other.
    first_byte_ms: the wait before the first record of a file.
    mb_per_s: 10**6 bytes a second; None for no limit.
    waited: int64; the microseconds of all waits are added to it.
    **reader_options: of `tf.data.TFRecordDataset`.

  Returns:
    A dataset of records, string [].

  Raises:
    UnsupportedOptionError: as `Storage`.
  """
  storage = Storage(first_byte_ms, mb_per_s)
  # The class itself, whatever `simulated` has put into its place.
  reader = _READER
  if isinstance(paths, os.PathLike):
    paths = os.fspath(paths)

  def read_one(path):
    blocks = reader(path, **reader_options).batch(_BLOCK_RECORDS)
    if storage.mb_per_s is not None:
      blocks = blocks.flat_map(arrived)
    wait = _waits_once(storage.first_byte_ms * 1e3, waited)
    late = tf.data.Dataset.zip((wait, blocks))
    return late.map(lambda _, block: block).unbatch()

  def arrived(block):
    size = tf.reduce_sum(tf.strings.length(block))
    # Bytes over 10**6 bytes a second are microseconds.
    wait = tf.cast(size, tf.float64) / storage.mb_per_s
    block = tf.data.Dataset.from_tensors(block)
    return _sleeps(block, wait, waited).take(1)

  paths = tf.convert_to_tensor(paths)
  if paths.shape.rank == 0 and tf.inside_function():
    # The function of an interleave runs once a file: nothing to go through.
    return read_one(paths)
  files = tf.data.Dataset.from_tensor_slices(tf.reshape(paths, [-1]))
  return files.flat_map(read_one)


@contextlib.contextmanager
def simulated(
  storage: Storage, waited: tf.Variable | None = None
) -> Iterator[None]:
  """Makes pipelines that are built inside read slowly.

  `tf.data.TFRecordDataset` is replaced meanwhile, in the whole process: for
  benchmarks and tests, of pipelines that open their files themselves.

  Args:
    storage: how slow.
    waited: as in `read`.
  """

  def slow_reader(filenames, *arguments, **options):
    names = ('compression_type', 'buffer_size', 'num_parallel_reads', 'name')
    options.update(zip(names, arguments, strict=False))
    return read(
      filenames, storage.first_byte_ms, storage.mb_per_s, waited, **options
    )

  before = tf.data.TFRecordDataset
  if storage.is_slow:
    tf.data.TFRecordDataset = slow_reader
  try:
    yield
  finally:
    tf.data.TFRecordDataset = before


def _waits_once(microseconds, waited) -> tf.data.Dataset:
  """As many elements as a file has blocks; the first one comes late.

  Nothing here is made while it is iterated, where `flat_map` or `concatenate`
  would cost each file another five milliseconds.
  """
  many = tf.data.Dataset.from_tensors(tf.zeros([_MANY], tf.int8))
  return _sleeps(many, microseconds, waited).take(1).unbatch().repeat()


def _sleeps(dataset, microseconds, waited) -> tf.data.Dataset:
  """The same elements, each of which comes after a while."""
  microseconds = tf.cast(microseconds, tf.int64)
  if waited is not None:
    with tf.control_dependencies([waited.assign_add(microseconds)]):
      microseconds = tf.identity(microseconds)
  spec = dataset.element_spec
  late = tf.raw_ops.SleepDataset(
    input_dataset=tf.data.experimental.to_variant(dataset),
    sleep_microseconds=microseconds,
    output_types=[spec.dtype],
    output_shapes=[spec.shape],
  )
  return tf.data.experimental.from_variant(late, spec)


_READER = tf.data.TFRecordDataset
