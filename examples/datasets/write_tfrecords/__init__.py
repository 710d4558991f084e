"""Writes a data set as TFRecord shards; also a command, see `__main__.py`.

Example:

  >>> import os, tempfile
  >>> from examples import datasets
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   small = datasets.make_synthetic(num_train=4, num_test=2)
  ...   paths = datasets.write_tfrecords(small, directory, num_shards=1)
  ...   [os.path.basename(path) for path in paths]
  ['synthetic-train-00000-of-00001.tfrecord', 'synthetic-test-00000-of-00001.tfrecord']
"""

import contextlib
import os
from collections.abc import Callable

import tensorflow as tf

from examples.datasets import images as images_lib
from examples.datasets import tfrecord
from tf_strategies import errors


def write_tfrecords(
  data: images_lib.ImageClassificationData,
  directory: str | os.PathLike[str],
  num_shards: int,
  progress: Callable[[str], None] | None = None,
) -> list[str]:
  """Writes both splits of a data set as TFRecord shards.

  Example i goes to shard i % num_shards. Every shard is written under a
  temporary name, and all are renamed at the end: a run that is cut short
  leaves no file that could be taken for data.

  Args:
    data: what to write.
    directory: where to; created if missing, and without TFRecord shards.
    num_shards: shards of each split, at most the examples of the smaller one.
      A multiple of the number of input pipelines lets each read its own files.
    progress: called with a line after each shard.

  Returns:
    The paths, training shards first. O(examples), about 30 us each.

  Raises:
    DataError: the directory holds shards already, or cannot be written.
    UnsupportedOptionError: `num_shards` is out of its range.
  """
  where = os.fspath(directory)
  most = min(len(data.train), len(data.test))
  if not 1 <= num_shards <= most:
    raise errors.UnsupportedOptionError(
      f'num_shards={num_shards}',
      f'1 to {most}, the examples of the smaller split',
      'pass num_shards=4, or as many as there are input pipelines',
    )
  temporary: dict[str, str] = {}
  try:
    os.makedirs(where, exist_ok=True)
    if tfrecord.is_tfrecord_directory(where):
      raise errors.DataError(
        f'{where}: holds TFRecord shards already; expected a directory without, '
        'so that old and new are never mixed'
      )
    for split in tfrecord.SPLITS:
      for index in range(num_shards):
        name = tfrecord.shard_name(data.name, split, index, num_shards)
        path = os.path.join(where, name)
        temporary[path] = f'{path}.tmp-{os.getpid()}'
        count = _write_shard(
          temporary[path], getattr(data, split), index, num_shards
        )
        if progress:
          progress(f'{name}: {count} examples')
    for path, unfinished in temporary.items():
      os.replace(unfinished, path)
  except (OSError, tf.errors.OpError) as e:
    raise errors.DataError(
      f'{where}: cannot be written ({e}); expected a directory with room for '
      'the shards'
    ) from e
  finally:
    for unfinished in temporary.values():
      with contextlib.suppress(FileNotFoundError):
        os.remove(unfinished)
  return list(temporary)


def _write_shard(
  path: str, split: images_lib.Images, index: int, step: int
) -> int:
  labels = split.labels[index::step]
  with tf.io.TFRecordWriter(path) as writer:
    for image, label in zip(split.images[index::step], labels, strict=True):
      writer.write(tfrecord.serialize_image(image.tobytes(), int(label)))
  return len(labels)
