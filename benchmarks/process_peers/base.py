"""The interface of a peer in each of its worker processes."""

from __future__ import annotations

import abc
import dataclasses

import numpy as np

FLOAT32_BYTES = 4
# Sums of at most 16 of these are exact in float32.
_POSITIONS = 8191


@dataclasses.dataclass(frozen=True)
class Seat:
  """The rank of a worker and the addresses of all workers.

  Attributes:
    rank: rank, from 0.
    addresses: 'host:port' of every rank, for this peer only.
    interface: network interface to the other workers.
    timeout_seconds: how long to wait for the other workers.
  """

  rank: int
  addresses: tuple[str, ...]
  interface: str
  timeout_seconds: float

  @property
  def world_size(self) -> int:
    """Returns the number of workers."""
    return len(self.addresses)


def input_value(rank: int, size: int) -> np.ndarray:
  """Returns the array of `rank`: integers that differ by rank and position.

  Example:

    >>> input_value(1, 3)
    array([8191., 8192., 8193.], dtype=float32)
  """
  value = (np.arange(size) % _POSITIONS).astype(np.float32)
  value += rank * _POSITIONS
  return value


def expected_sum(world_size: int, size: int) -> np.ndarray:
  """Returns the sum of all ranks' arrays.

  Example:

    >>> expected_sum(3, 2)
    array([24573., 24576.], dtype=float32)
  """
  value = world_size * (np.arange(size) % _POSITIONS).astype(np.float32)
  value += _POSITIONS * (world_size * (world_size - 1) // 2)
  return value


class Peer(abc.ABC):
  """One way to all-reduce the arrays of all workers, on one worker.

  Args:
    seat: seat of this worker.
  """

  def __init__(self, seat: Seat):
    self.seat = seat
    self.num_bytes = 0

  @property
  def num_elements(self) -> int:
    """Returns the number of elements in the reduced array."""
    return self.num_bytes // FLOAT32_BYTES

  @abc.abstractmethod
  def prepare(self) -> None:
    """Creates input and output of `num_bytes`, and deletes the previous ones."""

  @abc.abstractmethod
  def barrier(self) -> None:
    """Waits until all workers have called it."""

  @abc.abstractmethod
  def call(self) -> object:
    """Runs the timed call. Returns when this worker's result is ready."""

  @abc.abstractmethod
  def result(self, returned: object) -> np.ndarray:
    """Returns the result as an array, from what `call` returned."""

  def before(self, calls: int) -> None:  # noqa: B027
    """Prepares this many calls. This is not timed."""

  @abc.abstractmethod
  def release(self) -> None:
    """Frees the memory of input and output."""

  def check(self, returned: object) -> None:
    """Compares a result with the expected one.

    Raises:
      RuntimeError: if it differs. Its time would mean nothing.
    """
    found, expected = self.result(returned), self.expected()
    if not np.array_equal(found, expected):
      raise RuntimeError(
        f'{type(self).__name__}: rank {self.seat.rank} of '
        f'{self.seat.world_size} has a wrong result for {self.num_bytes} '
        'bytes. Its time would mean nothing.'
      )

  def expected(self) -> np.ndarray:
    """Returns the expected result."""
    return expected_sum(self.seat.world_size, self.num_elements)
