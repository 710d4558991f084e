"""Arrays that workers of an elastic job hand to each other."""

from __future__ import annotations

import numpy as np


def read(variable) -> np.ndarray:
  """A copy of what a variable holds."""
  return np.array(variable.numpy())


def broadcast(group, root: int, flat: np.ndarray, what: str) -> np.ndarray:
  """The root's bytes, of which only it knows how many there are."""
  size = np.int64([flat.size])
  size = group.broadcast(size, root, name=f'elastic/{what}/size')[0]
  if group.rank != root:
    flat = np.zeros([size], np.uint8)
  return group.broadcast(flat, root, name=f'elastic/{what}')


def like(flat: np.ndarray, value: np.ndarray) -> np.ndarray:
  """Bytes as an array of the dtype and shape of `value`."""
  return np.frombuffer(flat.tobytes(), value.dtype).reshape(value.shape)
