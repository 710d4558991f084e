"""Streams: the order of an epoch is a function of (seed, epoch) alone."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from examples import datasets
from tests.data import formula
from tf_strategies import data as data_lib
from tf_strategies import errors
from tf_strategies.checkpoint import position

_N = 23


def _arrays():
  return datasets.make_synthetic(num_train=_N, num_test=1).train


def _images(first_epoch, num_epochs, seed=5, size=4, **kwargs):
  """All images of the stream, in its order, one flat row each."""
  keys = ('drop_remainder', 'shuffle_buffer', 'deterministic')
  chosen = {k: kwargs.pop(k) for k in keys if k in kwargs}
  options = data_lib.PipelineOptions(size, seed=seed, **chosen)
  dataset = data_lib.make_dataset(
    _arrays(),
    options,
    training=True,
    epochs=num_epochs,
    start=(first_epoch, 0),
    **kwargs,
  )
  batches = [images.numpy() for images, _ in dataset]
  assert len(batches) == int(dataset.cardinality())
  return np.concatenate(batches).reshape([-1, 784])


def _positions(images):
  """Which example each image is."""
  table = _arrays().images.reshape([_N, 784]).astype(np.float32) / 255
  distances = np.abs(images[:, None] - table[None]).max(axis=2)
  assert (distances.min(axis=1) < 1e-6).all()
  return distances.argmin(axis=1)


def _labels(dataset):
  """The batches of a stream whose labels number the examples."""
  return [labels.numpy().tolist() for _, labels in dataset]


class EpochsTest(tf.test.TestCase, parameterized.TestCase):
  @pytest.mark.smoke
  def test_each_epoch_has_every_example_once_in_an_order_of_its_own(self):
    positions = _positions(_images(0, 3)).reshape([3, _N])
    for epoch in positions:
      self.assertAllEqual(np.sort(epoch), np.arange(_N))
    self.assertFalse((positions[0] == positions[1]).all())
    self.assertFalse((positions[1] == positions[2]).all())

  @pytest.mark.smoke
  def test_a_later_start_sees_the_same_epochs(self):
    whole = _images(0, 3)
    for first in (1, 2):
      np.testing.assert_array_equal(whole[first * _N :], _images(first, 3))
    self.assertEqual(
      int(
        data_lib.make_dataset(
          _arrays(),
          data_lib.PipelineOptions(4, seed=5),
          training=True,
          epochs=3,
          start=(3, 0),
        ).cardinality()
      ),
      0,
    )

  def test_order_survives_other_iterators_and_depends_on_the_seed(self):
    options = data_lib.PipelineOptions(4, seed=5)
    dataset = data_lib.make_dataset(
      _arrays(), options, training=True, epochs=1, start=(0, 0)
    )
    next(iter(dataset))
    tf.random.set_seed(99)
    again = np.concatenate([x.numpy() for x, _ in dataset])
    np.testing.assert_array_equal(again.reshape([-1, 784]), _images(0, 1))
    self.assertFalse((_images(0, 1, seed=6) == _images(0, 1)).all())

  def test_labels_belong_to_their_images(self):
    options = data_lib.PipelineOptions(5, seed=1)
    seen = 0
    for images, labels in data_lib.make_dataset(
      _arrays(), options, training=True, epochs=1, start=(0, 0)
    ):
      positions = _positions(images.numpy().reshape([-1, 784]))
      np.testing.assert_array_equal(_arrays().labels[positions], labels)
      seen += len(positions)
    self.assertLen(_arrays().labels, seen)

  def test_options(self):
    self.assertLen(_images(0, 2, drop_remainder=True), 2 * 20)
    self.assertLen(_images(0, 2, steps_per_epoch=2), 2 * 8)
    in_order = _positions(_images(0, 2, shuffle_buffer=0))
    self.assertAllEqual(in_order, [*range(_N), *range(_N)])

  @parameterized.named_parameters(
    ('no_seed', {'seed': None}, 'seed=None'),
    ('buffer', {'shuffle_buffer': 7}, 'shuffle_buffer=7'),
    ('order', {'deterministic': False}, 'deterministic=False'),
    (
      'replicas',
      {'input_context': tf.distribute.InputContext(2, 0, 4)},
      'num_replicas_in_sync=4.*experimental_distribute_dataset',
    ),
  )
  def test_refusals(self, options, message):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, message):
      _images(0, 1, **options)

  @parameterized.named_parameters(
    ('epochs', {'start': (0, 1)}, 'without epochs'),
    ('steps', {'steps_per_epoch': 3}, 'without epochs'),
    ('evaluation', {'epochs': 1, 'training': False}, 'training=False'),
    ('before', {'epochs': 1, 'start': (-1, 0)}, 'start epoch=-1'),
    ('half', {'epochs': 1.5}, 'epochs=1.5 .*an integer of at least 0'),
  )
  def test_refuses_a_stream_that_is_not_one(self, changes, message):
    options = data_lib.PipelineOptions(4, seed=1)
    with self.assertRaisesRegex(errors.UnsupportedOptionError, message):
      data_lib.make_dataset(
        _arrays(), options, **({'training': True} | changes)
      )

  def test_starts_at_a_position(self):
    options = data_lib.PipelineOptions(4, seed=1)
    starts = ((1, 2), position.Position(epoch=1, step=2))
    one, other = (
      _labels(
        data_lib.make_dataset(
          _arrays(), options, training=True, epochs=2, start=start
        )
      )
      for start in starts
    )
    self.assertEqual(one, other)

  def test_no_batch_is_a_data_error(self):
    with self.assertRaisesRegex(errors.DataError, 'no full batch of 64'):
      _images(0, 1, size=64, drop_remainder=True)


class VirtualEpochsTest(tf.test.TestCase, parameterized.TestCase):
  """Epochs that are longer or shorter than the data."""

  def stream(self, first_epoch, num_epochs, first_step=0, **changes):
    steps = changes.pop('steps_per_epoch', 7)
    context = changes.pop('input_context', None)
    options = data_lib.PipelineOptions(
      **({'global_batch_size': 5, 'seed': 3} | changes)
    )
    return _labels(
      data_lib.make_dataset(
        formula.arrays(_N),
        options,
        training=True,
        epochs=num_epochs,
        start=(first_epoch, first_step),
        steps_per_epoch=steps,
        input_context=context,
      )
    )

  @parameterized.product(steps=(2, 7, 13), drop_remainder=(False, True))
  def test_every_example_as_often_as_any_other(self, steps, drop_remainder):
    changes = {'steps_per_epoch': steps, 'drop_remainder': drop_remainder}
    for epochs in (1, 3, 8):
      batches = self.stream(0, epochs, **changes)
      self.assertLen(batches, epochs * steps)
      counts = np.bincount(np.concatenate(batches), minlength=_N)
      self.assertLessEqual(counts.max() - counts.min(), 1)
      if drop_remainder:
        self.assertEqual({len(batch) for batch in batches}, {5})

  def test_stream_is_that_of_whole_passes(self):
    passes = self.stream(0, 6, steps_per_epoch=None)
    self.assertLen(passes, 6 * 5)
    for steps in (2, 5, 10):
      self.assertEqual(
        self.stream(0, 30 // steps, steps_per_epoch=steps), passes
      )
    full = self.stream(0, 1, steps_per_epoch=6 * _N // 5, drop_remainder=True)
    in_a_row = np.concatenate(passes)
    self.assertAllEqual(np.concatenate(full), in_a_row[: len(full) * 5])

  @parameterized.parameters(False, True)
  def test_resumes_within_an_epoch(self, drop_remainder):
    whole = self.stream(0, 4, drop_remainder=drop_remainder)
    for epoch, step in ((0, 1), (0, 6), (1, 0), (2, 4), (3, 6), (4, 0)):
      rest = self.stream(epoch, 4, step, drop_remainder=drop_remainder)
      self.assertEqual(rest, whole[epoch * 7 + step :])

  def test_workers_take_batches_in_turn(self):
    whole = self.stream(1, 3, 2)
    for i in range(3):
      context = tf.distribute.InputContext(3, i)
      self.assertEqual(self.stream(1, 3, 2, input_context=context), whole[i::3])

  def test_batches_larger_than_the_data(self):
    changes = {'global_batch_size': 40, 'drop_remainder': True}
    batches = self.stream(0, 1, steps_per_epoch=3, **changes)
    self.assertEqual([len(batch) for batch in batches], [40] * 3)

  def test_refuses_no_steps(self):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'steps_per_epoch=0'
    ):
      self.stream(0, 1, steps_per_epoch=0)


class FileEpochsTest(tf.test.TestCase, parameterized.TestCase):
  """The same promises where records cannot be had out of turn."""

  def setUp(self):
    super().setUp()
    self._directory = self.create_tempdir().full_path
    datasets.write_tfrecords(formula.numbered(_N, 5), self._directory, 5)

  def stream(self, first_epoch, num_epochs, steps=7, first_step=0, **changes):
    context = changes.pop('input_context', None)
    options = data_lib.PipelineOptions(
      **({'global_batch_size': 4, 'seed': 3} | changes)
    )
    dataset = data_lib.make_dataset(
      datasets.tfrecords(self._directory, 'train'),
      options,
      training=True,
      epochs=num_epochs,
      start=(first_epoch, first_step),
      steps_per_epoch=steps,
      augment_fn=lambda x, y, seed: (
        x + tf.random.stateless_uniform(tf.shape(x), seed),
        y,
      ),
      input_context=context,
    )
    self.assertEqual(
      int(dataset.cardinality()),
      max(0, num_epochs - first_epoch) * (steps or 6) - first_step,
    )
    return list(dataset.as_numpy_iterator())

  @parameterized.parameters(
    {},
    {'shuffle_buffer': 6, 'drop_remainder': True},
    {'shuffle_buffer': 6, 'cache': 'memory'},
    {'cache': 'memory', 'drop_remainder': True},
  )
  def test_resumed_run_sees_and_augments_the_same(self, **changes):
    whole = self.stream(0, 3, **changes)
    tf.random.set_seed(5)
    for epoch, step in ((0, 4), (1, 0), (2, 5)):
      rest = self.stream(epoch, 3, first_step=step, **changes)
      for one, other in zip(whole[epoch * 7 + step :], rest, strict=True):
        np.testing.assert_array_equal(one[1], other[1])
        np.testing.assert_array_equal(one[0], other[0])
    counts = np.bincount(np.concatenate([y for _, y in whole]), minlength=_N)
    self.assertLessEqual(counts.max() - counts.min(), 1)

  def test_each_pass_has_an_order_of_its_own(self):
    for buffer in (None, 6):
      labels = np.concatenate(
        [y for _, y in self.stream(0, 3, None, shuffle_buffer=buffer)]
      ).reshape([3, _N])
      for one in labels:
        self.assertAllEqual(np.sort(one), np.arange(_N))
      self.assertLen({tuple(one) for one in labels}, 3)
    others = np.concatenate([y for _, y in self.stream(0, 1, None, seed=4)])
    self.assertNotAllEqual(others, labels[0])

  def test_files_take_turns_where_the_buffer_is_small(self):
    first = {
      self.stream(epoch, epoch + 1, None, shuffle_buffer=1)[0][1][0] % 5
      for epoch in range(6)
    }
    self.assertGreater(len(first), 2)

  @parameterized.named_parameters(
    ('no_seed', {'seed': None}, 'seed=None'),
    ('order', {'deterministic': False}, 'deterministic=False'),
    (
      'replicas',
      {'input_context': tf.distribute.InputContext(1, 0, 2)},
      'num_replicas_in_sync=2',
    ),
  )
  def test_refusals(self, changes, message):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, message):
      self.stream(0, 1, **changes)


if __name__ == '__main__':
  tf.test.main()
