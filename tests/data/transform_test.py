"""Transformations run as often as expected, with the expected seeds."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests.data import formula
from tf_strategies import data as data_lib

_N = 20


class Calls:
  """Functions that count the rows that they receive."""

  def __init__(self):
    self.rows = {'prepare': 0, 'augment': 0, 'map': 0}

  def _count(self, name, labels):
    def add(values):
      self.rows[name] += len(values)
      return values

    return tf.ensure_shape(
      tf.numpy_function(add, [labels], tf.int64), labels.shape
    )

  def prepare(self, images, labels):
    return images, self._count('prepare', labels)

  def augment(self, images, labels, seed):
    self.seed_spec = (seed.dtype, tuple(seed.shape))
    return images, self._count('augment', labels)

  def map(self, images, labels):
    return images, self._count('map', labels)


class TransformTest(formula.DataTestCase, parameterized.TestCase):
  def make(
    self, source, training=True, context=None, cache='none', **functions
  ):
    if source == 'arrays':
      source = formula.arrays(_N)
    else:
      source = formula.write_records(self.new_dir(), _N, 3)
    return data_lib.make_dataset(
      source,
      data_lib.PipelineOptions(8, seed=3, cache=cache),
      training=training,
      input_context=context,
      **functions,
    )

  @parameterized.parameters(
    ('arrays', 'none', True),
    ('arrays', 'memory', True),
    ('files', 'memory', False),
  )
  @pytest.mark.smoke
  def test_what_runs_how_often(self, source, cache, training):
    calls = Calls()
    dataset = self.make(
      source,
      training,
      cache=cache,
      prepare_fn=calls.prepare,
      augment_fn=calls.augment,
      map_fn=calls.map,
    )
    for _ in range(3):
      labels = [int(y) for _, batch in dataset for y in batch]
      self.assertCountEqual(labels, range(_N))
    prepared = 3 * _N if cache == 'none' else _N
    augmented = 3 * _N if training else 0
    self.assertEqual(
      calls.rows, {'prepare': prepared, 'augment': augmented, 'map': 3 * _N}
    )
    if training:
      self.assertEqual(calls.seed_spec, (tf.int64, (2,)))

  def test_order_of_the_functions(self):
    seen = {}

    def prepare(images, labels):
      seen['prepare'] = images.dtype
      return images // 2, labels + 1

    def augment(images, labels, seed):
      seen['augment'] = images.dtype
      return images, labels * 10

    dataset = self.make(
      'files',
      cache='memory',
      prepare_fn=prepare,
      augment_fn=augment,
      map_fn=lambda x, y: {'x': x, 'y': y + 3},
    )
    self.assertEqual(seen, {'prepare': tf.uint8, 'augment': tf.float32})
    for batch in dataset.as_numpy_iterator():
      numbers = (batch['y'] - 3) // 10 - 1
      expected = (formula.images(_N)[numbers] // 2) / np.float32(255)
      np.testing.assert_allclose(batch['x'], expected, rtol=1e-6)

  def test_each_batch_epoch_and_pipeline_has_a_seed_of_its_own(self):
    def draw():
      seeds = []
      for pipeline in range(2):
        context = tf.distribute.InputContext(2, pipeline, 2)
        dataset = self.make(
          'arrays', context=context, augment_fn=lambda x, y, seed: seed
        )
        for _ in range(2):
          seeds += map(tuple, dataset.as_numpy_iterator())
      return seeds

    seeds = draw()
    self.assertLen(seeds, 2 * 2 * 3)
    self.assertLen(set(seeds), len(seeds))
    tf.random.set_seed(9)
    self.assertEqual(draw(), seeds)


if __name__ == '__main__':
  tf.test.main()
