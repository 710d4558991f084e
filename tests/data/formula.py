"""Small data sets whose pixels follow a formula, and files that contain them."""

import dataclasses
import gzip
import os
import struct

import numpy as np
import tensorflow as tf

from examples import datasets
from examples.datasets import images as images_lib
from examples.datasets import tfrecord
from tests import tf_case
from tf_strategies import data, errors

IDX_NAMES = {
  'train': ('train-images-idx3-ubyte', 'train-labels-idx1-ubyte'),
  'test': ('t10k-images-idx3-ubyte', 't10k-labels-idx1-ubyte'),
}


def images(n: int, start: int = 0) -> np.ndarray:
  """Returns uint8 images [n, 28, 28, 1]. Any 251 consecutive examples differ.

  No pixel pattern is symmetric, so a transposed, flipped or shifted image
  differs as well.
  """
  i, r, c = np.ogrid[start : start + n, :28, :28]
  return ((7 * i + 3 * r + 5 * c) % 251).astype(np.uint8)[..., np.newaxis]


def labels(n: int, start: int = 0) -> np.ndarray:
  return (3 * np.arange(start, start + n) + 1) % 10


def arrays(n: int) -> datasets.Images:
  """Returns `images(n)`, where example i has label i."""
  return datasets.Images(images(n), np.arange(n, dtype=np.int64))


def dataset() -> datasets.ImageClassificationData:
  """Returns a data set. Test examples continue where the training examples end."""
  return datasets.ImageClassificationData(
    'mnist',
    datasets.Images(images(23), labels(23)),
    datasets.Images(images(9, 23), labels(9, 23)),
    num_classes=10,
  )


def write_records(directory: str, n: int, num_files: int) -> data.TFRecords:
  """Writes `arrays(n)` to files in order, and returns the source."""
  size = -(-n // num_files)
  paths = []
  for start in range(0, n, size):
    paths.append(f'{directory}/{len(paths)}.tfrecord')
    with tf.io.TFRecordWriter(paths[-1]) as writer:
      for i in range(start, min(n, start + size)):
        writer.write(tfrecord.serialize_image(images(1, i).tobytes(), i))
  return data.TFRecords(
    paths, tfrecord.parse_examples, decode_fn=images_lib.scale
  )


def write_npz(path: str, **changes) -> str:
  small = dataset()
  content = {
    'x_train': small.train.images[..., 0],
    'y_train': small.train.labels.astype(np.uint8),
    'x_test': small.test.images[..., 0],
    'y_test': small.test.labels.astype(np.uint8),
  }
  content.update(changes)
  np.savez(path, **{k: v for k, v in content.items() if v is not None})
  return path


def write_idx(directory: str) -> str:
  small = dataset()
  for split, (image_name, label_name) in IDX_NAMES.items():
    arrays_ = getattr(small, split)
    for name, values in (
      (image_name, arrays_.images[..., 0]),
      (label_name, arrays_.labels),
    ):
      with gzip.open(os.path.join(directory, f'{name}.gz'), 'wb') as f:
        f.write(struct.pack('>HBB', 0, 8, values.ndim))
        f.write(struct.pack(f'>{values.ndim}I', *values.shape))
        f.write(values.astype(np.uint8).tobytes())
  return directory


class DataTestCase(tf_case.TestCase):
  """Shared methods of the tests of sources."""

  def new_dir(self) -> str:
    return self.create_tempdir().full_path

  def source(self, kind, n, num_files=4):
    """Returns `arrays(n)` as a source: 'arrays', or 'files'."""
    if kind == 'arrays':
      return arrays(n)
    return write_records(self.new_dir(), n, num_files)

  def make(self, source, **given):
    """Returns a dataset, by default for training with batches of eight."""
    names = {field.name for field in dataclasses.fields(data.PipelineOptions)}
    options = {k: given.pop(k) for k in names & given.keys()}
    options = data.PipelineOptions(**{'global_batch_size': 8, **options})
    return data.make_dataset(source, options, **{'training': True, **given})

  def assert_data_error(self, fragments, function, *args, **kwargs):
    """Checks that `function` raises DataError with every fragment in its message."""
    with self.assertRaises(errors.DataError) as caught:
      function(*args, **kwargs)
    for fragment in fragments:
      self.assertIn(fragment, str(caught.exception))

  def assert_same_data(self, actual, expected):
    self.assertEqual(actual.num_classes, expected.num_classes)
    for split in ('train', 'test'):
      one, other = getattr(actual, split), getattr(expected, split)
      self.assertEqual(one.images.dtype, np.uint8)
      self.assertEqual(one.labels.dtype, np.int64)
      np.testing.assert_array_equal(one.images, other.images)
      np.testing.assert_array_equal(one.labels, other.labels)
