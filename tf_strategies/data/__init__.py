"""Input pipelines for training that resumes exactly.

  options = tfs.data.PipelineOptions(global_batch_size=256, seed=0)
  train = tfs.data.make_dataset((images, labels), options, training=True)
  model.fit(train)

Sources are arrays, `TFRecords` and `Files` of any format. With `epochs` and
`start`, `make_dataset` makes a stream that a resumed run continues.
"""

from tf_strategies.data.files import Arrays, Files, TFRecords
from tf_strategies.data.options import PipelineOptions
from tf_strategies.data.pipeline import make_dataset

__all__ = [
  'Arrays',
  'Files',
  'PipelineOptions',
  'TFRecords',
  'make_dataset',
]


def __dir__() -> list[str]:
  return __all__
