import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from examples import common_flags, mnist_common
from tests import virtual_devices

virtual_devices.configure_logical_cpus()


def _options(**changes):
  return common_flags.TrainingOptions(
    dataset='synthetic', global_batch_size=1000, **changes
  )


def _batches(data, first_epoch, num_epochs, devices=('CPU:0',)):
  """The images of each batch of each replica, told by their first pixels."""
  strategy = tfs.create_strategy('ring_mirrored', devices=list(devices))
  batches = []
  for images, labels in data.train(strategy, first_epoch, num_epochs):
    batches.append(
      [
        pixels.numpy()[:, :3, 0, 0] + 10.0 * classes.numpy()[:, None]
        for pixels, classes in zip(
          strategy.experimental_local_results(images),
          strategy.experimental_local_results(labels),
          strict=True,
        )
      ]
    )
  return batches


class _ReadsByWorkers:
  """Calls a data set function as a strategy with so many workers does."""

  def __init__(self, num_workers):
    self._num_workers = num_workers

  def distribute_datasets_from_function(self, dataset_fn):
    return [
      dataset_fn(tf.distribute.InputContext(self._num_workers, i))
      for i in range(self._num_workers)
    ]


def _whole_batches(data, first_epoch, num_epochs):
  return [batch for (batch,) in _batches(data, first_epoch, num_epochs)]


class TrainingDataTest(tf.test.TestCase, parameterized.TestCase):
  def test_epoch_has_every_example_once(self):
    data = mnist_common.load_data(_options(), num_replicas=4)
    self.assertEqual(data.steps_per_epoch, 9)
    batches = _whole_batches(data, 0, 1)
    rows = [len(batch) for batch in batches]
    self.assertEqual(rows, [1000] * 8 + [192])
    self.assertEqual([data.rows_in_step(i) for i in range(9)], rows)
    source = data.source.train
    expected = source.images[:, :3, 0, 0] / np.float32(255)
    expected = expected + 10.0 * source.labels[:, None]
    seen = np.concatenate(batches)
    self.assertNotAllEqual(seen, expected)
    self.assertAllClose(np.sort(seen, 0), np.sort(expected, 0))

  def test_later_epoch_is_the_same_without_the_earlier_ones(self):
    data = mnist_common.load_data(_options(steps_per_epoch=2), num_replicas=1)
    straight = _whole_batches(data, 0, 3)
    self.assertLen(straight, 6)
    resumed = _whole_batches(data, 2, 3)
    self.assertAllEqual(np.stack(straight[4:]), np.stack(resumed))
    self.assertNotAllEqual(straight[0], straight[2])
    # Nor does it matter how often the stream was looked at before.
    stream = data.train(tfs.create_strategy('one_device'), 0, 1)
    first, second = next(iter(stream)), next(iter(stream))
    self.assertAllEqual(first[0], second[0])

  def test_epoch_longer_than_the_data_goes_on_with_the_next_pass(self):
    data = mnist_common.load_data(_options(steps_per_epoch=13), num_replicas=1)
    batches = _whole_batches(data, 0, 2)
    rows = [len(batch) for batch in batches]
    self.assertEqual(rows, ([1000] * 8 + [192]) * 2 + [1000] * 8)
    counted = [data.rows_in_step(s, e) for e in range(2) for s in range(13)]
    self.assertEqual(counted, rows)
    passes = mnist_common.load_data(_options(), num_replicas=1)
    for one, other in zip(batches, _whole_batches(passes, 0, 3), strict=False):
      self.assertAllEqual(one, other)
    resumed = _whole_batches(data, 1, 2)
    self.assertAllEqual(batches[13], resumed[0])

  def test_workers_read_the_same_batches(self):
    data = mnist_common.load_data(_options(), num_replicas=1)
    whole = _whole_batches(data, 1, 3)[2:]
    strategy = _ReadsByWorkers(3)
    parts = data.train_on_workers(strategy, 1, 3, first_step=2)
    self.assertEqual([len(list(part)) for part in parts], [6, 5, 5])
    read = {}
    for i, part in enumerate(parts):
      for j, (pixels, labels) in enumerate(part):
        read[i + 3 * j] = (
          pixels.numpy()[:, :3, 0, 0] + 10.0 * labels.numpy()[:, None]
        )
    self.assertLen(read, len(whole))
    for i, batch in enumerate(whole):
      self.assertAllEqual(batch, read[i])

  def test_groups_of_steps_do_not_cross_epochs(self):
    data = mnist_common.load_data(_options(), num_replicas=1)
    self.assertEqual(data.in_groups_of(1).steps_per_epoch, 9)
    self.assertEqual(data.in_groups_of(4).steps_per_epoch, 8)
    self.assertEqual(data.in_groups_of(9).steps_per_epoch, 9)
    with self.assertRaisesRegex(tfs.errors.DataError, '9 steps .* of 10'):
      data.in_groups_of(10)

  def test_replicas_share_each_batch_evenly(self):
    options = common_flags.TrainingOptions(
      dataset='digits', global_batch_size=359
    )
    data = mnist_common.load_data(options, num_replicas=4)
    whole = _whole_batches(data, 0, 1)
    shared = _batches(data, 0, 1, [f'CPU:{i}' for i in range(4)])
    rows = [[len(part) for part in parts] for parts in shared]
    self.assertEqual(rows, [[90, 90, 90, 89]] * 4 + [[1, 0, 0, 0]])
    for batch, parts in zip(whole, shared, strict=True):
      self.assertAllEqual(np.concatenate(parts), batch)

  def test_evaluation_has_every_example_once_in_order(self):
    data = mnist_common.load_data(_options(), num_replicas=4)
    strategy = tfs.create_strategy(
      'ring_mirrored', devices=['CPU:0', 'CPU:1', 'CPU:2']
    )
    labels = [
      tf.concat(strategy.experimental_local_results(labels), 0)
      for _, labels in data.test(strategy)
    ]
    self.assertLen(labels, data.test_steps)
    self.assertAllEqual(tf.concat(labels, 0), data.source.test.labels)

  def test_order_depends_on_the_seed(self):
    orders = [
      _whole_batches(mnist_common.load_data(_options(seed=seed), 1), 0, 1)[0]
      for seed in (0, 1, 0)
    ]
    self.assertNotAllEqual(orders[0], orders[1])
    self.assertAllEqual(orders[0], orders[2])

  def test_mirrored_gets_full_batches(self):
    data = mnist_common.load_data(_options(strategy='mirrored'), 4)
    batches = _whole_batches(data, 0, 2)
    self.assertEqual([len(b) for b in batches], [1000] * 16)
    self.assertEqual([data.rows_in_step(i, 1) for i in range(8)], [1000] * 8)
    # What the first epoch left over begins the second.
    passes = mnist_common.load_data(_options(), num_replicas=1)
    whole = np.concatenate(_whole_batches(passes, 0, 2))
    self.assertAllEqual(np.concatenate(batches), whole[:16000])

  def test_mirrored_without_a_full_batch_is_refused(self):
    options = common_flags.TrainingOptions(
      strategy='mirrored', dataset='digits', global_batch_size=1438
    )
    with self.assertRaisesRegex(tfs.errors.DataError, '1437 .* 1438'):
      mnist_common.load_data(options, num_replicas=2)


class StrategyTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(
    ('ring', tfs.RingAllReduce),
    ('auto', tfs.AutoAllReduce),
    ('direct', tfs.DirectAllReduce),
    ('tree', tfs.TreeAllReduce),
    ('halving_doubling', tfs.HalvingDoublingAllReduce),
    ('hierarchical', tfs.HierarchicalRingAllReduce),
    ('naive', tfs.NaiveAllReduce),
  )
  def test_all_reduce_reaches_the_strategy(self, name, expected):
    options = _options(all_reduce=name)
    op = mnist_common.create_all_reduce(options)
    self.assertIs(type(op), expected)
    strategy = mnist_common.create_strategy(options, ['CPU:0', 'CPU:1'], op)
    self.assertIs(strategy.cross_device_ops, op)

  def test_no_all_reduce_for_one_device(self):
    self.assertIsNone(
      mnist_common.create_all_reduce(_options(strategy='one_device'))
    )

  def test_builtin_all_reduce_is_for_mirrored_only(self):
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, "strategy='mirrored' only"
    ):
      _options(all_reduce='builtin')

  def test_split_after_start_is_refused(self):
    tf.config.list_logical_devices()
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'num_virtual_devices=3'
    ):
      mnist_common.split_device(3)
    self.assertIsNone(mnist_common.split_device(0))


if __name__ == '__main__':
  tf.test.main()
