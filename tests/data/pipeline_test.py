"""Epochs over arrays and files: elements, order, shares, placement, functions."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tests.data import formula
from tf_strategies import errors

virtual_devices.configure()

_N = 61
_FILE = 16  # Examples in a file; the last one has fewer.


def _order(dataset) -> list[int]:
  """Returns the labels, which number the examples, in the order of the batches."""
  return [int(y) for _, labels in dataset for y in labels]


def _context(pipeline, num_pipelines, replicas=None):
  return tf.distribute.InputContext(
    num_input_pipelines=num_pipelines,
    input_pipeline_id=pipeline,
    num_replicas_in_sync=replicas or num_pipelines,
  )


class ElementsTest(formula.DataTestCase):
  @parameterized.parameters(
    ('arrays', {'shuffle_buffer': 0}),
    ('files', {'shuffle_buffer': 5}),
    ('files', {'cache': 'memory'}),
  )
  def test_every_example_once_with_its_pixels(self, kind, changes):
    source = self.source(kind, _N)
    for training in (True, False):
      dataset = self.make(source, training=training, **changes)
      self.assertEqual(
        dataset.element_spec,
        (
          tf.TensorSpec([None, 28, 28, 1], tf.float32),
          tf.TensorSpec([None], tf.int64),
        ),
      )
      for _ in range(2):
        batches = list(dataset.as_numpy_iterator())
        self.assertEqual([len(y) for _, y in batches], [8] * 7 + [5])
        self.assertEqual(int(dataset.cardinality()), 8)
        images = np.concatenate([x for x, _ in batches])
        labels = np.concatenate([y for _, y in batches])
        self.assertCountEqual(labels, range(_N))
        if not training:
          self.assertAllEqual(labels, range(_N))
        expected = formula.images(_N)[labels].astype(np.float32) / 255
        np.testing.assert_allclose(images, expected, rtol=2e-7)

  @pytest.mark.smoke
  def test_drop_remainder_applies_only_to_training(self):
    source = self.source('files', 29)
    train = self.make(source, drop_remainder=True, seed=0)
    self.assertEqual(train.element_spec[0].shape, [8, 28, 28, 1])
    self.assertEqual(int(train.cardinality()), 3)
    order = _order(train)
    self.assertLen(order, 24)
    self.assertLen(set(order), 24)
    test = self.make(source, drop_remainder=True, training=False)
    self.assertEqual(_order(test), list(range(29)))


class OrderTest(formula.DataTestCase):
  @parameterized.parameters(
    ('arrays', {}), ('files', {'cache': 'memory', 'shuffle_buffer': 10})
  )
  def test_order_depends_only_on_the_seed(self, kind, changes):
    source = self.source(kind, _N)
    one = self.make(source, seed=3, **changes)
    epochs = [_order(one) for _ in range(3)]
    # Each epoch has its own order.
    self.assertLen({tuple(epoch) for epoch in epochs}, 3)
    tf.random.set_seed(9)
    same = self.make(source, seed=3, **changes)
    self.assertEqual([_order(same) for _ in range(3)], epochs)
    self.assertNotEqual(_order(self.make(source, seed=4, **changes)), epochs[0])
    without = [_order(self.make(source, **changes)) for _ in range(2)]
    self.assertNotEqual(*without)

  @pytest.mark.smoke
  def test_parallel_map_keeps_the_order(self):
    def slow_first(images, labels):
      # Work that grows with the first label of the batch.
      x = tf.while_loop(
        lambda i, _: i < (60 - labels[0]) * 60,
        lambda i, x: (i + 1, x + 1.0),
        [tf.constant(0, tf.int64), 0.0],
      )[1]
      return images + 0 * x, labels

    orders = [
      _order(self.make(formula.arrays(60), seed=5, map_fn=map_fn))
      for map_fn in (None, slow_first)
    ]
    self.assertEqual(orders[0], orders[1])

  def test_whole_split_is_shuffled(self):
    # Training reads blocks of 16, which is a whole file here. A buffer of 20
    # would fill the first batch from at most two of the four files.
    dataset = self.make(self.source('files', _N), seed=1)
    files = [
      len({y // _FILE for y in next(iter(dataset))[1].numpy()})
      for _ in range(8)
    ]
    self.assertEqual(max(files), 4)

  @pytest.mark.smoke
  def test_small_buffer_shuffles_files_too(self):
    dataset = self.make(self.source('files', _N), shuffle_buffer=1, seed=3)
    first = {next(iter(dataset))[1].numpy()[0] // _FILE for _ in range(20)}
    self.assertEqual(first, {0, 1, 2, 3})


class SharesTest(formula.DataTestCase):
  """Several input pipelines share the data."""

  @parameterized.parameters(('arrays', 2, 'none'), ('files', 3, 'memory'))
  def test_one_step_of_all_pipelines_is_a_global_batch(
    self, kind, pipelines, cache
  ):
    source = self.source(kind, _N)
    options = {'global_batch_size': 12, 'seed': 6, 'cache': cache}
    alone = self.make(source, **options)
    # Two replicas in each pipeline.
    shares = [
      self.make(
        source, input_context=_context(i, pipelines, 2 * pipelines), **options
      )
      for i in range(pipelines)
    ]
    size = 12 // pipelines
    for _ in range(2):
      expected = [sorted(y.tolist()) for _, y in alone.as_numpy_iterator()]
      orders = [_order(share) for share in shares]
      actual = [
        sorted(y for order in orders for y in order[i : i + size])
        for i in range(0, len(orders[0]), size)
      ]
      self.assertEqual(actual, expected)
    self.assertEqual(
      [int(share.cardinality()) for share in shares],
      [-(-len(order) // (size // 2)) for order in orders],
    )

  def test_evenly_divided_files_need_no_seed(self):
    source = self.source('files', _N)
    for i in range(2):
      share = self.make(source, input_context=_context(i, 2))
      files = (i, i + 2)
      expected = [y for y in range(_N) if y // _FILE in files]
      self.assertCountEqual(_order(share), expected)
      self.assertEqual(int(share.cardinality()), -(-len(expected) // 4))

  @parameterized.named_parameters(
    ('seed', {'input_context': _context(0, 2)}, 'seed=None'),
    (
      'batch',
      {'input_context': _context(0, 3)},
      'global_batch_size=8 with 3 replicas.*pass 9',
    ),
    (
      'examples',
      {'input_context': _context(3, 4), 'training': False},
      'pipeline 3 of 4',
    ),
  )
  def test_invalid_shares_are_refused(self, changes, message):
    with self.assertRaisesRegex(errors.Error, message):
      self.make(formula.arrays(3), **changes)

  def test_auto_sharding_reads_each_example_once(self):
    orders = []
    for index in range(2):
      # Each worker makes its own data set. Iterating one twice would give two
      # epochs.
      dataset = self.make(self.source('files', _N), seed=4)
      variant = tf.raw_ops.AutoShardDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        num_workers=2,
        index=index,
        output_types=[tf.float32, tf.int64],
        output_shapes=[[None, 28, 28, 1], [None]],
      )
      shard = tf.data.experimental.from_variant(variant, dataset.element_spec)
      orders.append(_order(shard))
    self.assertCountEqual(orders[0] + orders[1], range(_N))
    self.assertCountEqual(map(len, orders), (32, 29))


class PlacementTest(formula.DataTestCase):
  def test_pixels_are_not_a_graph_constant(self):
    arrays = formula.arrays(200)

    @tf.function
    def sum_of_labels():
      total = tf.zeros([], tf.int64)
      for _, labels in self.make(arrays, seed=1):
        total += tf.reduce_sum(labels)
      return total

    concrete = sum_of_labels.get_concrete_function()
    self.assertEqual(int(concrete()), 199 * 200 // 2)
    size = concrete.graph.as_graph_def().ByteSize()
    self.assertLess(size, arrays.images.nbytes // 4)


_ROWS = 20


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


class TransformTest(formula.DataTestCase):
  @parameterized.parameters(
    ('arrays', 'none', True),
    ('arrays', 'memory', True),
    ('files', 'memory', False),
  )
  @pytest.mark.smoke
  def test_number_of_calls_of_each_function(self, source, cache, training):
    calls = Calls()
    dataset = self.make(
      self.source(source, _ROWS),
      seed=3,
      training=training,
      cache=cache,
      prepare_fn=calls.prepare,
      augment_fn=calls.augment,
      map_fn=calls.map,
    )
    for _ in range(3):
      labels = [int(y) for _, batch in dataset for y in batch]
      self.assertCountEqual(labels, range(_ROWS))
    prepared = 3 * _ROWS if cache == 'none' else _ROWS
    augmented = 3 * _ROWS if training else 0
    self.assertEqual(
      calls.rows, {'prepare': prepared, 'augment': augmented, 'map': 3 * _ROWS}
    )
    if training:
      self.assertEqual(calls.seed_spec, (tf.int64, (2,)))

  @parameterized.parameters('arrays', 'files')
  def test_order_of_the_functions(self, kind):
    seen = {}

    def prepare(images, labels):
      seen['prepare'] = images.dtype
      return images // 2, labels + 1

    def augment(images, labels, seed):
      seen['augment'] = images.dtype
      return images, labels * 10

    dataset = self.make(
      self.source(kind, _ROWS),
      seed=3,
      cache='memory',
      prepare_fn=prepare,
      augment_fn=augment,
      map_fn=lambda x, y: {'x': x, 'y': y + 3},
    )
    self.assertEqual(seen, {'prepare': tf.uint8, 'augment': tf.float32})
    for batch in dataset.as_numpy_iterator():
      numbers = (batch['y'] - 3) // 10 - 1
      expected = (formula.images(_ROWS)[numbers] // 2) / np.float32(255)
      np.testing.assert_allclose(batch['x'], expected, rtol=1e-6)

  def test_each_batch_epoch_and_pipeline_has_its_own_seed(self):
    def draw():
      seeds = []
      for pipeline in range(2):
        context = tf.distribute.InputContext(2, pipeline, 2)
        dataset = self.make(
          formula.arrays(_ROWS),
          seed=3,
          input_context=context,
          augment_fn=lambda x, y, seed: seed,
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
