"""Slow storage yields the same records, later, and its waits can overlap."""

import time

import tensorflow as tf
from absl.testing import parameterized

from benchmarks.input_pipeline import slow_storage
from examples import datasets
from tests.data import formula
from tf_strategies import data as data_lib
from tf_strategies import errors

_NUM_FILES = 8
_NUM_EXAMPLES = 100
_FIRST_BYTE_MS = 40
_BYTES_PER_S = 1e6


def _seconds(dataset):
  start = time.perf_counter()
  for _ in dataset:
    pass
  return time.perf_counter() - start


class SlowStorageTest(formula.DataTestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    directory = self.new_dir()
    small = datasets.make_synthetic(_NUM_EXAMPLES, _NUM_FILES)
    paths = datasets.write_tfrecords(small, directory, _NUM_FILES)
    self.paths = paths[:_NUM_FILES]
    self.directory = directory
    self.waited = tf.Variable(0, dtype=tf.int64)

  def read(self, path, **options):
    options = {'first_byte_ms': 0, 'waited': self.waited, **options}
    return slow_storage.read(path, **options)

  @parameterized.parameters(
    {},
    {'first_byte_ms': 1},
    {'mb_per_s': 10},
    {'mb_per_s': 10, 'buffer_size': 9},
  )
  def test_records_are_those_of_the_files(self, **options):
    expected = list(tf.data.TFRecordDataset(self.paths).as_numpy_iterator())
    found = list(self.read(self.paths, **options).as_numpy_iterator())
    self.assertLen(found, _NUM_EXAMPLES)
    self.assertEqual(found, expected)

  def test_each_file_of_each_epoch_waits_once(self):
    files = tf.data.Dataset.from_tensor_slices(self.paths)
    records = files.flat_map(lambda p: self.read(p, first_byte_ms=2))
    for epoch in (1, 2):
      seconds = _seconds(records)
      self.assertEqual(int(self.waited), epoch * _NUM_FILES * 2000)
      self.assertGreaterEqual(seconds, _NUM_FILES * 0.002)

  def test_throughput_waits_for_the_bytes(self):
    records = self.read(self.paths, mb_per_s=_BYTES_PER_S / 1e6)
    expected = sum(
      len(r) for r in tf.data.TFRecordDataset(self.paths).as_numpy_iterator()
    )
    seconds = _seconds(records)
    # Each wait is a whole number of microseconds.
    self.assertAllClose(int(self.waited), expected, atol=_NUM_FILES * 4)
    self.assertGreaterEqual(seconds, 0.99 * expected / _BYTES_PER_S)

  def test_waits_of_several_files_overlap(self):
    files = tf.data.Dataset.from_tensor_slices(self.paths)

    def read(path):
      return self.read(path, first_byte_ms=_FIRST_BYTE_MS)

    parallel = files.interleave(
      read, cycle_length=_NUM_FILES, num_parallel_calls=_NUM_FILES
    )
    sequential = files.flat_map(read)
    _seconds(parallel)  # The first iterator initialises ops.
    fastest = min(_seconds(parallel) for _ in range(3))
    self.assertGreaterEqual(_seconds(sequential), 2 * fastest)

  def test_pipelines_that_are_built_inside_are_slow(self):
    before = tf.data.TFRecordDataset
    options = data_lib.PipelineOptions(global_batch_size=10, seed=1)
    storage = slow_storage.Storage(first_byte_ms=1)
    with slow_storage.simulated(storage, self.waited):
      dataset = data_lib.make_dataset(
        datasets.tfrecords(self.directory, 'train'), options, training=True
      )
    self.assertIs(tf.data.TFRecordDataset, before)
    self.assertEqual(sum(len(y) for _, y in dataset), _NUM_EXAMPLES)
    self.assertEqual(int(self.waited), _NUM_FILES * 1000)

  def test_fast_storage_replaces_nothing(self):
    before = tf.data.TFRecordDataset
    with slow_storage.simulated(slow_storage.Storage()):
      self.assertIs(tf.data.TFRecordDataset, before)

  @parameterized.parameters(
    ({'first_byte_ms': -1}, 'first_byte_ms=-1'),
    ({'first_byte_ms': float('nan')}, 'first_byte_ms=nan'),
    ({'mb_per_s': 0}, 'mb_per_s=0'),
  )
  def test_impossible_storage_is_refused(self, options, words):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, words):
      slow_storage.Storage(**options)


if __name__ == '__main__':
  tf.test.main()
