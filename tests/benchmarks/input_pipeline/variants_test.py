"""Every variant yields each example once, with the same pixels."""

import sys
import types

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from benchmarks.input_pipeline import slow_storage, user_pipeline, variants
from examples import datasets
from tests.data import formula
from tf_strategies import errors

_NUM_EXAMPLES = 22
_ONCE = [
  name
  for name in (*variants.OF_FILES, *variants.OF_ARRAYS)
  if name not in ('extract_alone', 'extract_alone_parallel', 'constant')
]
_MODULE = 'pipelines_of_a_program'


class VariantsTest(formula.DataTestCase, parameterized.TestCase):
  def source(self, **options):
    directory = self.new_dir()
    data = formula.numbered(_NUM_EXAMPLES, 5)
    datasets.write_tfrecords(data, directory, 4)
    return variants.Source(data.train, 8, directory, **options)

  @parameterized.parameters(*_ONCE)
  def test_each_example_comes_once_an_epoch(self, name):
    dataset = variants.build(name, self.source())
    for _ in range(2):
      images, labels = zip(*dataset.as_numpy_iterator(), strict=True)
      self.assertEqual([len(part) for part in labels], [8, 8, 6])
      images, labels = np.concatenate(images), np.concatenate(labels)
      self.assertEqual(images.dtype, np.float32)
      self.assertCountEqual(labels, range(_NUM_EXAMPLES))
      expected = formula.images(_NUM_EXAMPLES)[labels] / np.float32(255)
      self.assertAllClose(images, expected, atol=1e-6)

  @parameterized.parameters('extract_alone', 'extract_alone_parallel')
  def test_extract_reads_every_record(self, name):
    dataset = variants.build(name, self.source())
    self.assertEqual(sum(len(batch) for batch in dataset), _NUM_EXAMPLES)

  def test_constant_is_one_batch(self):
    batches = list(variants.build('constant', self.source()))
    self.assertLen(batches, 3)
    for _, labels in batches:
      self.assertAllEqual(labels, range(8))

  @parameterized.parameters('naive', 'cache', 'make_dataset_tfrecords')
  def test_storage_is_slow_unless_the_name_says_otherwise(self, name):
    waited = tf.Variable(0, dtype=tf.int64)
    source = self.source(storage=slow_storage.Storage(1), waited=waited)
    list(variants.build(name + variants.FAST_STORAGE, source))
    self.assertEqual(int(waited), 0)
    list(variants.build(name, source))
    self.assertEqual(int(waited), 4 * 1000)

  def test_unknown_variant_is_refused(self):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'naiv'):
      variants.build('naiv', self.source())


class UserPipelineTest(formula.DataTestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    module = types.ModuleType(_MODULE)
    module.dataset = lambda: tf.data.Dataset.range(6).batch(4)
    module.endless = lambda: tf.data.Dataset.range(6).batch(4).repeat()
    module.array = lambda: np.zeros(3)
    module.needs = lambda path: path
    module.number = 7
    module.broken = lambda: 1 // 0
    sys.modules[_MODULE] = module
    self.addCleanup(sys.modules.pop, _MODULE)

  @parameterized.parameters(*variants.OF_A_USER)
  def test_each_variant_yields_what_the_function_made(self, name):
    source = variants.Source(pipeline=f'{_MODULE}:dataset')
    batches = list(variants.build(name, source).as_numpy_iterator())
    self.assertAllEqual(np.concatenate(batches), range(6))

  @parameterized.parameters(*variants.OF_A_USER)
  def test_epoch_without_end_is_cut(self, name):
    source = variants.Source(pipeline=f'{_MODULE}:endless', steps=5)
    self.assertLen(list(variants.build(name, source)), 5)

  @parameterized.parameters(
    ('dataset', 'module:function'),
    (':dataset', 'module:function'),
    ('a-b:dataset', 'module:function'),
    ('no_such_module_here:dataset', 'cannot import no_such_module_here'),
    (f'{_MODULE}:datasets', 'has no function datasets'),
    (f'{_MODULE}:number', 'has no function number'),
    (f'{_MODULE}:array', 'returned a ndarray'),
    (f'{_MODULE}:needs', 'TypeError'),
    (f'{_MODULE}:broken', 'ZeroDivisionError'),
  )
  def test_bad_name_is_refused(self, name, words):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, words):
      user_pipeline.load(name)


if __name__ == '__main__':
  tf.test.main()
