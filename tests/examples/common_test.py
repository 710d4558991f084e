"""Flags select data, models, optimizers and strategies."""

import numpy as np
import tensorflow as tf
from absl import flags as flags_lib
from absl.testing import parameterized

import tf_strategies as tfs
from examples import common, datasets
from tests import tf_case, virtual_devices
from tests.examples import pages
from tf_strategies.strategies import registry

virtual_devices.configure()

_SYNTHETIC = ('--dataset=synthetic', '--global_batch_size=1000')


class BatchesTest(tf_case.TestCase):
  def test_epoch_has_every_example_once(self):
    with pages.parsed('mnist_custom_loop', *_SYNTHETIC, '--epochs=1'):
      strategy = tfs.create_strategy('ring_mirrored', devices=['CPU:0'])
      batches = common.train_batches(strategy, common.load_data(), (0, 0))
      distributed = strategy.experimental_distribute_dataset(batches)
      # First pixels identify the rows of a class.
      found = [
        images.numpy()[:, :3, 0, 0] + 10.0 * labels.numpy()[:, None]
        for images, labels in distributed
      ]
    self.assertEqual([len(rows) for rows in found], [1000] * 8 + [192])
    source = datasets.load('synthetic').train
    expected = source.images[:, :3, 0, 0] / np.float32(255)
    expected = expected + 10.0 * source.labels[:, None]
    seen = np.concatenate(found)
    self.assertNotAllEqual(seen, expected)
    self.assertAllClose(np.sort(seen, 0), np.sort(expected, 0))

  def test_steps_per_execution_does_not_cross_epochs(self):
    for group, steps in ((1, 9), (4, 8), (9, 9)):
      with pages.parsed('mnist_keras_fit', *_SYNTHETIC):
        common.load_data(steps_per_execution=group)
        self.assertEqual(common.FLAGS.steps_per_epoch, steps)
    with (
      pages.parsed('mnist_keras_fit', *_SYNTHETIC),
      self.assertRaisesRegex(tfs.errors.DataError, '=10 steps .* got 9'),
    ):
      common.load_data(steps_per_execution=10)


class StrategyTest(tf_case.TestCase):
  def test_every_strategy_can_be_selected(self):
    self.assertCountEqual(common.STRATEGIES, registry._FACTORIES)

  def test_all_reduce_flag_is_passed_to_the_strategy(self):
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
  def test_contradictory_flags_are_refused(self, flags, message):
    with (
      self.assertRaisesRegex(flags_lib.IllegalFlagValueError, message),
      pages.parsed('mnist_keras_fit', *flags),
    ):
      pass


if __name__ == '__main__':
  tf.test.main()
