"""TFRecord shards: their names, their check at the door, and their records.

`mnist-train-00002-of-00004.tfrecord` is shard 2 of 4 of the training split.
Example i is in shard i % 4, so that every shard has its share of a data set
that is sorted by class. A record is a `tf.train.Example` with `image_raw` (the
pixels, row by row), `label`, `height` and `width`.

Source: https://www.tensorflow.org/tutorials/load_data/tfrecord.

Example:

  >>> import tempfile
  >>> from examples import datasets
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   small = datasets.make_synthetic(num_train=10, num_test=4)
  ...   paths = datasets.write_tfrecords(small, directory, num_shards=2)
  ...   datasets.tfrecords(directory, 'train').num_examples
  ...   datasets.load_tfrecords(directory).train.labels.tolist()
  10
  [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
"""

import dataclasses
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf import message

from examples.datasets import images as images_lib
from examples.datasets import manifest as manifest_lib
from tf_strategies import data, errors
from tf_strategies.data import files

SPLITS = ('train', 'test')
FEATURES = {
  'image_raw': tf.io.FixedLenFeature([], tf.string),
  'label': tf.io.FixedLenFeature([], tf.int64),
  'height': tf.io.FixedLenFeature([], tf.int64),
  'width': tf.io.FixedLenFeature([], tf.int64),
}
_SHARD = re.compile(
  r'(?P<name>[A-Za-z0-9_]+)-(?P<split>train|test)-(?P<index>\d{5,})-of-'
  r'(?P<count>\d{5,})\.tfrecord'
)
# Large enough to amortise a step of the reader, small enough to stay in cache.
_READ_BATCH = 1024


@dataclasses.dataclass(frozen=True)
class Shards:
  """The shards of one split, complete and in order.

  Attributes:
    name: the data set's name, as in the file names.
    split: 'train' or 'test'.
    paths: one path a shard, by index.
    extracted: what the manifest of `extract` says of each; None for shards of
      `write_tfrecords`, which have no manifest.
  """

  name: str
  split: str
  paths: tuple[str, ...]
  extracted: tuple[manifest_lib.Shard, ...] | None = None


def shard_name(name: str, split: str, index: int, count: int) -> str:
  """The file name of one shard: `mnist-train-00000-of-00004.tfrecord`."""
  return f'{name}-{split}-{index:05d}-of-{count:05d}.tfrecord'


def is_tfrecord_directory(directory: str | os.PathLike[str]) -> bool:
  """Returns whether there is a shard of `write_tfrecords`, or what `extract` made."""
  return manifest_lib.is_extracted(directory) or has_shards(directory)


def has_shards(directory: str | os.PathLike[str]) -> bool:
  """Returns whether at least one file is named as a shard of `write_tfrecords`."""
  return any(_SHARD.fullmatch(entry) for entry in os.listdir(directory))


def find_shards(directory: str | os.PathLike[str], split: str) -> Shards:
  """Finds all shards of a split and refuses an incomplete or mixed set.

  Args:
    directory: where the shards are.
    split: 'train' or 'test'.

  Returns:
    The paths, by index. O(files of the directory).

  Raises:
    DataError: the directory is missing, has no such shard, lacks one of the
      declared count, or mixes data sets or counts.
    UnsupportedOptionError: another `split`.
  """
  if split not in SPLITS:
    raise errors.UnsupportedOptionError(
      f'split={split!r}', "'train' or 'test'", "write split='train'"
    )
  where = os.fspath(directory)
  expected = f'{shard_name("mnist", split, 0, 4)} and its companions'
  if not os.path.isdir(where):
    raise errors.DataError(f'{where}: no such directory; expected {expected}')
  if manifest_lib.is_extracted(where):
    return _find_extracted(where, split)
  found: dict[tuple[str, int], set[int]] = {}
  for entry in os.listdir(where):
    match = _SHARD.fullmatch(entry)
    if match and match['split'] == split:
      key = (match['name'], int(match['count']))
      found.setdefault(key, set()).add(int(match['index']))
  if not found:
    raise errors.DataError(
      f'{where}: no TFRecord shard of {split}; expected {expected}, as '
      '`python -m examples.datasets.write_tfrecords` writes them'
    )
  if len(found) > 1:
    sets = ', '.join(f'{n}-{split}-*-of-{c:05d}' for n, c in sorted(found))
    raise errors.DataError(
      f'{where}: shards of several sets, {sets}; expected one, move the others '
      'elsewhere'
    )
  ((name, count), indices) = next(iter(found.items()))
  missing = sorted(set(range(count)) - indices)
  if missing or len(indices) != count:
    first = shard_name(name, split, missing[0] if missing else count, count)
    raise errors.DataError(
      f'{where}: {len(indices)} of {count} shards of {split}; expected all, '
      f'{first} is {"missing" if missing else "out of range"}'
    )
  return Shards(
    name,
    split,
    tuple(
      os.path.join(where, shard_name(name, split, i, count))
      for i in range(count)
    ),
  )


