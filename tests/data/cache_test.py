"""A cache on disk that was cut short is made anew; a live one is left alone."""

import fcntl
import os
import sys

import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from absl.testing import parameterized

from benchmarks import processes
from examples import datasets
from tests import tiers
from tests.data import formula
from tf_strategies import data as data_lib
from tf_strategies import errors
from tf_strategies.data import cache

_N = 40
_DEADLINE_SECONDS = 120
# Fills the cache up to a third, says so and waits for what comes.
_WRITER = """
import sys, time
from examples import datasets
from tf_strategies import data
options = data.PipelineOptions(
  4, cache='disk', cache_path=sys.argv[2], shuffle_buffer=1, prefetch=0)
source = datasets.tfrecords(sys.argv[1], 'train')
iterator = iter(data.make_dataset(source, options, training=True))
for _ in range(3):
  next(iterator)
print('begun', flush=True)
time.sleep(100)
"""


class CacheTestCase(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.shards = self.create_tempdir().full_path
    self.write_shards(formula.arrays(_N))
    self.prefix = os.path.join(self.create_tempdir().full_path, 'cache')

  def write_shards(self, train):
    for entry in os.listdir(self.shards):
      os.remove(os.path.join(self.shards, entry))
    data = datasets.ImageClassificationData(
      'mnist', train, formula.arrays(3), 10**6
    )
    self.paths = datasets.write_tfrecords(data, self.shards, 2)

  def make(self, **changes):
    functions = {
      name: changes.pop(name) for name in ('prepare_fn',) if name in changes
    }
    options = data_lib.PipelineOptions(
      **({'global_batch_size': 8, 'cache': 'disk', 'seed': 1} | changes),
      cache_path=self.prefix,
    )
    return data_lib.make_dataset(
      datasets.tfrecords(self.shards, 'train'),
      options,
      training=True,
      **functions,
    )

  def labels(self, dataset):
    return sorted(int(y) for _, labels in dataset for y in labels)

  def files(self, suffix=''):
    directory = os.path.dirname(self.prefix)
    return sorted(
      os.path.join(directory, entry)
      for entry in os.listdir(directory)
      if suffix in entry
    )


class DamageTest(CacheTestCase):
  def setUp(self):
    super().setUp()
    self.assertEqual(self.labels(self.make()), list(range(_N)))

  def damage(self, suffix, change):
    (path,) = self.files(suffix)
    with open(path, 'rb') as f:
      content = f.read()
    with open(path, 'wb') as f:
      f.write(change(content))

  @tiers.product(
    suffix=('.data-', tiers.full('.index')),
    change=(
      ('one_byte', lambda content: content[:-1]),
      tiers.full(('half', lambda content: content[: len(content) // 2])),
      tiers.full(('all', lambda content: b'')),
      tiers.full(('zeros', lambda content: content[:-100] + bytes(100))),
    ),
  )
  def test_is_found_before_the_first_step(self, suffix, change):
    self.damage(suffix, change[1])
    with self.assertLogs(logging.get_absl_logger(), 'WARNING') as logs:
      dataset = self.make()
    self.assertIn('truncated or damaged', logs.output[0])
    self.assertIn(self.prefix, logs.output[0])
    for _ in range(2):
      self.assertEqual(self.labels(dataset), list(range(_N)))
    with self.assertNoLogs(logging.get_absl_logger(), 'WARNING'):
      self.make()

  @pytest.mark.full
  def test_missing_part_is_written_again(self):
    for suffix in ('.data-', '.index'):
      (path,) = self.files(suffix)
      os.remove(path)
      self.assertEqual(self.labels(self.make()), list(range(_N)))

  def test_whole_cache_is_not_written_again(self):
    before = [os.stat(path).st_mtime_ns for path in self.files()]
    self.assertLen(before, 3)
    self.assertEqual(self.labels(self.make()), list(range(_N)))
    self.assertEqual([os.stat(p).st_mtime_ns for p in self.files()], before)


class StaleTest(CacheTestCase):
  def test_changed_sources_replace_their_cache_and_no_other(self):
    test_options = data_lib.PipelineOptions(
      8, cache='disk', cache_path=self.prefix
    )
    self.labels(
      data_lib.make_dataset(
        datasets.tfrecords(self.shards, 'test'), test_options, training=False
      )
    )
    stranger = f'{self.prefix}-mnist-train-notes.txt'
    with open(stranger, 'w', encoding='utf-8') as f:
      f.write('kept')
    kept = self.files()
    self.labels(self.make())
    # Its lock stays as long as this process could fill it again.
    old = set(self.files()) - set(kept) - set(self.files('.owner'))
    self.assertLen(old, 2)
    train = datasets.Images(formula.images(_N), np.arange(_N) + 5)
    self.write_shards(train)
    with self.assertLogs(logging.get_absl_logger(), 'WARNING') as logs:
      dataset = self.make()
    self.assertIn('sources that have changed', logs.output[0])
    self.assertEqual(self.labels(dataset), list(range(5, _N + 5)))
    self.assertEmpty(old & set(self.files()))
    self.assertContainsSubset([stranger], self.files())
    # That of the other split is removed when that one is made.
    self.assertContainsSubset(kept, self.files())

  @pytest.mark.full
  def test_another_version_that_is_being_filled_is_left_alone(self):
    first = iter(self.make(prefetch=0, shuffle_buffer=1))
    next(first)
    filling = self.files()
    self.labels(self.make(prepare_fn=lambda x, y: (x, y + 100)))
    self.assertContainsSubset(filling, self.files())
    for _ in first:
      pass
    self.assertLen(self.files('.index'), 2)

  @pytest.mark.full
  def test_another_version_of_a_process_that_lives_is_left_alone(self):
    self.make()
    (owner,) = self.files('.owner')
    stem = owner.removesuffix('.owner')[:-12]
    other = [f'{stem}{"0" * 12}{end}' for end in ('.owner', '_0.lockfile')]
    for path in other:
      open(path, 'wb').close()
    # Of a file that was opened anew, as by another process.
    with open(other[0], 'rb') as lock:
      fcntl.flock(lock, fcntl.LOCK_EX)
      self.make()
      self.assertContainsSubset(other, self.files())
    self.make()
    self.assertEqual(self.files(), [owner])

  @pytest.mark.full
  def test_file_sets_of_one_directory_keep_their_caches(self):
    options = data_lib.PipelineOptions(
      8, cache='disk', cache_path=self.prefix, shuffle_buffer=0
    )
    train, test = (
      [path for path in self.paths if f'-{split}-' in path]
      for split in ('train', 'test')
    )
    for sets in (
      (train, test),
      (
        os.path.join(self.shards, '*-train-*'),
        os.path.join(self.shards, '*-test-*'),
      ),
    ):
      for paths in sets * 2:
        with self.assertNoLogs(logging.get_absl_logger(), 'WARNING'):
          dataset = data_lib.make_dataset(
            data_lib.TFRecords(paths, lambda x: x), options, training=True
          )
        self.assertLen(list(dataset.unbatch()), _N if paths is sets[0] else 3)
    self.assertLen(self.files('.index'), 4)

  @pytest.mark.full
  def test_another_prepare_fn_is_another_cache(self):
    def make(shift):
      return self.make(prepare_fn=lambda x, y: (x, y + shift))

    self.assertEqual(self.labels(make(100)), list(range(100, 100 + _N)))
    before = self.files('.index')
    self.assertEqual(self.labels(make(100)), list(range(100, 100 + _N)))
    self.assertEqual(self.files('.index'), before)
    self.assertEqual(self.labels(make(200)), list(range(200, 200 + _N)))

  @pytest.mark.full
  def test_what_a_prepare_fn_calls_counts(self):
    factor = 2

    def helper(labels):
      return factor * labels

    def prepare(images, labels):
      return images, helper(labels)

    self.assertEqual(self.labels(self.make(prepare_fn=prepare))[-1], 78)
    factor = 3
    self.assertEqual(self.labels(self.make(prepare_fn=prepare))[-1], 117)


@pytest.mark.full
class KillTest(CacheTestCase):
  def start_writer(self):
    writer = processes.Command(
      [sys.executable, '-c', _WRITER, self.shards, self.prefix],
      env=processes.python_environment(),
      deadline_seconds=_DEADLINE_SECONDS,
    )
    self.addCleanup(writer.close)
    writer.wait_until(lambda: 'begun\n' in writer.output())
    return writer

  def test_leftovers_of_a_killed_process_are_removed(self):
    writer = self.start_writer()
    self.assertLen(self.files('.lockfile'), 1)
    # It is alive: its files are not touched, and nobody fails in a step.
    before = self.files()
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, f'cache_path=.*process {writer.pid} '
    ):
      self.make()
    self.assertEqual(self.files(), before)
    writer.kill()
    self.assertLen(self.files('.lockfile'), 1)
    with self.assertLogs(logging.get_absl_logger(), 'WARNING') as logs:
      dataset = self.make()
    self.assertIn('killed', logs.output[0])
    for _ in range(2):
      self.assertEqual(self.labels(dataset), list(range(_N)))
    self.assertEmpty(self.files('.lockfile') + self.files('tempstate'))

  def test_an_epoch_that_this_process_is_in_is_not_disturbed(self):
    iterator = iter(self.make(prefetch=0, shuffle_buffer=1))
    next(iterator)
    self.assertLen(self.files('.lockfile'), 1)
    other = self.make()
    self.assertLen(self.files('.lockfile'), 1)
    for _ in iterator:
      pass
    self.assertEqual(self.labels(other), list(range(_N)))


class RemoteTest(CacheTestCase):
  @parameterized.parameters((('*',),), (('0', '1'),))
  def test_cache_of_remote_files_is_found_from_any_directory(self, which):
    directory = f'ram://{self.id()}'
    for i in range(2):
      with tf.io.TFRecordWriter(f'{directory}/{i}.tfrecord') as writer:
        writer.write(b'1' * (i + 1))
    paths = [f'{directory}/{name}.tfrecord' for name in which]
    source_of = paths if len(paths) > 1 else paths[0]
    self.addCleanup(os.chdir, os.getcwd())
    found = []
    for _ in range(2):
      os.chdir(self.create_tempdir().full_path)
      source = data_lib.TFRecords(source_of, tf.strings.length)
      options = data_lib.PipelineOptions(
        4, cache='disk', cache_path=self.prefix, seed=1
      )
      [batch] = data_lib.make_dataset(source, options, training=False)
      self.assertCountEqual(batch.numpy(), [1, 2])
      found.append(self.files('.index'))
    self.assertLen(found[1], 1)
    self.assertEqual(*found)


class LimitsTest(CacheTestCase):
  def test_directory_that_cannot_be_made(self):
    with open(self.prefix, 'w', encoding='utf-8') as f:
      f.write('a file')
    self.prefix = os.path.join(self.prefix, 'cache')
    with self.assertRaisesRegex(errors.DataError, 'cannot be written'):
      self.make()

  def test_more_examples_than_the_files_can_number(self):
    name = cache.name_of(self.prefix, 'numbers', [], [])
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, '10000001 examples'
    ):
      cache.on_disk(tf.data.Dataset.range(1), name, 10**7 + 1)


if __name__ == '__main__':
  tf.test.main()
