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

from tf_strategies.data.arrays import Arrays
from tf_strategies.data.epochs import (
  make_epochs,
  make_file_epochs,
  make_tfrecord_epochs,
)
from tf_strategies.data.options import PipelineOptions
from tf_strategies.data.pipeline import (
  make_dataset,
  make_file_dataset,
  make_tfrecord_dataset,
  num_examples,
)
from tf_strategies.data.shard_check import check_shards

__all__ = [
  'Arrays',
  'PipelineOptions',
  'check_shards',
  'make_dataset',
  'make_epochs',
  'make_file_dataset',
  'make_file_epochs',
  'make_tfrecord_dataset',
  'make_tfrecord_epochs',
  'num_examples',
]
