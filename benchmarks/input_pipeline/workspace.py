"""The data of a run, where processes of other interpreters can read them too.

Example:

  >>> import os, tempfile
  >>> from examples import datasets
  >>> from benchmarks.input_pipeline import workspace
  >>> small = datasets.make_synthetic(num_train=6, num_test=4)
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   arrays, shards = workspace.prepare(small, directory, num_files=2)
  ...   sorted(os.listdir(arrays)), len(os.listdir(shards))
  (['images.npy', 'labels.npy'], 4)
"""

from __future__ import annotations

import os

import numpy as np

from examples import datasets
from examples.datasets import images as images_lib
from examples.datasets import tfrecord
from examples.datasets.write_tfrecords import write_tfrecords
from tf_strategies import errors


def prepare(
  data: images_lib.ImageClassificationData,
  directory: str,
  num_files: int,
  tfrecord_dir: str | None = None,
) -> tuple[str, str]:
  """Writes the training split as `.npy` files, and as shards.

  Args:
    data: what to write.
    directory: where to.
    num_files: shards of each split.
    tfrecord_dir: shards that are there already, or where to write them.

  Returns:
    The directories of the arrays and of the shards.

  Raises:
    DataError: shards that are incomplete, or not of this data set.
    UnsupportedOptionError: as `write_tfrecords`.
  """
  arrays = os.path.join(directory, 'arrays')
  os.makedirs(arrays)
  np.save(os.path.join(arrays, 'images.npy'), data.train.images)
  np.save(os.path.join(arrays, 'labels.npy'), data.train.labels)
  shards = tfrecord_dir or os.path.join(directory, 'shards')
  if not os.path.isdir(shards) or not tfrecord.is_tfrecord_directory(shards):
    write_tfrecords(data, shards, num_files)
  else:
    count = datasets.tfrecords(shards, 'train').num_examples
    if count != len(data.train):
      raise errors.DataError(
        f'{shards}: {count} training examples, but {data.name} has '
        f'{len(data.train)}; expected the same data, write the shards again or '
        'name their data with --dataset and --data_path'
      )
  return arrays, shards
