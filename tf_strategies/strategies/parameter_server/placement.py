"""Which parameter server holds which variable: balanced by bytes.

Variables come one by one, so each goes to the server with the fewest bytes so
far (Graham's list scheduling: the fullest server holds at most the mean plus
the largest variable). TensorFlow counts variables instead: with kernel, bias,
kernel, bias and two servers, every kernel lands on server 0.

Scalars go to server 0, which counts steps and metrics: what a step adds there
is one message and becomes visible at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


class Placement:
  """Chooses a server for each variable and knows the load of all.

  Args:
    num_servers: number of parameter servers.

  Example:

    >>> placement = Placement(2)
    >>> [placement.place(size) for size in (400, 4, 400, 4)]
    [0, 1, 1, 0]
    >>> placement.load
    (404, 404)
  """

  def __init__(self, num_servers: int):
    self._load = [0] * num_servers

  @property
  def load(self) -> tuple[int, ...]:
    """Bytes on each server."""
    return tuple(self._load)

  def place(self, num_bytes: int, is_scalar: bool = False) -> int:
    """Returns the server of a new variable. O(servers)."""
    server = 0 if is_scalar else min(range(len(self._load)), key=self._key)
    self._load[server] += num_bytes
    return server

  def add(self, server: int, num_bytes: int) -> None:
    """Counts a variable that must be where another one is."""
    self._load[server] += num_bytes

  def _key(self, server: int) -> tuple[int, int]:
    return self._load[server], server

  def describe(self) -> str:
    """One line for the log.

    >>> Placement(2).describe()
    'ps 0: 0.0 MB, ps 1: 0.0 MB'
    """
    return ', '.join(
      f'ps {i}: {n / 1e6:.1f} MB' for i, n in enumerate(self.load)
    )


def partition_sizes(rows: int, parts: int) -> tuple[int, ...]:
  """Rows of each part of a variable: as even as can be, larger ones first.

  That is TensorFlow's 'div' strategy, so ids of one part are consecutive.

  >>> partition_sizes(10, 4)
  (3, 3, 2, 2)
  """
  parts = min(parts, rows)
  base, extra = divmod(rows, parts)
  return tuple(base + (i < extra) for i in range(parts))


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
  """First row of each part.

  >>> offsets((3, 3, 2))
  (0, 3, 6)
  """
  return tuple(sum(sizes[:i]) for i in range(len(sizes)))


def num_bytes(shape: Sequence[int], item_size: int) -> int:
  """Bytes of a tensor.

  >>> num_bytes((2, 3), 4)
  24
  """
  return math.prod(shape) * item_size
