import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from examples import datasets
from tests import virtual_devices
from tests.data import formula
from tf_strategies import data as data_lib
from tf_strategies import errors

virtual_devices.configure()


def _options(**changes):
  return data_lib.PipelineOptions(**({'global_batch_size': 8} | changes))


def _order(dataset) -> list[int]:
  """The labels, which number the examples, in the order of the batches."""
  return [int(y) for _, labels in dataset for y in labels]


def _context(pipeline, num_pipelines, replicas=None):
  return tf.distribute.InputContext(
    num_input_pipelines=num_pipelines,
    input_pipeline_id=pipeline,
    num_replicas_in_sync=replicas or num_pipelines,
  )


class ElementsTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.product(
    training=(True, False),
    n=(7, 8, 61),
    changes=(
      {},
      {'shuffle_buffer': 0},
      {'shuffle_buffer': 5},
      {'num_parallel_calls': 1, 'prefetch': 0},
      {'num_parallel_calls': 3, 'prefetch': 4, 'deterministic': False},
      {'cache': 'memory', 'autoshard': 'off'},
    ),
  )
  def test_every_example_once_with_its_own_pixels(self, training, n, changes):
    dataset = data_lib.make_dataset(
      formula.arrays(n), _options(**changes), training=training
    )
    batches = list(dataset.as_numpy_iterator())
    self.assertCountEqual(
      [len(y) for _, y in batches], [8] * (n // 8) + [n % 8] * (n % 8 > 0)
    )
    self.assertEqual(int(dataset.cardinality()), len(batches))
    images = np.concatenate([x for x, _ in batches])
    labels = np.concatenate([y for _, y in batches])
    self.assertEqual(sorted(labels), list(range(n)))
    expected = formula.images(n)[labels].astype(np.float32) / 255
    np.testing.assert_allclose(images, expected, rtol=2e-7)

  def test_types_and_static_shapes(self):
    dataset = data_lib.make_dataset(
      formula.arrays(20), _options(), training=True
    )
    self.assertEqual(
      dataset.element_spec,
      (
        tf.TensorSpec([None, 28, 28, 1], tf.float32),
        tf.TensorSpec([None], tf.int64),
      ),
    )

  def test_scale_reaches_exactly_zero_and_one(self):
    images = np.zeros([2, 28, 28, 1], np.uint8)
    images[1] = 255
    arrays = datasets.Images(images, np.arange(2))
    x, _ = next(iter(data_lib.make_dataset(arrays, _options(), training=False)))
    self.assertAllEqual(x[0], np.zeros([28, 28, 1]))
    self.assertAllEqual(x[1], np.ones([28, 28, 1]))

  @pytest.mark.smoke
  def test_drop_remainder_is_for_training_only(self):
    options = _options(drop_remainder=True, seed=0)
    train = data_lib.make_dataset(formula.arrays(29), options, training=True)
    self.assertEqual(train.element_spec[0].shape, [8, 28, 28, 1])
    self.assertEqual(int(train.cardinality()), 3)
    order = _order(train)
    self.assertLen(order, 24)
    self.assertLen(set(order), 24)
    test = data_lib.make_dataset(formula.arrays(29), options, training=False)
    self.assertEqual(_order(test), list(range(29)))

  def test_no_full_batch(self):
    with self.assertRaisesRegex(errors.DataError, '7 examples .* batch of 8'):
      data_lib.make_dataset(
        formula.arrays(7), _options(drop_remainder=True), training=True
      )

  @pytest.mark.smoke
  def test_map_fn_gets_scaled_batches(self):
    shapes = []

    def map_fn(images, labels):
      shapes.append(images.shape.as_list())
      return {'x': 1 - images, 'y': 2 * labels}

    dataset = data_lib.make_dataset(
      formula.arrays(10), _options(), training=False, map_fn=map_fn
    )
    first, second = dataset.as_numpy_iterator()
    self.assertEqual(first['y'].tolist(), list(range(0, 16, 2)))
    self.assertEqual(second['y'].tolist(), [16, 18])
    expected = 1 - formula.images(8) / np.float32(255)
    np.testing.assert_allclose(first['x'], expected, atol=1e-7)
    # Traced once and for batches, not called for each example.
    self.assertEqual(shapes, [[None, 28, 28, 1]])
    self.assertEqual(int(dataset.cardinality()), 2)

  def test_num_examples(self):
    self.assertEqual(formula.arrays(13).num_examples, 13)

  def test_refuses_what_is_for_files(self):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, "autoshard='file' with arrays"
    ):
      data_lib.make_dataset(
        formula.arrays(9), _options(autoshard='file'), training=True
      )


