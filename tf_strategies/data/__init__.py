"""Extract, transform, load: data sets for training that resumes exactly.

data = tfs.data.load('digits')
options = tfs.data.PipelineOptions(global_batch_size=256, seed=0)
train = tfs.data.make_dataset(data.train, options, training=True)
model.fit(train)

From arrays, from TFRecord shards (`make_tfrecord_dataset`) and from files of
any schema (`make_file_dataset`); `make_epochs` and its companions make streams
that a resumed run goes on with. `extract` converts files to shards, those that
have changed or all; `check_shards` proves that workers share data out.
"""

from tf_strategies.data.arrays import Arrays, ImageClassificationData
from tf_strategies.data.digits import load_digits
from tf_strategies.data.epochs import (
  make_epochs,
  make_file_epochs,
  make_tfrecord_epochs,
)
from tf_strategies.data.extract import extract
from tf_strategies.data.idx import load_idx
from tf_strategies.data.npz import load_npz
from tf_strategies.data.options import PipelineOptions
from tf_strategies.data.pipeline import (
  make_dataset,
  make_file_dataset,
  make_tfrecord_dataset,
  num_examples,
)
from tf_strategies.data.shard_check import check_shards
from tf_strategies.data.sources import load, load_keras_mnist
from tf_strategies.data.synthetic import make_synthetic
from tf_strategies.data.tfrecord import count_tfrecords, load_tfrecords

# This function and `extract` take the names of their packages, which stay
# importable and runnable (`python -m tf_strategies.data.write_tfrecords`).
from tf_strategies.data.write_tfrecords import write_tfrecords

__all__ = [
  'Arrays',
  'ImageClassificationData',
  'PipelineOptions',
  'check_shards',
  'count_tfrecords',
  'extract',
  'load',
  'load_digits',
  'load_idx',
  'load_keras_mnist',
  'load_npz',
  'load_tfrecords',
  'make_dataset',
  'make_epochs',
  'make_file_dataset',
  'make_file_epochs',
  'make_synthetic',
  'make_tfrecord_dataset',
  'make_tfrecord_epochs',
  'num_examples',
  'write_tfrecords',
]
