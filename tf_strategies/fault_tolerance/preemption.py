"""`Preemption`: tells all workers, after the same step, that one has got SIGTERM.

A scheduler sends SIGTERM and, half a minute later, SIGKILL. The signal sets a
flag. After a step the workers exchange their flags, so that all of them can save
and exit after the same one. SIGINT is not handled: Ctrl-C should end the run.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_strategies.cluster import workers as workers_lib

# Steps between two exchanges, at most: a worker may become slow suddenly.
_MOST_STEPS = 1000


class Preemption:
  """Listens for SIGTERM in this process, and asks the other workers.

  Workers exchange flags in a small collective, every `check_seconds`, at a step
  that all agree on.

  Args:
    strategy: whose workers train together.
    check_seconds: approximate time between two exchanges; 0 for each step.
  """

  # Listens for a `fit` that has not ended: Keras does not report one that raised.
  _in_fit: Preemption | None = None

  def __init__(self, strategy: tf.distribute.Strategy, check_seconds: float):
    workers = workers_lib.link_of(strategy)
    is_alone = workers is None or workers.world_size == 1
    self.workers = None if is_alone else workers
    self.is_listening = False
    self._handler: Any = None
    self._signalled_at: float | None = None
    self._was_seen = False
    self._of_steps = _Question(self.workers, check_seconds)
    # Batches of an evaluation take a different time than training steps.
    self._of_evaluation = _Question(self.workers, check_seconds)

  def listen(self, in_fit: bool = False) -> None:
    """Starts to listen; a second signal has no effect.

    Args:
      in_fit: whether `stop` may not be called. The next one that listens does it.
    """
    abandoned, Preemption._in_fit = Preemption._in_fit, None
    is_unseen = abandoned is not None and abandoned.stop()
    self._signalled_at, self._was_seen = None, False
    self.is_listening = True
    if in_fit:
      Preemption._in_fit = self
    if threading.current_thread() is threading.main_thread():
      self._handler = signal.signal(signal.SIGTERM, self._on_signal)
    else:
      logging.warning(
        'SIGTERM does not save: Python receives signals in the main thread, and '
        'this run trains in thread %r.',
        threading.current_thread().name,
      )
    if is_unseen:
      signal.raise_signal(signal.SIGTERM)

  @property
  def listens_in_fit(self) -> bool:
    """Returns whether it listens for a `fit`, and not for a context."""
    return Preemption._in_fit is self

  def stop(self) -> bool:
    """Restores the handler; returns whether nobody has asked since a signal."""
    if self.listens_in_fit:
      Preemption._in_fit = None
    is_main = threading.current_thread() is threading.main_thread()
    if self.is_listening and is_main:
      # None: it was not set by Python code.
      signal.signal(signal.SIGTERM, self._handler or signal.SIG_DFL)
    self.is_listening = False
    return self._signalled_at is not None and not self._was_seen

  def _on_signal(self, number, frame):
    # No logging: the signal may have interrupted a logging call.
    if self._signalled_at is None:
      self._signalled_at = time.monotonic()

  @property
  def seconds_since_signal(self) -> float | None:
    """Seconds since this process was signalled; None if it was not."""
    if self._signalled_at is None:
      return None
    return time.monotonic() - self._signalled_at

  def is_requested(
    self, at_once: bool = False, in_evaluation: bool = False
  ) -> bool:
    """Returns whether a worker was signalled; the same on all, after each step.

    Args:
      at_once: whether to exchange flags regardless of the time, on all workers.
      in_evaluation: whether this is called after a batch of an evaluation.
    """
    question = self._of_evaluation if in_evaluation else self._of_steps
    is_signalled = question.ask(self._signalled_at is not None, at_once)
    self._was_seen = self._was_seen or is_signalled
    return is_signalled


class _Question:
  """Exchanges between workers whether one of them was signalled."""

  def __init__(self, workers, check_seconds: float):
    self._workers = workers
    self._check_seconds = check_seconds
    self._steps = 1  # From one exchange to the next.
    self._steps_done = 0
    self._seconds_a_step = check_seconds
    self._asked_at = time.monotonic()
    self._answer = False

  def ask(self, is_signalled: bool, at_once: bool) -> bool:
    """Returns whether any worker is signalled; the same on all."""
    if self._workers is None:
      return is_signalled
    if not at_once:  # Otherwise there may have been no step.
      self._steps_done += 1
    if self._answer or (self._steps_done < self._steps and not at_once):
      return self._answer
    # The slowest decides on the next: its steps may take longer from now on.
    mine = np.array([is_signalled, -self._steps_wanted()], np.int64)
    everyone = self._workers.combine(tf.constant(mine), 'max', 'preemption')
    signalled, negative_steps = everyone.numpy().tolist()
    self._steps = -negative_steps
    self._answer = bool(signalled)
    return self._answer

  def _steps_wanted(self) -> int:
    now = time.monotonic()
    if self._steps_done:
      self._seconds_a_step = (now - self._asked_at) / self._steps_done
    self._asked_at, self._steps_done = now, 0
    steps = self._check_seconds / max(self._seconds_a_step, 1e-6)
    return int(min(max(steps, 1), _MOST_STEPS))
