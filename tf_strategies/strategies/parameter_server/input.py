"""What feeds the steps: batches that the coordinator hands out."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_strategies import errors
from tf_strategies.coordinator import drawn


class FedDataset:
  """A data set whose batches the coordinator reads and sends to workers.

  Each batch is handed to one step, and to another worker if the first is lost:
  an epoch sees each element once. Keras iterates over it as over any iterable.

  Args:
    dataset: of batches.
    stock: makes TensorFlow's own distributed data set, for
      `ClusterCoordinator.create_per_worker_dataset`, which calls this object.
  """

  def __init__(self, dataset: tf.data.Dataset, stock):
    self.dataset = dataset
    self._stock = stock

  @property
  def element_spec(self) -> Any:
    """Of one batch."""
    return self.dataset.element_spec

  def __iter__(self):
    return FedIterator(self.dataset)

  def __call__(self):
    return self._stock(self.dataset)


class FedIterator:
  """Yields batches; the data set is opened when the first is wanted.

  Keras opens an iterator at the end of each epoch for one that may never come.
  """

  def __init__(self, dataset):
    self._dataset = dataset
    self._iterator = None

  def __iter__(self):
    return self

  def __next__(self):
    if self._iterator is None:
      self._iterator = iter(self._dataset)
    return next(self._iterator)


def feed(dataset, stock) -> FedDataset | drawn.DrawnDataset:
  """Wraps what `experimental_distribute_dataset` is given.

  Raises:
    UnsupportedOptionError: it is no data set.
  """
  if isinstance(dataset, FedDataset | drawn.DrawnDataset):
    return dataset
  if not isinstance(dataset, tf.data.Dataset):
    raise errors.UnsupportedOptionError(
      f'a {type(dataset).__name__} to distribute',
      'a tf.data.Dataset',
      'wrap a generator: tf.data.Dataset.from_generator',
    )
  return FedDataset(dataset, stock)
