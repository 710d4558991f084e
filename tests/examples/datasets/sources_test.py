import os
import pathlib
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from examples import datasets
from tests.data import formula
from tf_strategies import data as data_lib
from tf_strategies import errors

_URL = 'storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz'


class LoadTest(formula.DataTestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.directory = self.new_dir()

  def assert_refused(self, path, *fragments):
    self.assert_data_error(
      [f'data_path={path}', *fragments], datasets.load, 'mnist', path
    )

  def write_npz(self):
    return formula.write_npz(os.path.join(self.directory, 'mnist.npz'))

  def write_shards(self, directory):
    datasets.extract(self.write_npz(), directory)
    return directory

  @parameterized.parameters('npz', 'idx', 'shards')
  def test_tells_sources_apart_by_content(self, kind):
    if kind == 'npz':
      path = self.write_npz()
    elif kind == 'shards':
      path = self.write_shards(self.new_dir())
    else:
      path = formula.write_idx(self.directory)
    for spelled in (path, pathlib.Path(path)):
      data = datasets.load('mnist', spelled)
      self.assertEqual(data.name, 'mnist')
      self.assert_same_data(data, formula.dataset())

  def test_no_data_set(self):
    path = os.path.join(self.directory, 'mnist.npz')
    self.assert_refused(
      path, 'no such file', 'expected an .npz', _URL, 'train-images-idx3-ubyte'
    )
    self.assert_refused(self.directory, 'empty directory', _URL, 'extract')
    other = os.path.join(self.directory, 'train.csv')
    pathlib.Path(other).write_text('label,pixel0')
    self.assert_refused(other, 'not an .npz file', _URL)
    self.assert_refused(self.directory, 'no data set in this directory', _URL)
    self.write_npz()
    self.assert_refused(self.directory, f'pass the file itself: {path}')

  def test_directory_of_two_kinds(self):
    where = formula.write_idx(self.new_dir())
    self.write_shards(where)
    self.assert_refused(where, 'both IDX files and TFRecord')

  @parameterized.parameters('digits', 'synthetic')
  def test_no_path_for_data_that_need_none(self, dataset):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError,
      f"data_path='/tmp/x' with dataset='{dataset}'",
    ):
      datasets.load(dataset, '/tmp/x')

  @parameterized.parameters(
    ('mnst', "dataset='mnist'"),
    ('digit', "dataset='digits'"),
    ('cifar10', "'mnist', 'digits', 'synthetic'"),
    (None, 'dataset=None'),
  )
  def test_unknown_dataset(self, dataset, fragment):
    with self.assertRaises(errors.UnsupportedOptionError) as caught:
      datasets.load(dataset)
    self.assertIn(fragment, str(caught.exception))


class LoadFromKerasTest(formula.DataTestCase):
  def patch(self, **kwargs):
    return mock.patch.object(keras.datasets.mnist, 'load_data', **kwargs)

  def test_loads(self):
    data = formula.dataset()
    splits = [
      (s.images[..., 0], s.labels.astype(np.uint8))
      for s in (data.train, data.test)
    ]
    with self.patch(return_value=tuple(splits)):
      self.assert_same_data(datasets.load('mnist'), data)

  def test_offline(self):
    failure = Exception(f'URL fetch failure on https://{_URL}: None')
    with self.patch(side_effect=failure):
      self.assert_data_error(
        ['Keras cache', 'URL fetch failure', '--data_path', '--dataset=digits'],
        datasets.load,
        'mnist',
      )


class RealMnistTest(formula.DataTestCase):
  """On the real file, where the environment says where it is."""

  def setUp(self):
    super().setUp()
    path = os.environ.get('TFS_MNIST_NPZ')
    if not path:
      self.skipTest('TFS_MNIST_NPZ does not name a copy of mnist.npz')
    self.data = datasets.load('mnist', path)

  def test_counts(self):
    # Source: the table of class frequencies of the published files.
    self.assertEqual(
      np.bincount(self.data.train.labels).tolist(),
      [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    )
    self.assertEqual(
      np.bincount(self.data.test.labels).tolist(),
      [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    )
    self.assertEqual(self.data.train.num_examples, 60000)
    self.assertEqual(self.data.test.num_examples, 10000)

  def test_an_epoch_holds_each_image_once(self):
    options = data_lib.PipelineOptions(global_batch_size=256, seed=0)
    dataset = data_lib.make_dataset(self.data.train, options, training=True)
    pixels, labels = 0, np.zeros([10], np.int64)
    for images, batch_labels in dataset.as_numpy_iterator():
      pixels += np.rint(images * 255).astype(np.int64).sum()
      labels += np.bincount(batch_labels, minlength=10)
    self.assertEqual(pixels, self.data.train.images.sum(dtype=np.int64))
    self.assertAllEqual(labels, np.bincount(self.data.train.labels))


if __name__ == '__main__':
  tf.test.main()