class OrderTest(tf.test.TestCase, parameterized.TestCase):
  def make(self, n=60, **changes):
    return data_lib.make_dataset(
      formula.arrays(n), _options(**changes), training=True
    )

  @parameterized.parameters(1, 4, tf.data.AUTOTUNE)
  def test_same_seed_same_epochs(self, num_parallel_calls):
    one = self.make(seed=3)
    other = self.make(seed=3, num_parallel_calls=num_parallel_calls, prefetch=0)
    epochs = [_order(one) for _ in range(3)]
    self.assertEqual([_order(other) for _ in range(3)], epochs)
    # Each epoch has an order of its own.
    self.assertLen({tuple(epoch) for epoch in epochs}, 3)

  @pytest.mark.smoke
  def test_parallel_calls_that_overtake_each_other_keep_the_order(self):
    def slow_first(images, labels):
      # Work that grows with the first label of the batch.
      x = tf.while_loop(
        lambda i, _: i < (60 - labels[0]) * 60,
        lambda i, x: (i + 1, x + 1.0),
        [tf.constant(0, tf.int64), 0.0],
      )[1]
      return images + 0 * x, labels

    orders = [
      _order(
        data_lib.make_dataset(
          formula.arrays(60),
          _options(seed=5, num_parallel_calls=calls),
          training=True,
          map_fn=slow_first,
        )
      )
      for calls in (1, 8)
    ]
    self.assertEqual(orders[0], orders[1])

  def test_other_seed_other_order(self):
    orders = {tuple(_order(self.make(seed=seed))) for seed in range(5)}
    self.assertLen(orders, 5)

  def test_no_seed_differs_from_dataset_to_dataset(self):
    self.assertNotEqual(_order(self.make()), _order(self.make()))

  def test_whole_split_is_shuffled(self):
    # With a buffer of b, position p never holds an example beyond p + b.
    order = _order(self.make(n=200, seed=1))
    self.assertGreater(sum(y > p + 150 for p, y in enumerate(order)), 0)
    self.assertGreater(sum(y > p + 100 for p, y in enumerate(order)), 10)
    near = _order(self.make(n=200, seed=1, shuffle_buffer=7))
    self.assertNotEqual(near, list(range(200)))
    self.assertFalse([y for p, y in enumerate(near) if y > p + 7])

  def test_no_shuffle(self):
    self.assertEqual(_order(self.make(shuffle_buffer=0)), list(range(60)))
    test = data_lib.make_dataset(
      formula.arrays(60), _options(seed=1), training=False
    )
    self.assertEqual(_order(test), list(range(60)))

  def test_repeat_keeps_epochs_apart_and_reshuffles(self):
    dataset = self.make(n=20, seed=2, repeat=True)
    self.assertEqual(int(dataset.cardinality()), tf.data.INFINITE_CARDINALITY)
    sizes, order = [], []
    for _, labels in dataset.take(9):
      sizes.append(len(labels))
      order += labels.numpy().tolist()
    self.assertEqual(sizes, [8, 8, 4] * 3)
    epochs = [tuple(order[i : i + 20]) for i in (0, 20, 40)]
    for epoch in epochs:
      self.assertEqual(sorted(epoch), list(range(20)))
    self.assertLen(set(epochs), 3)
    test = data_lib.make_dataset(
      formula.arrays(20), _options(repeat=True), training=False
    )
    self.assertEqual(_order(test), list(range(20)))

  def test_repeated_equals_epoch_by_epoch(self):
    once = self.make(n=20, seed=2)
    repeated = self.make(n=20, seed=2, repeat=True)
    self.assertEqual(_order(repeated.take(6)), _order(once) + _order(once))


