"""Defines the link between the workers of a strategy."""

from __future__ import annotations

import abc
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.cluster import workers as workers_lib
from tf_strategies.keras import gradient_reducer


class Communicator(abc.ABC):
  """The workers of a job, as seen by one of them.

  Every method that takes tensors works in a graph and eagerly, and is a
  collective: all workers call it in the same order with tensors of the same
  dtypes and, unless said otherwise, the same shapes. `name` is for messages.

  Attributes:
    rank: this worker's rank; 0 is the chief.
    world_size: number of workers.
    is_elastic: whether workers may come and go.
  """

  rank: int
  world_size: int
  is_elastic: bool = False

  @property
  def capacity(self) -> int:
    """Returns the largest number of workers while the strategy lives."""
    return self.world_size

  def place(self) -> tuple[Any, Any]:
    """Returns `rank` and `world_size`; tensors if they may change while graphs live."""
    return self.rank, self.world_size

  @abc.abstractmethod
  def all_reduce(
    self,
    columns: Sequence[Sequence[tf.Tensor]],
    name: str,
    gradients: gradient_reducer.Gradients | None = None,
  ) -> list[list[tf.Tensor]]:
    """Sums tensors over all local devices of all workers.

    Args:
      columns: the tensors of each local device.
      name: name of the collective.
      gradients: the variables of gradients, which may be rounded on their way.
        Other tensors are not rounded.

    Returns:
      The sums, in the structure of `columns`. On one worker they may be on the first
      device. All sums are ready at once, so the operations after them run with all
      sums or not at all.
    """

  # Whether a variable that a step makes gets its first value outside of the step.
  initializes_eagerly: bool = False

  @abc.abstractmethod
  def all_reduce_replica(
    self,
    tensors: Sequence[tf.Tensor],
    replica_id: int,
    options,
    gradients: gradient_reducer.Gradients | None = None,
  ) -> list[tf.Tensor]:
    """Sums the tensors of one local replica, in a branch of its own graph."""

  def gradient_state(self, variables: Sequence[Any]) -> dict[str, tf.Variable]:
    """Returns the rests of the gradients for the next step, by name.

    A checkpoint is whole with it only. By default nothing is left.
    """
    del variables
    return {}

  @abc.abstractmethod
  def combine(self, tensor: tf.Tensor, op: str, name: str) -> tf.Tensor:
    """Combines one small host tensor of each worker by 'sum', 'min' or 'max'."""

  @abc.abstractmethod
  def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Concatenates tensors along axis 0, of which the lengths may differ."""

  @abc.abstractmethod
  def broadcast(self, tensor: tf.Tensor, root: int, name: str) -> tf.Tensor:
    """Returns the root's tensor on every worker."""

  @abc.abstractmethod
  def exchange(self, tag: str, payload: bytes) -> list[bytes]:
    """Brings a few bytes of each worker to all, beside the collectives."""

  def check_same(self, answers: Sequence[bytes], what: str, fix: str) -> None:
    """Raises CollectiveMismatchError unless all workers gave the same answer."""
    workers_lib.check_same(answers, what, fix)

  @abc.abstractmethod
  def report(self) -> dict[str, Any]:
    """Returns counters of the communication so far."""

  @abc.abstractmethod
  def close(self) -> None:
    """Leaves the other workers."""


def check_not_compiled(kind: str) -> None:
  """Refuses a collective in what XLA compiles, which cannot call the network."""
  if _tf_internal.in_xla_context():
    raise errors.UnsupportedOptionError(
      f'jit_compile=True around a collective between workers ({kind})',
      'steps that XLA does not compile: it cannot call the network',
      'compile(..., jit_compile=False), or compile functions inside of the '
      'step that do not synchronise',
    )


def fingerprint(arrays: Iterable[np.ndarray]) -> int:
  """Returns a number for some arrays, by their shapes and first and last values."""
  value = 0
  for array in arrays:
    flat = array.ravel()
    sample = np.concatenate([flat[:256], flat[-256:]])
    if sample.dtype == object:
      text = b'\0'.join(
        x if isinstance(x, bytes) else str(x).encode() for x in sample
      )
    else:
      text = sample.tobytes()
    value = zlib.crc32(text, zlib.crc32(str(array.shape).encode(), value))
  return value
