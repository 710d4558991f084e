"""Workers share data out: each example in exactly one pipeline, once an epoch."""

import random
import time

import pytest
import tensorflow as tf
from absl.testing import parameterized

from examples import datasets
from tests import tiers
from tests.data import formula
from tf_strategies import data as data_lib
from tf_strategies import errors
from tf_strategies.data import plan as plan_lib

_N = 45
_WORKERS = range(1, 6)


def _contexts(workers):
  return [
    tf.distribute.InputContext(workers, i, workers) for i in range(workers)
  ]


def _labels(batch):
  return batch[1]


def _parse_label(records):
  features = {'label': tf.io.FixedLenFeature([], tf.int64)}
  return tf.io.parse_example(records, features)['label']


def _delayed(path):
  """Reads a file after a while, another one each time."""

  def wait(record):
    time.sleep(random.uniform(0, 0.02))
    return record

  records = tf.data.TFRecordDataset(path)
  late = records.take(1).map(
    lambda r: tf.ensure_shape(tf.numpy_function(wait, [r], tf.string), [])
  )
  return late.concatenate(records.skip(1))


class SharesTest(tf.test.TestCase, parameterized.TestCase):
  @tiers.product(
    num_files=(*tiers.every(tiers.full, (1, 2, 3, 4, 6)), 5, 7),
    autoshard=('auto', 'data', 'file'),
  )
  def test_arithmetic_of_shares(self, num_files, autoshard):
    paths = tuple(map(str, range(num_files)))
    options = data_lib.PipelineOptions(60, seed=1, autoshard=autoshard)
    for workers in _WORKERS:
      if autoshard == 'file' and num_files < workers:
        with self.assertRaisesRegex(
          errors.UnsupportedOptionError, f'{num_files} files for {workers}'
        ):
          plan_lib.make(options, True, _contexts(workers)[0], num_files)
        continue
      plans = [
        plan_lib.make(options, True, context, num_files)
        for context in _contexts(workers)
      ]
      # A record is told by its file and its place in it.
      taken = []
      for plan in plans:
        mine = [(p, i) for p in plan.files_of(paths) for i in range(9)]
        if plan.shares_examples:
          share = mine[plan.pipeline :: plan.num_pipelines]
          self.assertLen(share, plan.share_of(len(mine)))
          mine = share
        taken += mine
      self.assertCountEqual(taken, [(p, i) for p in paths for i in range(9)])

  @tiers.product(
    sizes=(
      tiers.full((1, 3)),
      tiers.full((2, 1)),
      (2, 4),
      (3, 7),
      tiers.full((4, 2)),
      tiers.full((5, 5)),
    ),
    autoshard=('auto', 'data', 'file'),
  )
  def test_files(self, sizes, autoshard):
    workers, num_files = sizes
    if autoshard == 'file' and num_files < workers:
      self.skipTest('refused')
    directory = self.create_tempdir().full_path
    datasets.write_tfrecords(formula.numbered(_N, 9), directory, num_files)
    options = data_lib.PipelineOptions(
      60, seed=2, autoshard=autoshard, shuffle_buffer=7
    )
    shards = [
      data_lib.make_dataset(
        datasets.tfrecords(directory, 'train'),
        options,
        training=True,
        input_context=context,
      )
      for context in _contexts(workers)
    ]
    whole = data_lib.make_dataset(
      formula.arrays(_N), data_lib.PipelineOptions(60), training=False
    )
    sizes = data_lib.check_shards(shards, whole)
    if autoshard == 'data' or (autoshard == 'auto' and num_files % workers):
      self.assertLessEqual(max(sizes) - min(sizes), 1)

  def test_everything_to_each_is_found(self):
    options = data_lib.PipelineOptions(60, autoshard='off')
    shards = [
      data_lib.make_dataset(
        formula.arrays(_N), options, training=True, input_context=context
      )
      for context in _contexts(2)
    ]
    with self.assertRaisesRegex(errors.DataError, f'{_N} examples too often'):
      data_lib.check_shards(shards, shards[0])

  @tiers.parameters(tiers.full('auto'), 'data')
  @pytest.mark.full
  def test_arrays(self, autoshard):
    options = data_lib.PipelineOptions(60, seed=2, autoshard=autoshard)
    arrays = formula.arrays(_N)
    whole = data_lib.make_dataset(arrays, options, training=True)
    for workers in _WORKERS:
      shards = [
        data_lib.make_dataset(
          arrays, options, training=True, input_context=context
        )
        for context in _contexts(workers)
      ]
      # Told apart by their bytes: pixels and label.
      sizes = data_lib.check_shards(shards, whole)
      self.assertLessEqual(max(sizes) - min(sizes), 1)
      self.assertEqual(data_lib.check_shards(shards, whole, _labels), sizes)

  @tiers.parameters(tiers.full('none'), 'memory')
  def test_order_of_arrival_does_not_matter(self, cache):
    # Without an order that all agree on, the k-th record is not the same one
    # for all: some would come twice and some never.
    directory = self.create_tempdir().full_path
    paths = datasets.write_tfrecords(formula.numbered(_N, 9), directory, 7)[:7]
    options = data_lib.PipelineOptions(
      60, seed=1, autoshard='data', deterministic=False, cache=cache
    )
    shards = [
      data_lib.make_dataset(
        data_lib.Files(
          paths,
          _delayed,
          _parse_label,
          counts=[len(range(i, _N, 7)) for i in range(7)],
        ),
        options,
        training=True,
        input_context=context,
      )
      for context in _contexts(3)
    ]
    whole = tf.data.Dataset.range(_N).batch(_N)
    self.assertEqual(data_lib.check_shards(shards, whole), (15, 15, 15))

  @pytest.mark.full
  def test_global_seeds_that_differ_do_not_matter(self):
    options = data_lib.PipelineOptions(60, seed=2, autoshard='data')
    arrays = formula.arrays(_N)
    shards = []
    for context in _contexts(3):
      tf.random.set_seed(context.input_pipeline_id)
      shards.append(
        data_lib.make_dataset(
          arrays, options, training=True, input_context=context
        )
      )
    whole = data_lib.make_dataset(arrays, options, training=False)
    self.assertEqual(data_lib.check_shards(shards, whole), (15, 15, 15))