class PipelinesTest(tf.test.TestCase, parameterized.TestCase):
  """Several input pipelines share the examples."""

  @parameterized.parameters('auto', 'data')
  def test_a_step_of_all_pipelines_is_one_global_batch(self, autoshard):
    options = _options(seed=6, autoshard=autoshard)
    alone = data_lib.make_dataset(formula.arrays(40), options, training=True)
    shares = [
      data_lib.make_dataset(
        formula.arrays(40),
        options,
        training=True,
        input_context=_context(pipeline, 2, replicas=4),
      )
      for pipeline in range(2)
    ]
    for _ in range(2):
      expected = [sorted(y.tolist()) for _, y in alone.as_numpy_iterator()]
      # Two replicas a pipeline: each step takes two batches of two.
      orders = [_order(share) for share in shares]
      actual = [
        sorted(orders[0][i : i + 4] + orders[1][i : i + 4])
        for i in range(0, 20, 4)
      ]
      self.assertEqual(actual, expected)
    for share in shares:
      self.assertEqual(int(share.cardinality()), 10)

  def test_shares_of_unequal_size(self):
    shares = [
      data_lib.make_dataset(
        formula.arrays(11),
        _options(global_batch_size=6),
        training=False,
        input_context=_context(i, 3),
      )
      for i in range(3)
    ]
    self.assertEqual(
      [_order(s) for s in shares], [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]
    )
    self.assertEqual([int(s.cardinality()) for s in shares], [2, 2, 2])

  def test_off_gives_everything_to_each(self):
    for i in range(2):
      dataset = data_lib.make_dataset(
        formula.arrays(10),
        _options(autoshard='off'),
        training=True,
        input_context=_context(i, 2),
      )
      self.assertEqual(sorted(_order(dataset)), list(range(10)))
      self.assertEqual(int(dataset.cardinality()), 3)

  def test_refuses_to_share_without_a_seed(self):
    make = lambda **changes: data_lib.make_dataset(  # noqa: E731
      formula.arrays(10),
      _options(**changes),
      training=True,
      input_context=_context(0, 2),
    )
    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'seed=None'):
      make()
    self.assertEqual(_order(make(shuffle_buffer=0)), [0, 2, 4, 6, 8])
    make(autoshard='off')

  def test_refuses_a_batch_that_does_not_divide(self):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError,
      'global_batch_size=8 with 3 replicas.*pass 9',
    ):
      data_lib.make_dataset(
        formula.arrays(10),
        _options(),
        training=True,
        input_context=_context(0, 3),
      )

  def test_refuses_a_pipeline_without_examples(self):
    with self.assertRaisesRegex(errors.DataError, 'pipeline 3 of 4'):
      data_lib.make_dataset(
        formula.arrays(3),
        _options(),
        training=False,
        input_context=_context(3, 4),
      )

  @parameterized.parameters('auto', 'data', 'off')
  def test_policy_reaches_tensorflow(self, autoshard):
    dataset = data_lib.make_dataset(
      formula.arrays(10), _options(autoshard=autoshard), training=True
    )
    self.assertEqual(
      dataset.options().experimental_distribute.auto_shard_policy,
      tf.data.experimental.AutoShardPolicy[autoshard.upper()],
    )
    self.assertIs(dataset.options().deterministic, True)

  def test_shard_by_tensorflow(self):
    orders = []
    for index in range(2):
      # Each worker makes its own: iterating one twice would be two epochs.
      dataset = data_lib.make_dataset(
        formula.arrays(40), _options(seed=4), training=True
      )
      variant = tf.raw_ops.AutoShardDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        num_workers=2,
        index=index,
        output_types=[tf.float32, tf.int64],
        output_shapes=[[None, 28, 28, 1], [None]],
      )
      shard = tf.data.experimental.from_variant(variant, dataset.element_spec)
      orders.append(_order(shard))
    self.assertEqual(sorted(orders[0] + orders[1]), list(range(40)))
    self.assertEqual({len(order) for order in orders}, {16, 24})


class PlacementTest(tf.test.TestCase):
  def test_under_a_strategy(self):
    strategy = tf.distribute.MirroredStrategy(['CPU:0', 'CPU:1'])
    with strategy.scope():
      dataset = data_lib.make_dataset(
        formula.arrays(20), _options(seed=1), training=True
      )
      alone = data_lib.make_dataset(
        formula.arrays(20), _options(seed=1), training=True
      )
    expected = [sorted(y.tolist()) for _, y in alone.as_numpy_iterator()]
    actual = [
      sorted(
        int(y)
        for replica in strategy.experimental_local_results(labels)
        for y in replica
      )
      for _, labels in strategy.experimental_distribute_dataset(dataset)
    ]
    self.assertEqual(actual, expected)

  def test_from_function(self):
    strategy = tf.distribute.MirroredStrategy(['CPU:0', 'CPU:1'])
    dataset = strategy.distribute_datasets_from_function(
      lambda context: data_lib.make_dataset(
        formula.arrays(20), _options(), training=False, input_context=context
      )
    )
    sizes, order = [], []
    for _, labels in dataset:
      replicas = strategy.experimental_local_results(labels)
      sizes.append([len(y) for y in replicas])
      order += [int(y) for replica in replicas for y in replica]
    self.assertEqual(sizes, [[4, 4], [4, 4], [4, 0]])
    self.assertEqual(order, list(range(20)))

  def test_pixels_are_no_constant_of_a_graph(self):
    arrays = formula.arrays(200)

    @tf.function
    def sum_of_labels():
      total = tf.zeros([], tf.int64)
      for _, labels in data_lib.make_dataset(
        arrays, _options(seed=1), training=True
      ):
        total += tf.reduce_sum(labels)
      return total

    concrete = sum_of_labels.get_concrete_function()
    self.assertEqual(int(concrete()), 199 * 200 // 2)
    size = concrete.graph.as_graph_def().ByteSize()
    self.assertLess(size, arrays.images.nbytes // 4)

  def test_keras_takes_steps_from_cardinality(self):
    inputs = tf.keras.Input([28, 28, 1])
    outputs = tf.keras.layers.Dense(2)(tf.keras.layers.Flatten()(inputs))
    model = tf.keras.Model(inputs, outputs)
    model.compile('sgd', tf.keras.losses.SparseCategoricalCrossentropy(True))
    arrays = datasets.Images(formula.images(20), np.arange(20) % 2)
    history = model.fit(
      data_lib.make_dataset(arrays, _options(), training=True),
      epochs=1,
      verbose=0,
    )
    self.assertEqual(history.params['steps'], 3)

  def test_options_are_not_changed(self):
    options = _options(seed=1)
    before = dataclasses.asdict(options)
    data_lib.make_dataset(formula.arrays(9), options, training=True)
    self.assertEqual(dataclasses.asdict(options), before)


if __name__ == '__main__':
  tf.test.main()
