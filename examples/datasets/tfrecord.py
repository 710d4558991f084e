"""TFRecord shards of images, as `extract` writes them: their records and a source.

A record is a `tf.train.Example` with `image_raw` (the pixels, row by row),
`label`, `height` and `width`.

Source: https://www.tensorflow.org/tutorials/load_data/tfrecord.

Example:

  >>> import os, tempfile
  >>> import numpy as np
  >>> from examples import datasets
  >>> small = datasets.make_synthetic(num_train=10, num_test=4)
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   path, shards = (os.path.join(directory, n) for n in ('a.npz', 'out'))
  ...   np.savez(
  ...     path, x_train=small.train.images, y_train=small.train.labels,
  ...     x_test=small.test.images, y_test=small.test.labels)
  ...   report = datasets.extract(path, shards, examples_per_shard=6)
  ...   datasets.tfrecords(shards, 'train').counts
  ...   datasets.load_tfrecords(shards).test.labels.tolist()
  (6, 4)
  [0, 1, 2, 3]
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from examples.datasets import images as images_lib
from examples.datasets import manifest as manifest_lib
from tf_strategies import data, errors

SPLITS = ('train', 'test')
FEATURES = {
  'image_raw': tf.io.FixedLenFeature([], tf.string),
  'label': tf.io.FixedLenFeature([], tf.int64),
  'height': tf.io.FixedLenFeature([], tf.int64),
  'width': tf.io.FixedLenFeature([], tf.int64),
}
# Large enough to amortize a step of the reader, small enough to stay in cache.
_READ_BATCH = 1024


def check_split(split: str) -> None:
  """Raises an UnsupportedOptionError unless `split` is train or test."""
  if split not in SPLITS:
    raise errors.UnsupportedOptionError(
      f'split={split!r}', "'train' or 'test'", "write split='train'"
    )


def tfrecords(
  directory: str | os.PathLike[str],
  split: str,
  parse_fn: Callable[[tf.Tensor], Any] | None = None,
) -> data.TFRecords:
  """Returns an extracted split as a source for `make_dataset`.

  Args:
    directory: output directory of `extract`.
    split: 'train' or 'test'.
    parse_fn: argument of `TFRecords`, for records of another schema. By default
      records are 28x28 images.

  Raises:
    DataError: like `manifest.read_complete`, and if the split has no shard, or the
      first record is not such an image.
    UnsupportedOptionError: if `split` is unknown.
  """
  paths, counts = _shards(directory, split)
  if parse_fn is not None:
    return data.TFRecords(paths, parse_fn, counts)
  next(_read(paths[0], 1))  # One record shows whether the data are images.
  return data.TFRecords(
    paths, parse_examples, counts, decode_fn=images_lib.scale
  )


def load_tfrecords(
  directory: str | os.PathLike[str], num_classes: int = 10
) -> images_lib.ImageClassificationData:
  """Loads both splits of a directory of shards into memory.

  Args:
    directory: output directory of `extract`.
    num_classes: labels are in [0, num_classes).

  Returns:
    The data set in the order of its sources. Takes O(bytes), about 10 us per example.

  Raises:
    DataError: like `tfrecords`, and if a shard has a wrong checksum or other
      records. The message names the file.
  """
  splits = []
  for split in SPLITS:
    paths, _ = _shards(directory, split)
    batches = [batch for path in paths for batch in _read(path, _READ_BATCH)]
    images, labels = map(np.concatenate, zip(*batches, strict=True))
    splits.append((images, labels))
  name = manifest_lib.read(directory).settings.name
  return images_lib.build(os.fspath(directory), name, *splits, num_classes)


def serialize_image(image: bytes, label: int) -> bytes:
  """Returns the record of a 28x28 image: a serialized `tf.train.Example`."""
  height, width, _ = images_lib.IMAGE_SHAPE
  feature = {
    'image_raw': tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
    'label': _int64(label),
    'height': _int64(height),
    'width': _int64(width),
  }
  # The entries of a map have no order.
  return tf.train.Example(
    features=tf.train.Features(feature=feature)
  ).SerializeToString(deterministic=True)


def parse_examples(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Decodes a batch of records at once.

  Args:
    records: string [b], serialized examples.

  Returns:
    Images uint8 [b, 28, 28, 1] and labels int64 [b].

  Raises:
    tf.errors.InvalidArgumentError: if a record is not such an image.
  """
  parsed = tf.io.parse_example(records, FEATURES)
  # Without `fixed_length`, which would silently pad or cut an image.
  pixels = tf.io.decode_raw(parsed['image_raw'], tf.uint8)
  labels = parsed['label']
  shape = tf.concat([tf.shape(labels), images_lib.IMAGE_SHAPE], axis=0)
  images = tf.ensure_shape(
    tf.reshape(pixels, shape), (None,) + images_lib.IMAGE_SHAPE
  )
  return images, labels


def _shards(directory, split) -> tuple[list[str], list[int]]:
  """Returns the paths of a split's shards, and the number of records in each."""
  check_split(split)
  where = os.fspath(directory)
  manifest = manifest_lib.read_complete(where)
  shards = [shard for shard in manifest.shards if shard.split == split]
  if not shards:
    raise errors.DataError(
      f'{where}: its manifest has no shard of {split}; expected some, extract '
      'from a source with that split'
    )
  paths = [os.path.join(where, shard.name) for shard in shards]
  return paths, [shard.examples for shard in shards]


def _read(path: str, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields batches of a shard's images and labels."""
  try:
    for records in tf.data.TFRecordDataset(path).batch(size):
      images, labels = parse_examples(records)
      yield images.numpy(), labels.numpy()
  # TensorFlow may fail to decode its own error message about a damaged record.
  except (tf.errors.OpError, UnicodeDecodeError) as e:
    raise errors.DataError(
      f'{path}: unreadable record ({e}); expected whole records with '
      f'the features {", ".join(FEATURES)} and {images_lib.IMAGE_BYTES} bytes an '
      'image, extract again'
    ) from e


def _int64(value: int) -> tf.train.Feature:
  return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
