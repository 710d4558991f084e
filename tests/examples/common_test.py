"""Flags select data, models, optimizers and strategies."""

import keras
import numpy as np
import tensorflow as tf
from absl import flags as flags_lib
from absl.testing import parameterized

import tf_strategies as tfs
from examples import common, datasets
from tests import virtual_devices
from tests.examples import pages
from tf_strategies.strategies import registry

virtual_devices.configure()

_SYNTHETIC = ('--dataset=synthetic', '--global_batch_size=1000')


def _rows(strategy, images, labels):
  """Returns the rows of a batch on each replica, identified by their first pixels."""
  return [
    pixels.numpy()[:, :3, 0, 0] + 10.0 * classes.numpy()[:, None]
    for pixels, classes in zip(
      strategy.experimental_local_results(images),
      strategy.experimental_local_results(labels),
      strict=True,
    )
  ]


def _whole_batches(*flags, epochs=1, start=(0, 0)):
  """Returns the rows of each batch in the order in which an example trains on them."""
  arguments = (*_SYNTHETIC, *flags, f'--epochs={epochs}')
  with pages.parsed('mnist_custom_loop', *arguments):
    data = common.load_data()
    strategy = tfs.create_strategy('ring_mirrored', devices=['CPU:0'])
    batches = common.train_batches(strategy, data, start)
    return [
      _rows(strategy, *batch)[0]
      for batch in strategy.experimental_distribute_dataset(batches)
    ]


class BatchesTest(tf.test.TestCase, parameterized.TestCase):
  def test_epoch_has_every_example_once(self):
    batches = _whole_batches()
    rows = [len(batch) for batch in batches]
    self.assertEqual(rows, [1000] * 8 + [192])
    source = datasets.load('synthetic').train
    expected = source.images[:, :3, 0, 0] / np.float32(255)
    expected = expected + 10.0 * source.labels[:, None]
    seen = np.concatenate(batches)
    self.assertNotAllEqual(seen, expected)
    self.assertAllClose(np.sort(seen, 0), np.sort(expected, 0))

  def test_epoch_longer_than_the_data_continues_with_the_next_pass(self):
    batches = _whole_batches('--steps_per_epoch=13', epochs=2)
    rows = [len(batch) for batch in batches]
    self.assertEqual(rows, ([1000] * 8 + [192]) * 2 + [1000] * 8)
    passes = _whole_batches(epochs=3)
    for one, other in zip(batches, passes, strict=False):
      self.assertAllEqual(one, other)
    resumed = _whole_batches('--steps_per_epoch=13', epochs=2, start=(1, 2))
    self.assertAllEqual(batches[15], resumed[0])

  def test_groups_of_steps_do_not_cross_epochs(self):
    for group, steps in ((1, 9), (4, 8), (9, 9)):
      with pages.parsed('mnist_keras_fit', *_SYNTHETIC):
        common.load_data(steps_per_execution=group)
        self.assertEqual(common.FLAGS.steps_per_epoch, steps)
    with (
      pages.parsed('mnist_keras_fit', *_SYNTHETIC),
      self.assertRaisesRegex(tfs.errors.DataError, '=10 steps .* got 9'),
    ):
      common.load_data(steps_per_execution=10)

  def test_mirrored_gets_full_batches(self):
    batches = _whole_batches('--strategy=mirrored', epochs=2)
    self.assertEqual([len(b) for b in batches], [1000] * 16)
    # The second epoch begins with the rows that the first one left over.
    whole = np.concatenate(_whole_batches(epochs=2))
    self.assertAllEqual(np.concatenate(batches), whole[:16000])


class StrategyTest(tf.test.TestCase, parameterized.TestCase):
  def test_every_strategy_has_its_name(self):
    self.assertCountEqual(common.STRATEGIES, registry._FACTORIES)

  def test_all_reduce_reaches_the_strategy(self):
    flags = ('--all_reduce=ring', '--num_virtual_devices=2')
    with pages.parsed('mnist_keras_fit', *flags):
      strategy = common.create_strategy()
    self.assertEqual(strategy.num_replicas_in_sync, 2)
    report = strategy.communication_report()
    self.assertEqual(report['cross_device_ops'], "ScheduledAllReduce('ring')")

  @parameterized.named_parameters(
    ('builtin', ['--all_reduce=builtin'], '--strategy=mirrored only'),
    ('elastic', ['--elastic'], 'works with --strategy=multi_worker_ring'),
    (
      'elastic_checkpoints',
      [
        '--elastic',
        '--strategy=multi_worker_ring',
        '--checkpoint_dir=checkpoints',
      ],
      'without --checkpoint_dir',
    ),
  )
  def test_contradiction_is_refused(self, flags, message):
    with (
      self.assertRaisesRegex(flags_lib.IllegalFlagValueError, message),
      pages.parsed('mnist_keras_fit', *flags),
    ):
      pass

  def test_split_after_start_is_refused(self):
    tf.config.list_logical_devices()
    split = common.devices
    with (
      pages.parsed('mnist_keras_fit', '--num_virtual_devices=3'),
      self.assertRaisesRegex(
        tfs.errors.UnsupportedOptionError, 'num_virtual_devices=3'
      ),
    ):
      split()


class ModelTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.addCleanup(keras.config.set_dtype_policy, 'float32')
    self._strategy = tf.distribute.get_strategy()

  def test_models_map_images_to_logits(self):
    images = np.ones([2, 28, 28, 1], np.float32)
    with pages.parsed('mnist_keras_fit', '--model=cnn') as example:
      models = [example.build_model(self._strategy, num_classes=7)]
      models.append(common.build_model(num_classes=7))  # Of the loop.
    logits = [model(images) for model in models]
    self.assertEqual(logits[0].shape, (2, 7))
    self.assertNotAllClose(tf.reduce_sum(logits[0], -1), [1.0, 1.0])
    self.assertAllEqual(*logits)

  def _optimizer(self, *flags):
    with pages.parsed('mnist_keras_fit', *flags):
      return common.build_optimizer()

  def test_warmup_rises_linearly_and_stays(self):
    optimizer = self._optimizer('--learning_rate=0.8', '--warmup_steps=4')
    schedule = optimizer._learning_rate
    found = [schedule(step) for step in range(6)]
    self.assertAllClose(found, [0.2, 0.4, 0.6, 0.8, 0.8, 0.8])

  def test_learning_rate_scales_with_replicas_if_asked_for(self):
    flags = (
      *('--num_virtual_devices=4', '--learning_rate=0.3'),
      '--scale_learning_rate',
    )
    with (
      pages.parsed('mnist_keras_fit', *flags),
      common.create_strategy().scope(),
    ):
      optimizer = common.build_optimizer()
    self.assertAllClose(float(optimizer.learning_rate.numpy()), 1.2)


if __name__ == '__main__':
  tf.test.main()
