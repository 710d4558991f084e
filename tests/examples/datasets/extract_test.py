"""Extraction writes all files or the changed ones, even after interruptions."""

import os
import pathlib
import random
import signal
import sys
import time

import pytest
import tensorflow as tf
from absl import logging

from benchmarks import processes
from examples import datasets
from examples.datasets import manifest as manifest_lib
from tests.data import formula
from tf_strategies import data as data_lib

_DEADLINE_SECONDS = 120
_LINES = 7


def convert_lines(path):
  """Yields one record for each line, and sleeps some milliseconds for each."""
  with open(path, 'rb') as f:
    for line in f:
      time.sleep(float(os.environ.get('TEST_SLEEP', '0')))
      yield line.strip()


def shards_of(directory):
  """Returns the names, bytes and times of shards."""
  return {
    entry.name: (pathlib.Path(entry).read_bytes(), entry.stat().st_mtime_ns)
    for entry in os.scandir(directory)
    if 'tfrecord' in entry.name and not entry.name.startswith('.')
  }


class ExtractTestCase(formula.DataTestCase):
  def setUp(self):
    super().setUp()
    self.raw = self.new_dir()
    self.out = self.path('out')
    for i in range(4):
      self.write_source(i, f'word{i}')

  def write_source(self, i, word):
    path = self.source(i)
    with open(path, 'w', encoding='utf-8') as f:
      f.writelines(f'{word}-{j}\n' for j in range(_LINES))
    stamp = 10**18 + i
    os.utime(path, ns=(stamp, stamp))
    return path

  def source(self, i):
    return os.path.join(self.raw, f'{i}.txt')

  def extract(self, **changes):
    arguments = {
      'convert_fn': convert_lines,
      'name': 'words',
      'examples_per_shard': 3,
    }
    return datasets.extract(self.raw, self.out, **(arguments | changes))

  def words(self):
    dataset = data_lib.make_dataset(
      datasets.tfrecords(self.out, 'train', lambda x: x),
      data_lib.PipelineOptions(4),
      training=False,
    )
    return [w.decode() for batch in dataset.as_numpy_iterator() for w in batch]

  def expected(self, *words):
    return [f'{word}-{j}' for word in words for j in range(_LINES)]

  def run_with_warning(self, fragment, **changes):
    with self.assertLogs(logging.get_absl_logger(), 'WARNING') as logs:
      report = self.extract(**changes)
    self.assertIn(fragment, '\n'.join(logs.output))
    return report


class PartialTest(ExtractTestCase):
  def setUp(self):
    super().setUp()
    report = self.extract()
    self.assertLen(report.converted, 4)
    self.assertEqual((report.examples, report.shards), (4 * _LINES, 4 * 3))
    self.before = shards_of(self.out)

  def assert_only_changed(self, *numbers):
    """Checks that shards of other sources kept their bytes and times."""
    after = shards_of(self.out)
    for name, content in self.before.items():
      if name.split('-')[2] not in map(str, numbers):
        self.assertEqual(after[name], content)

  @pytest.mark.smoke
  def test_new_changed_and_removed_files(self):
    self.write_source(1, 'another')
    self.write_source(5, 'new')
    os.remove(self.source(2))
    lines = []
    report = self.extract(progress=lines.append)
    self.assertEqual(report.converted, (self.source(1), self.source(5)))
    self.assertEqual(report.unchanged, (self.source(0), self.source(3)))
    self.assertEqual(report.removed, (self.source(2),))
    self.assertEqual(
      self.words(), self.expected('word0', 'another', 'word3', 'new')
    )
    self.assert_only_changed(1, 2)
    self.assertEqual(
      [line.split()[0] for line in lines],
      ['removed', 'unchanged', 'converted', 'unchanged', 'converted'],
    )

  def test_same_size_and_time_needs_the_checksum(self):
    self.write_source(3, 'WORD3')  # Keeps its modification time.
    self.assertEmpty(self.extract().converted)
    self.assertEqual(self.words()[-1], 'word3-6')
    self.assertEqual(self.extract(checksum=True).converted, (self.source(3),))
    self.assertEqual(self.words()[-1], 'WORD3-6')
    self.assert_only_changed(3)

  def test_damaged_shard_is_converted_again(self):
    name = next(name for name in sorted(self.before) if '-2-' in name)
    path = pathlib.Path(self.out, name)
    path.write_bytes(path.read_bytes()[:-1] + b'!')
    report = self.run_with_warning('missing, truncated or edited')
    self.assertEqual(report.converted, (self.source(2),))
    self.assertEqual(shards_of(self.out), self.before)

  def test_invalid_manifest_converts_all_files_again(self):
    path = pathlib.Path(self.out, 'manifest.json')
    text = path.read_text('utf-8')
    path.write_text(text.replace('"examples": 3', '"examples": 4', 1), 'utf-8')
    self.assert_data_error([str(path), 'extract again'], self.words)
    report = self.run_with_warning('All files are converted')
    self.assertLen(report.converted, 4)
    self.assertEqual(path.read_text('utf-8'), text)
    self.assertEqual(shards_of(self.out), self.before)


