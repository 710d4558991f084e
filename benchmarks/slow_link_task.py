"""What the workers of `slow_links` have in common: data, the net's shape, the clock.

NumPy and the standard library alone, so that torch's workers can import it.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

HIDDEN = (256, 128)
CLASSES = 10
LEARNING_RATE = 1e-3
# Between two looks at the test loss; a multiple of all numbers of local steps.
STEPS_A_LOOK = 64

_INTERFACE = 'eth0'


class Images:
  """Handwritten digits as rows of floats, and the order in which they are read.

  Args:
    path: of an npz file with x_train, y_train, x_test and y_test.
    global_batch_size: rows of a step on all workers.
    seed: of the order, the same on all workers.
  """

  def __init__(self, path: str, global_batch_size: int, seed: int):
    with np.load(path) as file:
      self.x, self.y = _rows(file['x_train']), file['y_train'].astype(np.int64)
      self.test = _rows(file['x_test']), file['y_test'].astype(np.int64)
    self._batch, self._seed = global_batch_size, seed

  def batches(self, steps: int) -> np.ndarray:
    """The rows of each step, `[steps, global_batch_size]`."""
    random = np.random.default_rng(self._seed)
    rows = np.concatenate(
      [
        random.permutation(len(self.x))
        for _ in range(-(-steps * self._batch // len(self.x)))
      ]
    )
    return rows[: steps * self._batch].reshape(steps, self._batch)


def _rows(images: np.ndarray) -> np.ndarray:
  return images.reshape(len(images), -1).astype(np.float32) / 255


def test_loss(
  weights: Sequence[np.ndarray], x: np.ndarray, y: np.ndarray
) -> float:
  """The mean cross-entropy of the net with these kernels and biases.

  Example:

    >>> zeros = [np.zeros([2, 10]), np.zeros(10)]
    >>> round(test_loss(zeros, np.ones([4, 2]), np.arange(4)), 4)
    2.3026
  """
  kernels, biases = weights[::2], weights[1::2]
  for kernel, bias in zip(kernels[:-1], biases[:-1], strict=True):
    x = np.maximum(x @ kernel + bias, 0)
  logits = x @ kernels[-1] + biases[-1]
  logits -= logits.max(axis=1, keepdims=True)
  log_sum = np.log(np.exp(logits).sum(axis=1))
  return float(np.mean(log_sum - logits[np.arange(len(y)), y]))


class Clock:
  """Times training without the looks at the test loss.

  Args:
    images: what to test on.
    weights: returns the kernels and biases now.
  """

  def __init__(self, images: Images, weights: Callable[[], list[np.ndarray]]):
    self._images, self._weights = images, weights
    self._step = 0
    self._seconds: list[float] = []
    self._looks: list[tuple[int, float]] = []
    self._sent = [sent_bytes()]
    self._since = time.perf_counter()

  def tick(self) -> None:
    """Is called at the end of each step."""
    now = time.perf_counter()
    self._seconds.append(now - self._since)
    self._step += 1
    if self._step % STEPS_A_LOOK == 0:
      self._sent.append(sent_bytes())
      loss = test_loss(self._weights(), *self._images.test)
      self._looks.append((self._step, loss))
    self._since = time.perf_counter()

  def report(self) -> dict[str, object]:
    """Seconds of each step, looks as (step, loss), bytes sent between looks."""
    return {
      'seconds': self._seconds,
      'looks': self._looks,
      'sent_bytes': np.diff(self._sent).tolist(),
    }


def summary(
  name: str, rate: str, found: Sequence[Mapping[str, Any]], loss: float
) -> dict[str, Any]:
  """What a run comes to: of the slowest and the most loaded worker."""
  seconds = np.max([f['seconds'] for f in found], axis=0)
  reached = [step for step, at in found[0]['looks'] if at <= loss]
  steps = len(seconds)
  return {
    'peer': name,
    'link_rate': rate,
    # Not the median: local steps are many fast ones and a slow one.
    'mean_ms': 1e3 * float(np.mean(seconds)),
    'kb_a_step': max(sum(f['sent_bytes']) for f in found) / steps / 1e3,
    'steps_to_loss': reached[0] if reached else None,
    'seconds_to_loss': (
      float(np.sum(seconds[: reached[0]])) if reached else None
    ),
    'final_loss': found[0]['looks'][-1][1],
    'looks': found[0]['looks'],
  }


def sent_bytes() -> int:
  """What has left this host so far, headers and acknowledgements included."""
  path = pathlib.Path('/sys/class/net', _INTERFACE, 'statistics/tx_bytes')
  return int(path.read_text()) if path.exists() else 0
