"""make_epochs: the order of an epoch is a function of (seed, epoch) alone."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tf_strategies import data as data_lib
from tf_strategies import errors

_N = 23


def _arrays():
  return data_lib.make_synthetic(num_train=_N, num_test=1).train


def _images(first_epoch, num_epochs, seed=5, size=4, **kwargs):
  """All images of the stream, in its order, one flat row each."""
  keys = ('drop_remainder', 'shuffle_buffer')
  chosen = {k: kwargs.pop(k) for k in keys if k in kwargs}
  options = data_lib.PipelineOptions(size, seed=seed, **chosen)
  dataset = data_lib.make_epochs(
    _arrays(), options, first_epoch, num_epochs, **kwargs
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


class EpochsTest(tf.test.TestCase, parameterized.TestCase):
  def test_each_epoch_has_every_example_once_in_an_order_of_its_own(self):
    positions = _positions(_images(0, 3)).reshape([3, _N])
    for epoch in positions:
      self.assertAllEqual(np.sort(epoch), np.arange(_N))
    self.assertFalse((positions[0] == positions[1]).all())
    self.assertFalse((positions[1] == positions[2]).all())

  def test_a_later_start_sees_the_same_epochs(self):
    whole = _images(0, 3)
    for first in (1, 2):
      np.testing.assert_array_equal(whole[first * _N :], _images(first, 3))
    self.assertEqual(
      int(
        data_lib.make_epochs(
          _arrays(), data_lib.PipelineOptions(4, seed=5), 3, 3
        ).cardinality()
      ),
      0,
    )

  def test_order_survives_other_iterators_and_depends_on_the_seed(self):
    options = data_lib.PipelineOptions(4, seed=5)
    dataset = data_lib.make_epochs(_arrays(), options, 0, 1)
    next(iter(dataset))
    tf.random.set_seed(99)
    again = np.concatenate([x.numpy() for x, _ in dataset])
    np.testing.assert_array_equal(again.reshape([-1, 784]), _images(0, 1))
    self.assertFalse((_images(0, 1, seed=6) == _images(0, 1)).all())

  def test_labels_belong_to_their_images(self):
    options = data_lib.PipelineOptions(5, seed=1)
    for images, labels in data_lib.make_epochs(_arrays(), options, 0, 1):
      positions = _positions(images.numpy().reshape([-1, 784]))
      np.testing.assert_array_equal(_arrays().labels[positions], labels)

  def test_options(self):
    self.assertLen(_images(0, 2, drop_remainder=True), 2 * 20)
    self.assertLen(_images(0, 2, steps_per_epoch=2), 2 * 8)
    in_order = _positions(_images(0, 2, shuffle_buffer=0))
    self.assertAllEqual(in_order, [*range(_N), *range(_N)])

  @parameterized.named_parameters(
    ('no_seed', {'seed': None}, 'seed=None'),
    ('buffer', {'shuffle_buffer': 7}, 'shuffle_buffer=7'),
  )
  def test_refusals(self, options, message):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, message):
      _images(0, 1, **options)

  def test_no_batch_is_a_data_error(self):
    with self.assertRaisesRegex(errors.DataError, 'no batch of 64'):
      _images(0, 1, size=64, drop_remainder=True)


if __name__ == '__main__':
  tf.test.main()