class RefusalsTest(ExtractTestCase):
  def test_invalid_sources_are_refused(self):
    self.assert_data_error(
      ['no such file', 'nowhere'],
      datasets.extract,
      os.path.join(self.raw, 'nowhere*'),
      self.out,
      convert_lines,
    )
    self.assert_data_error(
      [self.source(0), 'convert_fn'], datasets.extract, self.raw, self.out
    )
    self.assert_data_error(
      [self.source(0), 'yielded a int', 'tf.train.Example'],
      self.extract,
      convert_fn=lambda path: [1],
    )

  def test_failed_extraction_is_refused_by_readers(self):
    def fail_at_2(path):
      if path.endswith('2.txt'):
        raise ValueError('line 5')
      return convert_lines(path)

    with self.assertRaisesRegex(ValueError, 'line 5'):
      self.extract(convert_fn=fail_at_2)
    self.assert_data_error([self.out, 'interrupted'], self.words)
    self.assertEmpty([name for name in os.listdir(self.out) if '.tmp' in name])
    self.extract()
    self.assertLen(self.words(), 4 * _LINES)


class KillTest(ExtractTestCase):
  def start(self):
    command = processes.Command(
      [
        sys.executable,
        '-m',
        'examples.datasets.extract',
        f'--source={self.raw}',
        f'--output_dir={self.out}',
        '--convert=tests.examples.datasets.extract_test:convert_lines',
        '--name=words',
        '--examples_per_shard=3',
      ],
      error_log=self.path('errors'),
      env=processes.python_environment({'TEST_SLEEP': '0.1'}),
      deadline_seconds=_DEADLINE_SECONDS,
    )
    self.addCleanup(command.close)
    return command

  def test_next_run_after_a_kill_gives_the_same_files(self):
    undisturbed = self.path('undisturbed')
    datasets.extract(
      self.raw, undisturbed, convert_lines, name='words', examples_per_shard=3
    )
    self.write_source(1, 'before')
    self.extract()
    self.write_source(1, 'word1')
    self.write_source(7, 'gone')
    # Each line takes 100 ms. The changed lines take 1.4 s after the manifest is
    # marked as incomplete.
    command = self.start()
    command.wait_until(lambda: not manifest_lib.read(self.out).is_complete)
    self.assert_data_error(['another process'], self.extract)
    time.sleep(random.Random().uniform(0, 0.7))
    self.assertEqual(command.kill(), -signal.SIGKILL)
    self.assert_data_error([self.out, 'interrupted'], self.words)
    os.remove(self.source(7))
    self.extract()
    self.assertEqual(shards_of(self.out), shards_of(undisturbed))
    self.assertEqual(
      manifest_lib.read(self.out).entries,
      manifest_lib.read(undisturbed).entries,
    )


if __name__ == '__main__':
  tf.test.main()