def check_example(path: str, payload: bytes) -> None:
  """Checks the first record of a file: a 28x28 image with a label.

  Raises:
    DataError: it is something else; the message names the file.
  """
  try:
    feature = tf.train.Example.FromString(payload).features.feature
  except message.DecodeError as e:
    raise errors.DataError(
      f'{path}: its first record is no tf.train.Example; expected one with '
      f'{", ".join(FEATURES)}'
    ) from e
  missing = [name for name in FEATURES if name not in feature]
  if missing:
    raise errors.DataError(
      f'{path}: its first record lacks {", ".join(missing)}; expected '
      f'{", ".join(FEATURES)}'
    )
  height = list(feature['height'].int64_list.value)
  width = list(feature['width'].int64_list.value)
  num_bytes = [len(v) for v in feature['image_raw'].bytes_list.value]
  if (height, width, num_bytes) != ([28], [28], [images_lib.IMAGE_BYTES]):
    raise errors.DataError(
      f'{path}: its first record is an image of height {height}, width {width}, '
      f'bytes {num_bytes}; expected 28, 28 and {images_lib.IMAGE_BYTES}'
    )


def count_shard(path: str) -> int:
  """Counts the records of a shard that no manifest tells of.

  Raises:
    DataError: as `files.count_records`; or it holds other records; or there is
      none: `write_tfrecords` leaves
      no shard without one, but a copy that failed does.
  """
  count = files.count_records(path, check_example)
  if not count:
    raise errors.DataError(
      f'{path}: has no record; expected at least one in each shard, write it '
      'again'
    )
  return count


def tfrecords(
  directory: str | os.PathLike[str],
  split: str,
  parse_fn: Callable[[tf.Tensor], Any] | None = None,
) -> data.TFRecords:
  """Returns a split that is in shards, as a source for `make_dataset`.

  Shards that `extract` left are counted already, in its manifest. Others are
  counted by looking at the frame of each record, about 2 us each.

  Args:
    directory: as `write_tfrecords` or `extract` leaves it.
    split: 'train' or 'test'.
    parse_fn: of `TFRecords`, for records of another schema that `extract` left;
      by default records are 28x28 images.

  Raises:
    DataError: as `find_shards`; or a shard is truncated, empty or holds other
      records.
    UnsupportedOptionError: another `split`.
  """
  shards = find_shards(directory, split)
  if shards.extracted is not None:
    if parse_fn is None:
      # One record tells what was extracted.
      files.count_records(shards.paths[0], check_example, limit=1)
    counts = [shard.examples for shard in shards.extracted]
  else:
    counts = list(map(count_shard, shards.paths))
  return data.TFRecords(
    shards.paths,
    parse_fn or parse_examples,
    counts,
    decode_fn=None if parse_fn else images_lib.scale,
    is_round_robin=shards.extracted is None,
  )


