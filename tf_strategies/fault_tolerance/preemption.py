"""`Preemption`: tells all workers, after the same step, that one received SIGTERM.

A scheduler sends SIGTERM and, half a minute later, SIGKILL. The signal sets a flag.
After a step the workers exchange their flags, so that all of them save and exit after
the same step. SIGINT is not handled: Ctrl-C ends the run.
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

# Approximate time between two exchanges.
_CHECK_SECONDS = 0.2
# Most steps between two exchanges: a worker may become slow suddenly.
_MOST_STEPS = 1000


class Preemption:
  """Listens for SIGTERM in this process, and asks the other workers.

  Workers exchange flags in a small collective, at a step that all agree on.

  Args:
    strategy: the strategy whose workers train together.
  """

  # Listens for a `fit` that has not ended: Keras does not report one that raised.
  _in_fit: Preemption | None = None

  def __init__(self, strategy: tf.distribute.Strategy):
    workers = workers_lib.link_of(strategy)
    is_alone = workers is None or workers.world_size == 1
    self.workers = None if is_alone else workers
    self.is_listening = False
    self._handler: Any = None
    self._is_signalled = self._was_seen = False
    self._of_steps = _Question(self.workers)
    # Batches of an evaluation take a different time than training steps.
    self._of_evaluation = _Question(self.workers)

  def listen(self, in_fit: bool = False) -> None:
    """Starts to listen; a second signal has no effect.

    Args:
      in_fit: whether this is for a `fit`. If that raises, nobody calls `stop`; then
        the next `listen` of the process does.
    """
    abandoned, Preemption._in_fit = Preemption._in_fit, None
    is_unseen = abandoned is not None and abandoned.stop()
    self._is_signalled = self._was_seen = False
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
    """Returns whether this object listens for a `fit`, not for a context."""
    return Preemption._in_fit is self

  def stop(self) -> bool:
    """Restores the handler; returns whether a signal has remained unnoticed."""
    if self.listens_in_fit:
      Preemption._in_fit = None
    is_main = threading.current_thread() is threading.main_thread()
    if self.is_listening and is_main:
      # None: it was not set by Python code.
      signal.signal(signal.SIGTERM, self._handler or signal.SIG_DFL)
    self.is_listening = False
    return self._is_signalled and not self._was_seen

  def _on_signal(self, number, frame):
    # No logging: the signal may have interrupted a logging call.
    self._is_signalled = True

  def is_requested(
    self, at_once: bool = False, in_evaluation: bool = False
  ) -> bool:
    """Returns whether a worker was signalled; the same on all, after each step.

    Args:
      at_once: whether to exchange flags regardless of the time, on all workers.
      in_evaluation: whether this is called after a batch of an evaluation.
    """
    question = self._of_evaluation if in_evaluation else self._of_steps
    is_signalled = question.ask(self._is_signalled, at_once)
    self._was_seen = self._was_seen or is_signalled
    return is_signalled


class _Question:
  """Asks the workers now and then whether one of them was signalled."""

  def __init__(self, workers):
    self._workers = workers
    self._steps = 1  # From one exchange to the next.
    self._steps_done = 0
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
    # The slowest worker decides when to ask next.
    mine = np.array([[is_signalled, self._steps_wanted()]], np.int64)
    everyone = self._workers.all_gather(tf.constant(mine), 'preemption')
    signalled, steps = everyone.numpy().T.tolist()
    self._steps, self._answer = min(steps), any(signalled)
    return self._answer

  def _steps_wanted(self) -> int:
    """Returns how many steps this worker does until the next exchange."""
    now = time.monotonic()
    steps = self._steps
    if self._steps_done:
      seconds = max(now - self._asked_at, 1e-6)
      steps = _CHECK_SECONDS * self._steps_done / seconds
    self._asked_at, self._steps_done = now, 0
    return int(min(max(steps, 1), _MOST_STEPS))
