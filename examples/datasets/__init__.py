"""Data sets of images: MNIST in its formats, digits, synthetic ones, extraction.

  data = datasets.load('digits')
  options = tfs.data.PipelineOptions(global_batch_size=256, seed=0)
  train = tfs.data.make_dataset(data.train, options, training=True)

`extract` is a command as well: `python -m examples.datasets.extract --help`.
"""

from examples.datasets.digits import load_digits

# This function replaces the package of the same name, which can still be imported.
from examples.datasets.extract import extract
from examples.datasets.idx import load_idx
from examples.datasets.images import ImageClassificationData, Images
from examples.datasets.npz import load_npz
from examples.datasets.sources import load, load_keras_mnist
from examples.datasets.synthetic import make_synthetic
from examples.datasets.tfrecord import load_tfrecords, tfrecords

__all__ = [
  'ImageClassificationData',
  'Images',
  'extract',
  'load',
  'load_digits',
  'load_idx',
  'load_keras_mnist',
  'load_npz',
  'load_tfrecords',
  'make_synthetic',
  'tfrecords',
]