class CheckTest(tf.test.TestCase, parameterized.TestCase):
  def batches(self, *numbers):
    return tf.data.Dataset.from_tensor_slices(list(numbers)).batch(2)

  def assert_result(self, shards, whole, fragments):
    with self.assertRaises(errors.DataError) as caught:
      data_lib.check_shards(shards, whole)
    for fragment in fragments:
      self.assertIn(fragment, str(caught.exception))

  def test_names_what_is_wrong(self):
    whole = self.batches(1, 2, 3, 4)
    self.assert_result(
      [self.batches(1, 2), self.batches(2, 3)],
      whole,
      ['1 examples too often (2 in pipelines [0, 1])', '1 in no pipeline (4)'],
    )
    self.assert_result(
      [self.batches(1, 1, 2), self.batches(3, 4)],
      whole,
      ['1 in pipelines [0]'],
    )
    self.assert_result(
      [self.batches(1, 2, 3, 4, 9)], whole, ['9 in pipelines [0]']
    )

  def test_duplicates_in_the_data_are_right(self):
    whole = self.batches(1, 1, 2)
    for shards in (((1,), (1, 2)), ((1, 1), (2,))):
      sizes = data_lib.check_shards([self.batches(*s) for s in shards], whole)
      self.assertEqual(sizes, tuple(map(len, shards)))

  def test_seeds_that_differ_are_found(self):
    arrays = formula.arrays(_N)
    shards = [
      data_lib.make_dataset(
        arrays,
        data_lib.PipelineOptions(60, seed=context.input_pipeline_id),
        training=True,
        input_context=context,
      )
      for context in _contexts(2)
    ]
    whole = data_lib.make_dataset(
      arrays, data_lib.PipelineOptions(60), training=False
    )
    with self.assertRaisesRegex(errors.DataError, 'too often.*in no pipeline'):
      data_lib.check_shards(shards, whole, _labels)

  def test_structures_and_strings(self):
    rows = {'key': [b'a', b'b', b'c'], 'x': [[1.0], [2.0], [3.0]]}
    whole = tf.data.Dataset.from_tensor_slices(rows).batch(2)
    shards = [whole.unbatch().shard(2, i).batch(4) for i in range(2)]
    self.assertEqual(data_lib.check_shards(shards, whole), (2, 1))
    self.assertEqual(
      data_lib.check_shards(shards, whole, lambda batch: batch['key']), (2, 1)
    )
    self.assert_result(shards[:1], whole, ['1 in no pipeline'])

  def test_refuses_no_end_and_nothing(self):
    whole = self.batches(1)
    for shards, message in (
      ([], r'shards=\[\]'),
      ([whole.repeat()], 'for ever'),
    ):
      with self.assertRaisesRegex(errors.UnsupportedOptionError, message):
        data_lib.check_shards(shards, whole)


if __name__ == '__main__':
  tf.test.main()
