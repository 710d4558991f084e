"""What feeds the steps: batches that the coordinator hands out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.strategies.parameter_server import resumption, worker_input


class FedDataset(_tf_internal.DistributedDataset):
  """A data set whose batches the coordinator reads and sends to workers.

  Each batch is handed to one step, and to another worker if the first is lost:
  an epoch sees each element once. Keras iterates over it as over any iterable.

  Args:
    dataset: of batches.
    stock: makes TensorFlow's own distributed data set, for
      `ClusterCoordinator.create_per_worker_dataset`, which calls this object.
    take_resumption: tells once where a restarted run goes on.
  """

  # pylint: disable-next=super-init-not-called
  def __init__(
    self,
    dataset: tf.data.Dataset,
    stock: Callable[[tf.data.Dataset], Any],
    take_resumption: Callable[[], resumption.Resumption | None],
  ):
    self.dataset = dataset
    self._stock = stock
    self._take_resumption = take_resumption

  @property
  def element_spec(self) -> Any:
    """Of one batch."""
    return self.dataset.element_spec

  def cardinality(self) -> int:
    """Number of batches; negative as `tf.data.Dataset.cardinality`."""
    return int(self.dataset.cardinality())

  def __iter__(self) -> Iterator[Any]:
    # Opened when the first batch is wanted: Keras asks for an iterator at the
    # end of each epoch, for an epoch that may never come.
    resumed = self._take_resumption()
    if resumed is None:
      yield from self.dataset
    else:
      yield from self._after(resumed.skip(self.cardinality()))

  def _after(self, count):
    """An iterator after so many batches, over several passes if need be."""
    if self.cardinality() != tf.data.UNKNOWN_CARDINALITY:
      return iter(self.dataset.skip(count))
    iterator = iter(self.dataset)
    while count:
      skipped = sum(1 for _ in itertools.islice(iterator, count))
      count -= skipped
      if count:
        iterator = iter(self.dataset)
        if not skipped:
          break
    return iterator

  def __call__(self) -> Any:
    """TensorFlow's own distributed data set."""
    return self._stock(self.dataset)


def feed(
  dataset, stock, take_resumption
) -> FedDataset | worker_input.WorkerDataset:
  """Wraps what `experimental_distribute_dataset` is given.

  Raises:
    UnsupportedOptionError: it is no data set.
  """
  if isinstance(dataset, FedDataset | worker_input.WorkerDataset):
    return dataset
  if not isinstance(dataset, tf.data.Dataset):
    raise errors.UnsupportedOptionError(
      f'a {type(dataset).__name__} to distribute',
      'a tf.data.Dataset',
      'wrap a generator: tf.data.Dataset.from_generator',
    )
  return FedDataset(dataset, stock, take_resumption)