def load_tfrecords(
  directory: str | os.PathLike[str], num_classes: int = 10
) -> images_lib.ImageClassificationData:
  """Loads both splits of a directory of shards into memory.

  Args:
    directory: holds `<name>-train-*` and `<name>-test-*` shards.
    num_classes: labels are in [0, num_classes).

  Returns:
    The data set, named as its files, in the order in which it was written.
    O(bytes), about 10 us an example.

  Raises:
    DataError: a shard is missing, truncated, empty, fails its checksum or holds
      other records; the message names the file.
  """
  splits, names = {}, {}
  for split in SPLITS:
    shards = find_shards(directory, split)
    splits[split] = _read_split(shards)
    names[split] = shards.name
  if names['train'] != names['test']:
    raise errors.DataError(
      f'{os.fspath(directory)}: train is {names["train"]} but test is '
      f'{names["test"]}; expected one data set'
    )
  return images_lib.build(
    os.fspath(directory),
    names['train'],
    splits['train'],
    splits['test'],
    num_classes,
  )


def serialize_image(image: bytes, label: int) -> bytes:
  """The record of a 28x28 image: a serialized `tf.train.Example`."""
  height, width, _ = images_lib.IMAGE_SHAPE
  feature = {
    'image_raw': tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
    'label': _int64(label),
    'height': _int64(height),
    'width': _int64(width),
  }
  # The entries of a map have no order of their own.
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
    tf.errors.InvalidArgumentError: a record is of another kind.
  """
  parsed = tf.io.parse_example(records, FEATURES)
  # Without `fixed_length`, which would pad or cut an image in silence.
  pixels = tf.io.decode_raw(parsed['image_raw'], tf.uint8)
  labels = parsed['label']
  shape = tf.concat([tf.shape(labels), images_lib.IMAGE_SHAPE], axis=0)
  images = tf.ensure_shape(
    tf.reshape(pixels, shape), (None,) + images_lib.IMAGE_SHAPE
  )
  return images, labels


def _read_split(shards: Shards) -> tuple[np.ndarray, np.ndarray]:
  images, labels, order = [], [], []
  for path in shards.paths:
    shard_images, shard_labels = _read_shard(path)
    images.append(shard_images)
    labels.append(shard_labels)
    order.append(np.arange(len(shard_labels)))
  if shards.extracted is not None:  # Each shard goes on where one ended.
    return np.concatenate(images), np.concatenate(labels)
  # One from each shard in turn undoes the writer's dealing; the stable sort
  # keeps the shards in order among records of the same position.
  order = np.argsort(np.concatenate(order), kind='stable')
  return np.concatenate(images)[order], np.concatenate(labels)[order]


def _read_shard(path: str) -> tuple[np.ndarray, np.ndarray]:
  count = count_shard(path)  # That `extract` leaves no empty one, either.
  images = np.empty((count,) + images_lib.IMAGE_SHAPE, np.uint8)
  labels = np.empty([count], np.int64)
  try:
    start = 0
    for records in tf.data.TFRecordDataset(path).batch(_READ_BATCH):
      batch_images, batch_labels = parse_examples(records)
      stop = start + len(batch_labels)
      images[start:stop] = batch_images
      labels[start:stop] = batch_labels
      start = stop
  except tf.errors.DataLossError as e:
    raise errors.DataError(
      f'{path}: corrupt record ({e.message}); expected a TFRecord file whose '
      'checksums hold, write it again'
    ) from e
  except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError) as e:
    raise errors.DataError(
      f'{path}: unreadable record ({e.message}); expected the features '
      f'{", ".join(FEATURES)} and {images_lib.IMAGE_BYTES} bytes an image'
    ) from e
  return images, labels


def _int64(value: int) -> tf.train.Feature:
  return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))


def _find_extracted(where: str, split: str) -> Shards:
  manifest = manifest_lib.read_complete(where)
  shards = tuple(shard for shard in manifest.shards if shard.split == split)
  if not shards:
    raise errors.DataError(
      f'{where}: its manifest has no shard of {split}; expected some, extract '
      'from a source with that split'
    )
  return Shards(
    manifest.settings.name,
    split,
    tuple(os.path.join(where, shard.name) for shard in shards),
    shards,
  )
