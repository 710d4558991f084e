"""What a multi-worker strategy asks of the link between its workers.

Two kinds exist: `ProcessGroupCommunicator` (a process group of ours, called from the graph)
and `RuntimeCommunicator` (TensorFlow's collective runtime).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class Communicator(abc.ABC):
  """The workers of a job, as seen by one of them.

  Every method that takes tensors works in a graph and eagerly, and is a
  collective: all workers call it in the same order with tensors of the same
  dtypes and, unless said otherwise, the same shapes.
  """

  @property
  @abc.abstractmethod
  def rank(self) -> int:
    """This worker's place, from 0; 0 is the chief."""

  @property
  @abc.abstractmethod
  def world_size(self) -> int:
    """Number of workers."""

  @abc.abstractmethod
  def all_reduce(
    self, columns: Sequence[Sequence[tf.Tensor]], name: str
  ) -> list[list[tf.Tensor]]:
    """Sums tensors over all local devices of all workers.

    Args:
      columns: for each local device its tensors.
      name: of the collective, for messages and statistics.

    Returns:
      As `columns`, the sums; on one worker they may be on the first device.
      None is there before all are: what follows happens with all or none.
    """

  @abc.abstractmethod
  def all_reduce_replica(
    self, tensors: Sequence[tf.Tensor], replica_id: int, options
  ) -> list[tf.Tensor]:
    """Sums the tensors of one local replica, in a branch of its own graph."""

  @abc.abstractmethod
  def combine(
    self, tensor: tf.Tensor, op: str, name: str, is_report: bool = False
  ) -> tf.Tensor:
    """Combines one small host tensor of each worker.

    Args:
      tensor: this worker's.
      op: 'sum', 'min' or 'max'.
      name: of the collective.
      is_report: whether the result is only for people to read. It then is this
        worker's own where a worker has died, and the next collective fails: a
        step that was applied everywhere is not reported as failed.
    """

  @abc.abstractmethod
  def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Concatenates the workers' tensors along axis 0, of which lengths differ.

    Args:
      tensor: of rank 1 or more, one a worker; other dimensions are the same.
      name: of the collective.
    """

  @abc.abstractmethod
  def broadcast(self, tensor: tf.Tensor, root: int, name: str) -> tf.Tensor:
    """Returns the root's tensor on every worker."""

  @abc.abstractmethod
  def exchange(self, tag: str, payload: bytes) -> list[bytes]:
    """Brings a few bytes of each worker to all, beside the collectives."""

  @abc.abstractmethod
  def agree(self, value: Any, what: str) -> Any:
    """Returns `value` if all workers have the same, else raises.

    Raises:
      CollectiveMismatchError: names what, and the ranks that differ.
    """

  @abc.abstractmethod
  def report(self) -> dict[str, Any]:
    """What was communicated so far."""

  @abc.abstractmethod
  def close(self) -> None:
    """Leaves the other workers."""
